"""The few logits that can decide a token, out of a rank's share of the vocabulary: what two ranks gather in place of all.

A greedy token is among each rank's first, and whatever a top-k of up to `CANDIDATES` leaves is among each rank's first
`CANDIDATES`: in the order of the logits after bias and penalties, equal ones in the order of their ids, which is the order
that `decide` cuts by. `spread` lays them out over the whole vocabulary, minus infinity elsewhere; what is drawn from there has
the bits that it would have from whole logits. docs/kernels/sampling.md.
"""

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from .checks import check, check_dimensions, check_rows, launch
from .sampling import HostLane
from .sampling_state import MAX_DRAFTS, SLICES, WISHES, Cuts, Decision, LaneSampling, WishPointers, pointers

SOURCE = "candidates.cu"
CANDIDATES = 64  # of a rank and row
_SORTED = 1024  # keys a block
_THREADS = 256
_MOST_IDS = 1 << 24  # ids travel as float32


def candidates(
    logits: Tensor,
    decision: Decision,
    sampling: LaneSampling,
    *,
    first: int = 0,
    ids: Tensor | None = None,
    open_rows: bool = False,
) -> Tensor:
    """The first `CANDIDATES` of every row: float32 [R, 2 * CANDIDATES], logits, then their ids; -1: there are no more.

    logits     float32 [R, n], rows may stand apart: of the ids `ids` int32 [n], ascending, or first .. first + n - 1; ids that
               `sampling` has no place for cannot be drawn
    decision   of which lane a row is (-1: none, and no candidates), and what stands before it
    open_rows  minus infinity is a token that cannot come; else, like every logit that is not finite, it comes first, as NaN

    Runs on torch's current stream without synchronising, and may be captured. Raises InputError where shapes, dtypes,
    strides or devices do not fit, EnvironmentFault if a kernel cannot start.
    """
    stride = _checked(logits, decision, sampling, first, ids)
    rows, count = logits.shape
    device, vocabulary = logits.device, sampling.seen.shape[1]
    wishes = pointers(WishPointers, {name: getattr(sampling, name) for name in WISHES})
    blocks = -(-count // _SORTED)
    keys = torch.empty(rows, blocks * CANDIDATES, dtype=torch.int64, device=device)
    arguments = (
        *(logits, stride, count, ids, first, decision.row_lanes, decision.drafted, sampling.seen, sampling.counts),
        *(sampling.bias, int(open_rows), wishes, vocabulary, keys),
    )
    launch(SOURCE, "candidates_first", (blocks, rows), _THREADS, arguments, device)
    while keys.shape[1] > _SORTED:
        blocks = -(-keys.shape[1] // _SORTED)
        fewer = torch.empty(rows, blocks * CANDIDATES, dtype=torch.int64, device=device)
        launch(SOURCE, "candidates_narrow", (blocks, rows), _THREADS, (keys, keys.shape[1], fewer), device)
        keys = fewer
    out = torch.empty(rows, 2 * CANDIDATES, device=device)
    launch(SOURCE, "candidates_last", rows, _THREADS, (keys, keys.shape[1], logits, stride, ids, first, out), device)
    return out


def candidates_reference(
    logits: Tensor,
    decision: Decision,
    sampling: LaneSampling,
    *,
    first: int = 0,
    ids: Tensor | None = None,
    open_rows: bool = False,
) -> Tensor:
    """What `candidates` gives, in torch on any device; reads the decision on the host."""
    _checked(logits, decision, sampling, first, ids)
    vocabulary = sampling.seen.shape[1]
    places = torch.arange(first, first + logits.shape[1], device=logits.device) if ids is None else ids.long()
    drawable = (places >= 0) & (places < vocabulary)
    places = places[drawable]
    out = logits.new_full((len(logits), 2, CANDIDATES), -torch.inf)
    out[:, 1] = -1
    for row, lane in enumerate(decision.row_lanes.tolist()):
        if lane < 0:
            continue
        own = logits[row][drawable]
        whole = own.new_full((vocabulary,), -torch.inf).index_copy_(0, places, own)
        adjusted = HostLane(sampling, lane, Cuts()).adjusted(whole, decision.drafted[row].tolist())[places]
        broken = ~(torch.isfinite(own) | ((own < 0) & open_rows))
        order = torch.sort(adjusted.masked_fill(broken, torch.inf), descending=True, stable=True)[1][:CANDIDATES]
        out[row, 0, : len(order)] = own.masked_fill(broken, torch.nan)[order]
        out[row, 1, : len(order)] = places[order].float()
    return out.flatten(1)


def spread(gathered: Tensor, out: Tensor) -> Tensor:
    """gathered float32 [R, ranks * 2 * CANDIDATES], what `candidates` gave on each rank, to out float32 [R, V]: returned.

    Rows of `out` may stand apart; where there is no candidate it gets minus infinity. Raises as `candidates`.
    """
    stride, ranks = _checked_spread(gathered, out)
    grid = (SLICES, out.shape[0])
    launch(SOURCE, "candidates_spread", grid, _THREADS, (gathered, ranks, out, stride, out.shape[1]), out.device)
    return out


def spread_reference(gathered: Tensor, out: Tensor) -> Tensor:
    """What `spread` does, in torch on any device."""
    _, ranks = _checked_spread(gathered, out)
    parts = gathered.view(len(gathered), ranks, 2, CANDIDATES)
    values, places = parts[:, :, 0].flatten(1), parts[:, :, 1].flatten(1).long()
    out.fill_(-torch.inf)
    for row, value, place in zip(out, values, places, strict=True):
        inside = (place >= 0) & (place < out.shape[1])
        row[place[inside]] = value[inside]
    return out


def _checked(logits: Tensor, decision: Decision, sampling: LaneSampling, first: int, ids: Tensor | None) -> int:
    check_dimensions("logits", logits, 2, "[R, n]")
    (rows, count), device = logits.shape, logits.device
    stride = check_rows("logits", logits, torch.float32, (rows, count), device, 4)
    check_dimensions("seen", sampling.seen, 2, "[lanes, V]")
    lanes, vocabulary = sampling.seen.shape
    check("row_lanes", decision.row_lanes, torch.int32, (rows,), device)
    check("drafted", decision.drafted, torch.int32, (rows, MAX_DRAFTS), device)
    for name, dtype in (("seen", torch.uint8), ("counts", torch.float32), ("bias", torch.float32)):
        if (tensor := getattr(sampling, name)) is not None:
            check(name, tensor, dtype, (lanes, vocabulary), device)
    if ids is not None:
        check("ids", ids, torch.int32, (count,), device)
    if not 0 <= first < _MOST_IDS or vocabulary > _MOST_IDS:
        raise InputError(f"ids from {first} of {vocabulary}: expected at most {_MOST_IDS}, which travel as float32.")
    return stride


def _checked_spread(gathered: Tensor, out: Tensor) -> tuple[int, int]:
    check_dimensions("out", out, 2, "[R, V]")
    check_dimensions("gathered", gathered, 2, "[R, ranks * candidates]")
    width = 2 * CANDIDATES
    ranks = gathered.shape[1] // width
    check("gathered", gathered, torch.float32, (out.shape[0], ranks * width), out.device)
    return check_rows("out", out, torch.float32, tuple(out.shape), out.device, 4), ranks
