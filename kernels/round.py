"""The bookkeeping of decode rounds on a GPU: which rows a pass has, and what became of them, without the host.

A round of S sequences reads what the last one left with the draft layer (`KEPT`), drafts token by token (`DRAFT`), and
verifies the newest token and its drafts (`VERIFY`). Before each pass `round_rows` writes its rows and the decision behind
it; `round_advance` moves the lanes on. Nothing is read by the host, so that one round can be started before the numbers
of the last are known. Every function runs on torch's current stream, does not synchronise and may be captured.
docs/kernels/round.md.
"""

import math

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from .checks import check, check_dimensions, check_rows, launch
from .delta import Progress
from .kvcache import PAGE
from .round_state import (
    DRAFT,
    KEPT,
    LANES,
    MOST_ROWS,
    PASS,
    STOPS,
    VERIFY,
    DrawPointers,
    Draws,
    LanePointers,
    Lanes,
    Pass,
    PassPointers,
)
from .sampling_state import MAX_DRAFTS, Drawn, Pointers, pointers

SOURCE = "round.cu"
REPORT = 8  # numbers a sequence: produced, judged (-1: the lane rested), tokens
_THREADS = 256


def round_rows(
    order: Tensor,
    lanes: Lanes,
    draws: Draws,
    into: Pass,
    produced: Tensor,
    *,
    kind: int,
    drafts: int,
    step: int = 0,
    window: int = 0,
    certain: bool = False,
    copies: bool = False,
) -> None:
    """Write the rows of a pass and the decision behind it.

    order     int32 [S], lane of each sequence, -1: none
    kind      KEPT: rows for the draft layer, and the decision on draft 0; DRAFT: the row of draft `step` - 1, and the
              decision on draft `step`; VERIFY: the newest token and its drafts, and the decision on all of them
    drafts    drafts of the round; a lane near its limit has fewer
    produced  int32 [S], of the decision behind the pass: set to 0
    window    pages of context that the pass attends to, besides the newest; 0: all. Places and starts count from the first
    certain   the drafts were given, or are the best ids
    copies    fill the pass's tables, too

    Raises InputError where shapes, dtypes or devices do not fit, EnvironmentFault if the kernel cannot start.
    """
    rows = _checked_rows(order, lanes, draws, into, produced, kind, drafts, step, window)
    arguments = (
        *(
            order,
            _pointers(LanePointers, lanes),
            _pointers(DrawPointers, draws),
            _pointers(PassPointers, into),
            produced,
        ),
        *(lanes.lengths.shape[0], lanes.tables.shape[1], kind, step, rows, drafts, window, int(certain), int(copies)),
    )
    launch(SOURCE, "round_rows", order.shape[0], _THREADS, arguments, order.device)


def round_rows_reference(
    order: Tensor,
    lanes: Lanes,
    draws: Draws,
    into: Pass,
    produced: Tensor,
    *,
    kind: int,
    drafts: int,
    step: int = 0,
    window: int = 0,
    certain: bool = False,
    copies: bool = False,
) -> None:
    """What `round_rows` writes, in torch on any device; reads the lanes on the host."""
    rows = _checked_rows(order, lanes, draws, into, produced, kind, drafts, step, window)
    decided = rows if kind == VERIFY else 1
    sequences = order.shape[0]
    for sequence, own in enumerate(order.tolist()):
        length = int(lanes.lengths[own]) if own >= 0 else 0
        wanted = min(1 + drafts, int(lanes.limits[own]) - length - 1) if own >= 0 else 0
        lane = own if wanted > 0 else -1
        kept = int(lanes.kept[lane]) if lane >= 0 else 0
        known: list[int] = []
        for index in range(0 if kind == KEPT or lane < 0 else wanted - 1 if kind == VERIFY else min(step, wanted - 1)):
            token = int(draws.tokens[index, sequence, 0]) if int(draws.produced[index, sequence]) > 0 else -1
            if token < 0:
                break
            known.append(token)
        drafting = lane >= 0 and kind != VERIFY and len(known) == step and step < wanted - 1
        newest = int(lanes.next[lane, kept - 1]) if lane >= 0 else 0
        tokens, start = {
            KEPT: (lanes.next[lane, : min(kept, rows)].tolist(), length - kept),
            DRAFT: (known[-1:] if drafting else [], length - 1 + step),
            VERIFY: ([newest, *known] if lane >= 0 else [], length),
        }[kind]
        count = len(tokens)
        hidden = max(0, length // PAGE - window) if window else 0
        for row in range(rows):
            at, place, used = sequence * rows + row, start + row, row < count
            into.tokens[at] = tokens[row] if used else 0
            into.places[at] = place - hidden * PAGE if used else -1
            into.homes[at] = lane * MOST_ROWS + row if used else 0
            into.positions[:, at] = _rotary(lanes, lane, place) if used else 0
            page = int(lanes.tables[lane, place // PAGE]) if used and place // PAGE < lanes.tables.shape[1] else -1
            into.slots[at] = page * PAGE + place % PAGE if page >= 0 else -1
        for row in range(decided):
            at, used = sequence * decided + row, row < count if kind == VERIFY else drafting
            standing = known[: row if kind == VERIFY else step] if used else []
            judged = kind == VERIFY and used and row < len(known)
            drawn = judged and not certain
            into.row_lanes[at] = lane if used else -1
            into.drafted[at] = torch.tensor([*standing, *[-1] * (MAX_DRAFTS - len(standing))], dtype=torch.int32)
            into.drafts[at] = known[row] if judged else -1
            into.sources[at] = row * sequences + sequence if drawn else -1
            into.chances[at] = draws.chance[row, sequence] if drawn else 1.0
        into.lanes[sequence] = lane if count else -1
        into.starts[sequence], into.counts[sequence] = start - hidden * PAGE, count
        into.firsts[sequence] = sequence * rows
        into.picked[sequence] = sequence * rows + max(count - 1, 0)
        into.deciding[sequence] = lane if (count > 0 if kind == VERIFY else drafting) else -1
        into.deciding_firsts[sequence] = sequence * decided
        into.deciding_counts[sequence] = count if kind == VERIFY else 1
        into.deciding_positions[sequence] = length + 1 + (0 if kind == VERIFY else step)
        if copies and lane >= 0:
            filled = min(lanes.tables.shape[1], (length + rows + PAGE) // PAGE)
            into.tables[sequence, : filled - hidden] = lanes.tables[lane, hidden:filled]
    produced.zero_()


def _rotary(lanes: Lanes, lane: int, place: int) -> Tensor:
    if place < int(lanes.prompts[lane]):
        return lanes.edges[:, lane]
    return (place + lanes.shifts[lane]).expand(3)


def round_advance(
    lanes: Lanes,
    verified: Pass,
    drawn: Drawn,
    progress: Progress | None,
    wide: Tensor,
    hidden: Tensor,
    overflows: Tensor,
    report: Tensor,
) -> None:
    """Move the lanes of a verification pass on by what was decided, up to a token that ends the answer: then they rest.

    progress   what stands is said here, too; None: this was no pass through the layers
    wide       float32 [T, H], hidden states of the pass; those that stand go to `hidden` float32 [lanes, 6, H]
    overflows  int32 [n]: counters, summed up
    report     int32 [S + 1, 8]: produced (0: the logits were not finite, and the lane rests), drafts judged (-1: it rested
               before), tokens, -1 behind them; last row: the overflows

    Raises as `round_rows`.
    """
    rows = _checked_advance(lanes, verified, drawn, wide, hidden, overflows, report)
    accepted = None if progress is None else progress.accepted
    arguments = (
        *(_pointers(LanePointers, lanes), _pointers(PassPointers, verified), drawn.tokens, drawn.produced, accepted),
        *(wide, hidden, wide.shape[1], rows, overflows, overflows.shape[0], report),
    )
    launch(SOURCE, "round_advance", wide.shape[0], _THREADS, arguments, wide.device)


def round_advance_reference(
    lanes: Lanes,
    verified: Pass,
    drawn: Drawn,
    progress: Progress | None,
    wide: Tensor,
    hidden: Tensor,
    overflows: Tensor,
    report: Tensor,
) -> None:
    """What `round_advance` does, in torch on any device."""
    rows = _checked_advance(lanes, verified, drawn, wide, hidden, overflows, report)
    for sequence, lane in enumerate(verified.lanes.tolist()):
        made = int(drawn.produced[sequence]) if lane >= 0 else 0
        tokens = drawn.tokens[sequence, :made].tolist()
        report[sequence] = -1
        report[sequence, 0] = made
        report[sequence, 1] = verified.counts[sequence] - 1 if lane >= 0 else -1
        report[sequence, 2 : 2 + made] = drawn.tokens[sequence, :made]
        if lane < 0:
            continue
        ends = [count for count, token in enumerate(tokens, start=1) if token in lanes.stops[lane].tolist()]
        taken = ends[0] if ends else made
        lanes.lengths[lane] += taken
        lanes.next[lane, :taken] = drawn.tokens[sequence, :taken]
        hidden[lane, :made] = wide[sequence * rows : sequence * rows + made]
        if taken:
            lanes.kept[lane] = taken
            if progress is not None:
                progress.accepted[lane] = taken
        if ends or not made:
            lanes.limits[lane] = 0
    report[-1, 0] = overflows.sum()


def scatter_logits(values: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """values float32 [R, n], rows may stand apart, to out [R, V] at ids int32 [n]; other places stay. Returns out.

    Ids outside of the vocabulary are passed over. Raises as `round_rows`.
    """
    stride = _checked_scatter(values, ids, out)
    count = ids.shape[0]
    grid = (-(-count // _THREADS), values.shape[0])
    arguments = (values, stride, ids, count, out, out.shape[1])
    launch(SOURCE, "round_scatter", grid, _THREADS, arguments, values.device)
    return out


def scatter_logits_reference(values: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """What `scatter_logits` does, in torch on any device."""
    _checked_scatter(values, ids, out)
    inside = (ids >= 0) & (ids < out.shape[1])
    out[:, ids[inside].long()] = values[:, inside]
    return out


def _pointers(kind: type[Pointers], record: Lanes | Draws | Pass) -> Pointers:
    return pointers(kind, {field[0]: getattr(record, field[0]) for field in kind._fields_})


def _checked_rows(
    order: Tensor,
    lanes: Lanes,
    draws: Draws,
    into: Pass,
    produced: Tensor,
    kind: int,
    drafts: int,
    step: int,
    window: int,
) -> int:
    check_dimensions("order", order, 1, "[S]")
    sequences, device = order.shape[0], order.device
    rows = into.tokens.shape[0] // sequences
    if kind not in (KEPT, DRAFT, VERIFY) or not 1 <= rows <= MOST_ROWS or (kind == DRAFT and rows != 1):
        raise InputError(
            f"a pass of kind {kind} with {rows} rows a sequence: expected 1 to {MOST_ROWS}, 1 for a draft."
        )
    if not 0 <= drafts <= draws.tokens.shape[0] or drafts > MAX_DRAFTS or not 0 <= step <= drafts:
        raise InputError(f"draft {step} of {drafts}: expected at most {min(draws.tokens.shape[0], MAX_DRAFTS)}.")
    if window < 0:
        raise InputError(f"a window of {window} pages: expected 0 (none) or more.")
    if kind == VERIFY and rows < 1 + drafts:
        raise InputError(f"{drafts} drafts are verified in {1 + drafts} rows a sequence, not in {rows}.")
    check("order", order, torch.int32, (sequences,), device)
    _check_lanes(lanes, device)
    _check_pass(into, sequences, rows, sequences * rows if kind == VERIFY else sequences, lanes.tables.shape[1], device)
    check("draws.tokens", draws.tokens, torch.int32, (*draws.tokens.shape[:1], sequences, MAX_DRAFTS + 1), device)
    check("draws.produced", draws.produced, torch.int32, tuple(draws.tokens.shape[:2]), device)
    check("draws.chance", draws.chance, torch.float64, tuple(draws.tokens.shape[:2]), device)
    check("produced", produced, torch.int32, (sequences,), device)
    return rows


def _check_lanes(lanes: Lanes, device: torch.device) -> None:
    check_dimensions("tables", lanes.tables, 2, "[lanes, pages]")
    count = lanes.tables.shape[0]
    shapes = {"edges": (3, count), "tables": tuple(lanes.tables.shape)}
    shapes |= {"stops": (count, STOPS), "next": (count, MOST_ROWS)}
    for name in LANES:
        check(name, getattr(lanes, name), torch.int32, shapes.get(name, (count,)), device)


def _check_pass(into: Pass, sequences: int, rows: int, decided: int, pages: int, device: torch.device) -> None:
    total = sequences * rows
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("tokens", "slots", "places", "homes"), (total,)),
        **{"positions": (3, total), "tables": (sequences, pages), "drafted": (decided, MAX_DRAFTS)},
        **dict.fromkeys(("row_lanes", "drafts", "sources", "chances"), (decided,)),
    }
    dtypes = {"chances": torch.float64, "deciding_positions": torch.int64}
    for name in PASS:
        check(name, getattr(into, name), dtypes.get(name, torch.int32), shapes.get(name, (sequences,)), device)


def _checked_advance(
    lanes: Lanes, verified: Pass, drawn: Drawn, wide: Tensor, hidden: Tensor, overflows: Tensor, report: Tensor
) -> int:
    check_dimensions("wide", wide, 2, "[T, H]")
    total, width = wide.shape
    sequences, device = verified.lanes.shape[0], wide.device
    if total % sequences or width % 4:
        raise InputError(f"wide is {[total, width]}: expected rows for {sequences} sequences, a multiple of 4 wide.")
    rows = total // sequences
    _check_lanes(lanes, device)
    _check_pass(verified, sequences, rows, total, lanes.tables.shape[1], device)
    check("drawn.tokens", drawn.tokens, torch.int32, (sequences, MAX_DRAFTS + 1), device)
    check("drawn.produced", drawn.produced, torch.int32, (sequences,), device)
    check("wide", wide, torch.float32, (total, width), device)
    check("hidden", hidden, torch.float32, (lanes.lengths.shape[0], MOST_ROWS, width), device)
    check("overflows", overflows, torch.int32, (math.prod(overflows.shape),), device)
    check("report", report, torch.int32, (sequences + 1, REPORT), device)
    return rows


def _checked_scatter(values: Tensor, ids: Tensor, out: Tensor) -> int:
    check_dimensions("values", values, 2, "[R, n]")
    check_dimensions("out", out, 2, "[R, V]")
    stride = check_rows("values", values, torch.float32, tuple(values.shape), values.device, 4)
    check("ids", ids, torch.int32, (values.shape[1],), values.device)
    check("out", out, torch.float32, (values.shape[0], out.shape[1]), values.device)
    return stride
