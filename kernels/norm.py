"""Normalisations, output gate and embedding gather on a GPU: float32 in, fp16 out, ready for the next product.

What overflows fp16 becomes +-65504 and is counted: `overflows` int32 [T] gains the number of such elements of each row.
Results have the same bits for every T. All functions run on torch's current stream, do not synchronise, and may be
captured in a graph once their kernels are loaded. They raise InputError where shapes, dtypes, strides, alignment or
devices do not fit, and EnvironmentFault if a kernel cannot be built or started. docs/kernels/elementwise.md.
"""

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import checks, reference
from .checks import check, check_dimensions, check_rows, launch

SOURCE = "norm.cu"
MAX_COLUMNS = 8192  # what a block holds in registers
MAX_CLUSTER = 8  # blocks, on any card that has clusters
GATED_DIM = 128
LARGEST = 65504.0  # of fp16
_THREADS = 256
_ROW_QUADS = 4  # float4 of a row that a thread holds
_KNOWN_COLUMNS = (5120,)  # rows with code of their own, which need not ask where one ends
_FEW = 64  # tokens
_GATED_WARPS, _GATED_HEADS = 4, 3  # of a block; heads a warp where there are many tokens
_EMBED = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def staged(values: Tensor, overflows: Tensor | None = None) -> Tensor:
    """float32 [T, ...] to fp16 as the kernels do it: finite, what overflows counted a row."""
    if overflows is not None:
        overflows += (values.abs() > LARGEST).flatten(1).sum(1).to(torch.int32)
    return values.clamp(-LARGEST, LARGEST).half()


def row_threads(columns: int) -> int:
    """Threads of the block that normalises a row: the order of its sum, and so its bits, depend on them."""
    return -(-columns // (4 * _ROW_QUADS * 32)) * 32


def _blocks_a_row(warps: int) -> int:
    """Into how many blocks of a cluster a row's warps are cut: what one multiprocessor moves a clock is soon the limit."""
    return max(blocks for blocks in range(1, MAX_CLUSTER + 1) if warps % blocks == 0)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    delta: Tensor | None = None,
    out: Tensor | None = None,
    wide: Tensor | None = None,
    overflows: Tensor | None = None,
) -> Tensor:
    """Zero-centred RMSNorm of the residual stream: y = x / sqrt(mean(x^2) + eps) * (1 + weight).

    x float32 [T, H], H a multiple of 8 up to 8192; `delta` of its shape is added to x, in place, first. weight float32
    [H]. y goes to `out`, fp16 [T, H] (made if None), and to `wide`, float32 [T, H], if given. Rows of x, delta, out and
    wide may stand apart. Returns out.
    """
    out, strides = _checked_rms(x, weight, delta, out, wide, overflows)
    arguments = (x, strides["x"], delta, strides["delta"], weight, out, strides["out"], wide, strides["wide"])
    columns = x.shape[1]
    rest = (overflows, columns, float(eps))
    rows, threads = x.shape[0], row_threads(columns)
    module = checks.module_on(SOURCE, x.device)
    blocks = _blocks_a_row(threads // 32) if module.clusters and rows <= _FEW else 1
    grid = (blocks, rows) if blocks > 1 else rows
    name = f"rms_norm_{columns}" if columns in _KNOWN_COLUMNS else "rms_norm"
    module.launch(name, grid, threads // blocks, (*arguments, *rest), overlap=True, cluster=blocks)
    return out


def rms_norm_reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    delta: Tensor | None = None,
    out: Tensor | None = None,
    wide: Tensor | None = None,
    overflows: Tensor | None = None,
) -> Tensor:
    """What `rms_norm` computes, in torch on any device."""
    out, _ = _checked_rms(x, weight, delta, out, wide, overflows)
    if delta is not None:
        x += delta
    y = reference.rms_norm(x, weight, eps)
    if wide is not None:
        wide.copy_(y)
    return out.copy_(staged(y, overflows))


def _checked_rms(
    x: Tensor, weight: Tensor, delta: Tensor | None, out: Tensor | None, wide: Tensor | None, overflows: Tensor | None
) -> tuple[Tensor, dict[str, int]]:
    check_dimensions("x", x, 2, "[T, H]")
    rows, columns = x.shape
    if columns % 8 or columns > MAX_COLUMNS:
        raise InputError(f"x is {list(x.shape)}: expected a multiple of 8 columns, at most {MAX_COLUMNS}.")
    if out is None:
        out = torch.empty(rows, columns, dtype=torch.float16, device=x.device)
    strides = {"delta": 0, "wide": 0}
    for name, tensor, dtype in (
        ("x", x, torch.float32),
        ("delta", delta, torch.float32),
        ("out", out, torch.float16),
        ("wide", wide, torch.float32),
    ):
        if tensor is not None:
            strides[name] = check_rows(name, tensor, dtype, (rows, columns), x.device)
    check("weight", weight, torch.float32, (columns,), x.device)
    _check_overflows(overflows, rows, x.device)
    return out, strides


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, overflows: Tensor | None = None
) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight * silu(gate), a head at a time: the norm behind the gated delta rule.

    x float32 [T, heads, 128], gate float32 [T, heads * 128] whose rows may stand apart, weight float32 [128]. Returns
    fp16 [T, heads * 128].
    """
    out, stride = _checked_gated(x, gate, weight, out, overflows)
    tokens, heads, _ = x.shape
    few = tokens <= _FEW  # then a warp a head; many: more bytes asked for at a time
    heads_a_block = _GATED_WARPS * (1 if few else _GATED_HEADS)
    launch(
        SOURCE,
        "gated_rms_norm" if few else "gated_rms_norm_many",
        (tokens, -(-heads // heads_a_block)),
        32 * _GATED_WARPS,
        (x, gate, stride, weight, out, overflows, heads, float(eps)),
        x.device,
        overlap=True,
    )
    return out


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, overflows: Tensor | None = None
) -> Tensor:
    """What `gated_rms_norm` computes, in torch on any device."""
    out, _ = _checked_gated(x, gate, weight, out, overflows)
    y = reference.gated_rms_norm(x, gate.reshape(x.shape), weight, eps)
    return out.copy_(staged(y.flatten(1), overflows))


def _checked_gated(
    x: Tensor, gate: Tensor, weight: Tensor, out: Tensor | None, overflows: Tensor | None
) -> tuple[Tensor, int]:
    check_dimensions("x", x, 3, f"[T, heads, {GATED_DIM}]")
    tokens, heads, _ = x.shape
    check("x", x, torch.float32, (tokens, heads, GATED_DIM), x.device)
    stride = check_rows("gate", gate, torch.float32, (tokens, heads * GATED_DIM), x.device)
    check("weight", weight, torch.float32, (GATED_DIM,), x.device)
    if out is None:
        out = torch.empty(tokens, heads * GATED_DIM, dtype=torch.float16, device=x.device)
    check("out", out, torch.float16, (tokens, heads * GATED_DIM), x.device)
    _check_overflows(overflows, tokens, x.device)
    return out, stride


def output_gate(
    attended: Tensor, gate: Tensor, *, out: Tensor | None = None, overflows: Tensor | None = None
) -> Tensor:
    """attended * sigmoid(gate): float32 [T, heads, D] each, D a multiple of 8. Returns fp16 [T, heads * D].

    The heads of `gate` may stand apart, as the second halves of `[query | gate]` do.
    """
    out = _checked_gate(attended, gate, out, overflows)
    tokens, heads, dim = attended.shape
    arguments = (attended, gate, gate.stride(0), gate.stride(1), out, overflows, heads, dim)
    launch(SOURCE, "output_gate", tokens, _THREADS, arguments, attended.device)
    return out


def output_gate_reference(
    attended: Tensor, gate: Tensor, *, out: Tensor | None = None, overflows: Tensor | None = None
) -> Tensor:
    """What `output_gate` computes, in torch on any device."""
    out = _checked_gate(attended, gate, out, overflows)
    return out.copy_(staged(reference.output_gate(attended, gate).flatten(1), overflows))


def _checked_gate(attended: Tensor, gate: Tensor, out: Tensor | None, overflows: Tensor | None) -> Tensor:
    check_dimensions("attended", attended, 3, "[T, heads, D]")
    tokens, heads, dim = attended.shape
    if dim % 8:
        raise InputError(f"attended is {list(attended.shape)}: expected heads of a multiple of 8 dimensions.")
    check("attended", attended, torch.float32, (tokens, heads, dim), attended.device)
    check_heads("gate", gate, (tokens, heads, dim), attended.device)
    if out is None:
        out = torch.empty(tokens, heads * dim, dtype=torch.float16, device=attended.device)
    check("out", out, torch.float16, (tokens, heads * dim), attended.device)
    _check_overflows(overflows, tokens, attended.device)
    return out


def check_heads(name: str, tensor: Tensor, shape: tuple[int, int, int], device: torch.device) -> None:
    """Refuse a float32 tensor [T, heads, D] whose tokens or heads do not start at multiples of 16 bytes (InputError)."""
    if tuple(tensor.shape) != shape or tensor.dtype != torch.float32 or tensor.device != device:
        raise InputError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: expected torch.float32 {list(shape)} on "
            f"{device}."
        )
    if tensor.stride(2) != 1 or tensor.stride(0) % 4 or tensor.stride(1) % 4 or tensor.data_ptr() % 16:
        raise InputError(
            f"{name} {list(shape)}: strides {list(tensor.stride())}: expected contiguous heads at multiples of 16 bytes."
        )


def embed(tokens: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows of `table` [V, H] (bf16, fp16 or float32, H a multiple of 8) for tokens int32 [T] -> float32 [T, H].

    A token outside of the table gives a row of NaN: an id cannot be checked without waiting for the device.
    """
    out = _checked_embed(tokens, table, out)
    count, columns = tokens.shape[0], table.shape[1]
    few = count <= _FEW
    name = f"embed_{'' if few else 'many_'}{_EMBED[table.dtype]}"
    parts = -(-columns // (4 * _THREADS)) if few else 1
    launch(SOURCE, name, (count, parts), _THREADS, (tokens, table, out, *table.shape), table.device, overlap=True)
    return out


def embed_reference(tokens: Tensor, table: Tensor, out: Tensor | None = None) -> Tensor:
    """What `embed` computes, in torch on any device."""
    out = _checked_embed(tokens, table, out)
    inside = (tokens >= 0) & (tokens < table.shape[0])
    rows = reference.embed(torch.where(inside, tokens, 0).long(), table).float()
    return out.copy_(torch.where(inside[:, None], rows, float("nan")))


def _checked_embed(tokens: Tensor, table: Tensor, out: Tensor | None) -> Tensor:
    check_dimensions("tokens", tokens, 1, "[T]")
    check_dimensions("table", table, 2, "[V, H]")
    if table.dtype not in _EMBED or table.shape[1] % 8:
        raise InputError(f"table is {table.dtype} {list(table.shape)}: expected bf16, fp16 or float32 [V, 8 n].")
    check("table", table, table.dtype, tuple(table.shape), table.device)
    check("tokens", tokens, torch.int32, tuple(tokens.shape), table.device)
    if out is None:
        out = torch.empty(len(tokens), table.shape[1], dtype=torch.float32, device=table.device)
    check("out", out, torch.float32, (len(tokens), table.shape[1]), table.device)
    return out


def _check_overflows(overflows: Tensor | None, rows: int, device: torch.device) -> None:
    if overflows is not None:
        check("overflows", overflows, torch.int32, (rows,), device)
