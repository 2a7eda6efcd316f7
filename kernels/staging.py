"""What stands between a prompt's matrix products on a GPU: fp16 results to float32, and the gated MLP.

An infinity, a product that overflowed fp16, becomes +-65504 and is counted: `overflows` int32 [T] gains the number of such
elements of each row. Functions run on torch's current stream and do not synchronise. They raise InputError where shapes,
dtypes, strides or devices do not fit, and EnvironmentFault if a kernel cannot be built or started.
"""

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import reference
from .checks import check, check_dimensions, check_rows, launch
from .norm import LARGEST, staged

SOURCE = "staging.cu"
_THREADS = 256


def widen(part: Tensor, out: Tensor, *, overflows: Tensor | None = None) -> Tensor:
    """part float16 [T, N] to out float32 [T, N], whose rows may stand apart; N a multiple of 8, or any on the CPU."""
    stride = _checked_widen(part, out, overflows)
    rows, columns = part.shape
    if columns % 8 or stride % 4 or out.data_ptr() % 16:
        return widen_reference(part, out, overflows=overflows)  # a few columns, as those of the delta rule's gates
    launch(SOURCE, "staging_widen", rows, _THREADS, (part, out, stride, overflows, columns), part.device)
    return out


def widen_reference(part: Tensor, out: Tensor, *, overflows: Tensor | None = None) -> Tensor:
    """What `widen` does, in torch on any device."""
    _checked_widen(part, out, overflows)
    wide = part.float()
    staged(wide, overflows)  # counts
    return out.copy_(wide.clamp(-LARGEST, LARGEST))


def silu_product(gate: Tensor, up: Tensor, out: Tensor | None = None, *, overflows: Tensor | None = None) -> Tensor:
    """silu(gate) * up, float16 [T, N] each, N a multiple of 8; `out` may be one of them."""
    out = _checked_product(gate, up, out, overflows)
    rows, columns = gate.shape
    launch(SOURCE, "staging_swiglu", rows, _THREADS, (gate, up, out, overflows, columns), gate.device)
    return out


def silu_product_reference(
    gate: Tensor, up: Tensor, out: Tensor | None = None, *, overflows: Tensor | None = None
) -> Tensor:
    """What `silu_product` computes, in torch on any device."""
    out = _checked_product(gate, up, out, overflows)
    factors = []
    for part in (gate, up):
        staged(part.float(), overflows)  # counts
        factors.append(part.float().clamp(-LARGEST, LARGEST))
    return out.copy_(staged(reference.silu(factors[0]) * factors[1], overflows))


def _checked_widen(part: Tensor, out: Tensor, overflows: Tensor | None) -> int:
    check_dimensions("part", part, 2, "[T, N]")
    check("part", part, torch.float16, tuple(part.shape), part.device)
    _check_overflows(overflows, part)
    return check_rows("out", out, torch.float32, tuple(part.shape), part.device, 4)


def _checked_product(gate: Tensor, up: Tensor, out: Tensor | None, overflows: Tensor | None) -> Tensor:
    check_dimensions("gate", gate, 2, "[T, N]")
    if gate.shape[1] % 8:
        raise InputError(f"gate is {list(gate.shape)}: expected a multiple of 8 columns.")
    out = torch.empty_like(gate) if out is None else out
    for name, tensor in (("gate", gate), ("up", up), ("out", out)):
        check(name, tensor, torch.float16, tuple(gate.shape), gate.device)
    _check_overflows(overflows, gate)
    return out


def _check_overflows(overflows: Tensor | None, rows: Tensor) -> None:
    if overflows is not None:
        check("overflows", overflows, torch.int32, (rows.shape[0],), rows.device)
