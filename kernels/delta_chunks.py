"""A prompt's tokens through the gated delta rule 64 at a time, on tensor cores (`delta_chunks.cu`).

Operands are fp16, sums and state float32: a relative L2 error of about 5e-4, where the recurrence has 1e-6. Chunks begin at
multiples of 64 of the position, so a prompt that is cut there, and only there, keeps its bits. docs/kernels/delta.md.
"""

import torch
from torch import Tensor

from . import checks
from .checks import launch

SOURCE = "delta_chunks.cu"
CHUNK = 64
PIECE = 2048  # rows at a time: what they need beside, 73 KB a value head and chunk, is bounded
HEAD = 128
EPS = 1e-6  # of the normalisation of queries and keys
_CONVOLVE_THREADS, _PREPARE_THREADS, _SCAN_THREADS = 128, 256, 256
_VALUES = 32  # rows of a head's state that a block has
PREPARE_BYTES = 3 * CHUNK * (HEAD + 8) * 2 + 2 * CHUNK * (CHUNK + 4) * 4 + 2 * CHUNK * 4
_SCAN_BYTES = _VALUES * (HEAD + 8) * 2 + 2 * CHUNK * (_VALUES + 8) * 2 + 8 * _VALUES * 20 * 4
_STAGED_BYTES = 3 * CHUNK * (HEAD + 8) * 2 + CHUNK * (CHUNK + 8) * 2  # more, where copies are asynchronous


def prefill_chunks(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    stride: int,
    layer: tuple[Tensor, Tensor, Tensor],
    memory: tuple[Tensor, Tensor, Tensor],
    lane: int,
    position: int,
    out: Tensor,
) -> None:
    """The whole of `delta_prefill` in chunks, for checked arguments.

    mixed, a, b: rows `stride` apart; layer: conv, a_log, dt_bias; memory: state, rows, turn of `DeltaState` and `Progress`;
    position: of the first token; out float32 [T, value heads, 128]. Raises EnvironmentFault if a kernel cannot start.
    """
    begin = 0
    while begin < mixed.shape[0]:
        lead = (position + begin) % CHUNK
        end = min(mixed.shape[0], begin + PIECE - lead)
        part = slice(begin, end)
        _piece(mixed[part], a[part], b[part], stride, layer, memory, lane, lead, out[part])
        begin = end


def workspace_bytes(tokens: int, value_heads: int, heads: int) -> int:
    """Working memory of a call of `tokens` tokens, wherever in a chunk they begin; `heads`: all that are convolved."""
    rows = -(-(min(tokens, PIECE) + CHUNK - 1) // CHUNK) * CHUNK
    return rows * (2 * HEAD * heads + value_heads * (2 * 2 * HEAD + 2 * CHUNK + 4 * HEAD + 4 * 4))


def scan_shared_bytes(arch: int) -> int:
    """Dynamic shared memory of a block of `chunks_scan` for sm_`arch`: with a chunk's operands where copies are asynchronous."""
    return _SCAN_BYTES + (_STAGED_BYTES if arch >= 80 else 0)


def _piece(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    stride: int,
    layer: tuple[Tensor, Tensor, Tensor],
    memory: tuple[Tensor, Tensor, Tensor],
    lane: int,
    lead: int,
    out: Tensor,
) -> None:
    state, rows, turn = memory
    device, tokens, (lanes, heads) = mixed.device, mixed.shape[0], state.shape[:2]
    key_heads = (mixed.shape[1] // HEAD - heads) // 2
    chunks = -(-(lead + tokens) // CHUNK)
    padded = chunks * CHUNK

    def halves(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float16, device=device)

    def wide(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    convolved, gates = halves(padded, mixed.shape[1]), wide(2, heads, padded)
    launch(
        SOURCE,
        "chunks_convolve",
        (mixed.shape[1] // HEAD + 1, chunks),
        _CONVOLVE_THREADS,
        (
            *(mixed, a, b, stride, *layer, rows, lanes, lane, turn, convolved, gates, lead, tokens),
            *(key_heads, heads, EPS),
        ),
        device,
    )
    w, grown, weights = halves(heads, padded, HEAD), halves(heads, padded, HEAD), halves(heads, padded, CHUNK)
    u, factors = wide(heads, padded, HEAD), wide(2, heads, padded)
    launch(
        SOURCE,
        "chunks_prepare",
        (chunks, heads),
        _PREPARE_THREADS,
        (convolved, gates, w, grown, u, weights, factors, key_heads),
        device,
        PREPARE_BYTES,
    )
    arch = int(checks.module_on(SOURCE, device).arch.partition("_")[2])
    launch(
        SOURCE,
        "chunks_scan",
        (HEAD // _VALUES, heads),
        _SCAN_THREADS,
        (
            *(mixed, stride, rows, state, lanes, lane, turn, convolved, w, grown, u, weights, factors),
            *(out, chunks, lead, tokens, key_heads),
        ),
        device,
        scan_shared_bytes(arch),
    )
