"""Float64 oracles in numpy, written from the formulas alone: one scalar loop where a loop is the definition.

They share no code with any backend and are as slow as they are plain. Each is paired with a criterion in the tests.
"""

from .attention import attention
from .delta import causal_conv, delta_gates, delta_rule
from .norm import gated_rms_norm, rms_norm
from .rope import rope

__all__ = ["attention", "causal_conv", "delta_gates", "delta_rule", "gated_rms_norm", "rms_norm", "rope"]
