"""Reference operations in torch, float32, any device; one function each, with the signature a CUDA kernel can take over.

Bits: every operation used while decoding gives a token the same bits whether the token stands alone or beside others.
Three rules keep it so. Matrix products and attention run row by row where a batched product would choose its order of
summation by the number of rows. Transcendental functions are built from `exp` and `log1p`, whose vector and scalar
forms agree, because torch's `sigmoid`, `silu` and `softplus` round differently in the tail of a buffer. Nothing relies
on fused multiply-add.
"""

from .activation import sigmoid, silu, silu_gate, softplus
from .attention import attend_block, attend_rows, output_gate, write_kv
from .convolution import causal_conv
from .delta import delta_gates, delta_rule_chunked, delta_rule_steps
from .linear import embed, linear_block, linear_rows
from .norm import gated_rms_norm, l2_normalize, rms_norm
from .philox import philox4x32, uniform
from .rope import apply_rope, inverse_frequencies, mrope_axes, rope_angles, rope_table
from .sampling import adjust_logits, distribution, draw, greedy, log_probabilities, residual
from .vision import (
    attend_all,
    gelu,
    gelu_tanh,
    grid_angles,
    grid_positions,
    layer_norm,
    linear_bias,
    resample_table,
)

__all__ = [
    "adjust_logits",
    "apply_rope",
    "attend_all",
    "attend_block",
    "attend_rows",
    "causal_conv",
    "delta_gates",
    "delta_rule_chunked",
    "delta_rule_steps",
    "distribution",
    "draw",
    "embed",
    "gated_rms_norm",
    "gelu",
    "gelu_tanh",
    "greedy",
    "grid_angles",
    "grid_positions",
    "inverse_frequencies",
    "l2_normalize",
    "layer_norm",
    "linear_bias",
    "linear_block",
    "linear_rows",
    "log_probabilities",
    "mrope_axes",
    "output_gate",
    "philox4x32",
    "resample_table",
    "residual",
    "rms_norm",
    "rope_angles",
    "rope_table",
    "sigmoid",
    "silu",
    "silu_gate",
    "softplus",
    "uniform",
    "write_kv",
]
