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


def silu_product(
    gate: Tensor,
    up: Tensor,
    out: Tensor | None = None,
    *,
    rests: tuple[float, float] = (1.0, 1.0),
    overflows: Tensor | None = None,
) -> Tensor:
    """silu(gate * rests[0]) * (up * rests[1]), float16 [T, N] each, N a multiple of 8; `out` may be one of them.

    Rows of gate and up may stand apart, equally far, those of `out` may not.
    """
    out, stride = _checked_product(gate, up, out, overflows)
    rows, columns = gate.shape
    arguments = (gate, up, stride, *map(float, rests), out, overflows, columns)
    launch(SOURCE, "staging_swiglu", rows, _THREADS, arguments, gate.device)
    return out


def silu_product_reference(
    gate: Tensor,
    up: Tensor,
    out: Tensor | None = None,
    *,
    rests: tuple[float, float] = (1.0, 1.0),
    overflows: Tensor | None = None,
) -> Tensor:
    """What `silu_product` computes, in torch on any device."""
    out, _ = _checked_product(gate, up, out, overflows)
    factors = []
    for part, rest in zip((gate, up), rests, strict=True):
        wide = part.float() * rest
        staged(wide, overflows)  # counts
        factors.append(wide.clamp(-LARGEST, LARGEST))
    return out.copy_(staged(reference.silu(factors[0]) * factors[1], overflows))


def _checked_widen(part: Tensor, out: Tensor, overflows: Tensor | None) -> int:
    check_dimensions("part", part, 2, "[T, N]")
    check("part", part, torch.float16, tuple(part.shape), part.device)
    _check_overflows(overflows, part)
    return check_rows("out", out, torch.float32, tuple(part.shape), part.device, 4)


def _checked_product(gate: Tensor, up: Tensor, out: Tensor | None, overflows: Tensor | None) -> tuple[Tensor, int]:
    check_dimensions("gate", gate, 2, "[T, N]")
    if gate.shape[1] % 8:
        raise InputError(f"gate is {list(gate.shape)}: expected a multiple of 8 columns.")
    out = torch.empty(gate.shape, dtype=torch.float16, device=gate.device) if out is None else out
    shape, device = tuple(gate.shape), gate.device
    strides = [check_rows(name, part, torch.float16, shape, device) for name, part in (("gate", gate), ("up", up))]
    check("out", out, torch.float16, shape, device)
    if strides[0] != strides[1]:
        raise InputError(f"rows of gate stand {strides[0]} apart, those of up {strides[1]}: expected the same.")
    _check_overflows(overflows, gate)
    return out, strides[0]


def _check_overflows(overflows: Tensor | None, rows: Tensor) -> None:
    if overflows is not None:
        check("overflows", overflows, torch.int32, (rows.shape[0],), rows.device)
