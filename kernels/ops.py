"""The fused operations of the model under one name each: the kernels, or their torch references.

Both have the same signatures, so that what is built on them runs on a GPU and, slowly, anywhere. The references take
over where the tensors are on a CPU; on a GPU they show what the kernels should give.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import (
    attention,
    candidates,
    delta,
    delta_chunks,
    linear,
    logprobs,
    norm,
    plain,
    plain_attention,
    prefill,
    prefill_attention,
    rope,
    round,
    sampling,
    staging,
    wide,
)
from .checks import module_on
from .sampling_state import Drawn


@dataclass(frozen=True)
class Ops:
    """One function an operation; the module of each has its shapes, dtypes and errors."""

    embed: Callable[..., Tensor]
    rms_norm: Callable[..., Tensor]
    gated_rms_norm: Callable[..., Tensor]
    linear: Callable[..., Tensor]
    linears: Callable[..., list[Tensor]]
    swiglu: Callable[..., Tensor]
    linear_block: Callable[..., Tensor]
    linear_blocks: Callable[..., Sequence[Tensor]]
    swiglu_block: Callable[..., Tensor]
    widen: Callable[..., Tensor]
    silu_product: Callable[..., Tensor]
    qkv_rope: Callable[..., Tensor]
    decode_attention: Callable[..., Tensor]
    prefill_attention: Callable[..., Tensor]
    plain_attention: Callable[..., Tensor]
    plain_prefill_attention: Callable[..., Tensor]
    delta_decode: Callable[..., Tensor]
    delta_prefill: Callable[..., Tensor]
    decide: Callable[..., Drawn]
    log_probabilities: Callable[..., tuple[Tensor, Tensor, Tensor]]
    round_rows: Callable[..., None]
    round_advance: Callable[..., None]
    scatter_logits: Callable[..., Tensor]
    candidates: Callable[..., Tensor]
    spread: Callable[..., Tensor]


cuda_ops = Ops(
    embed=norm.embed,
    rms_norm=norm.rms_norm,
    gated_rms_norm=norm.gated_rms_norm,
    linear=linear.linear,
    linears=linear.linears,
    swiglu=linear.swiglu,
    linear_block=prefill.linear_block,
    linear_blocks=prefill.linear_blocks,
    swiglu_block=prefill.swiglu_block,
    widen=staging.widen,
    silu_product=staging.silu_product,
    qkv_rope=rope.qkv_rope,
    decode_attention=attention.decode_attention,
    prefill_attention=prefill_attention.prefill_attention,
    plain_attention=plain_attention.plain_attention,
    plain_prefill_attention=plain_attention.plain_prefill_attention,
    delta_decode=delta.delta_decode,
    delta_prefill=delta.delta_prefill,
    decide=sampling.decide,
    log_probabilities=logprobs.log_probabilities,
    round_rows=round.round_rows,
    round_advance=round.round_advance,
    scatter_logits=round.scatter_logits,
    candidates=candidates.candidates,
    spread=candidates.spread,
)
torch_ops = Ops(
    embed=norm.embed_reference,
    rms_norm=norm.rms_norm_reference,
    gated_rms_norm=norm.gated_rms_norm_reference,
    linear=linear.linear_reference,
    linears=linear.linears_reference,
    swiglu=linear.swiglu_reference,
    linear_block=prefill.linear_block_reference,
    linear_blocks=prefill.linear_blocks_reference,
    swiglu_block=prefill.swiglu_block_reference,
    widen=staging.widen_reference,
    silu_product=staging.silu_product_reference,
    qkv_rope=rope.qkv_rope_reference,
    decode_attention=attention.decode_attention_reference,
    prefill_attention=prefill_attention.prefill_attention_reference,
    plain_attention=attention.decode_attention_reference,
    plain_prefill_attention=prefill_attention.prefill_attention_reference,
    delta_decode=delta.delta_decode_reference,
    delta_prefill=delta.delta_prefill_reference,
    decide=sampling.decide_reference,
    log_probabilities=logprobs.log_probabilities_reference,
    round_rows=round.round_rows_reference,
    round_advance=round.round_advance_reference,
    scatter_logits=round.scatter_logits_reference,
    candidates=candidates.candidates_reference,
    spread=candidates.spread_reference,
)


SOURCES = (
    *(norm.SOURCE, rope.SOURCE, attention.SOURCE, delta.SOURCE, delta.APART_SOURCE, delta_chunks.SOURCE),
    *(plain.SOURCE, wide.SOURCE, prefill_attention.SOURCE, prefill_attention.OWN_SOURCE, plain_attention.SOURCE),
    *(sampling.DISTRIBUTING, sampling.SHORTENING, sampling.DECIDING, candidates.SOURCE, logprobs.SOURCE, round.SOURCE),
    staging.SOURCE,
)


def prepare(device: torch.device) -> None:
    """Compile and load the kernels of every operation, so that nothing waits for a compiler later.

    Raises EnvironmentFault if one cannot be had.
    """
    linear.prepare(device)
    for source in SOURCES:
        module_on(source, device)


def ops_for(device: torch.device) -> Ops:
    """The kernels on a CUDA device, the references elsewhere."""
    return cuda_ops if device.type == "cuda" else torch_ops
