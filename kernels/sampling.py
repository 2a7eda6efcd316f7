"""Choosing tokens on a GPU, without the host: penalties, cuts, lossless speculation and draws.

Decisions are those of `kernels/reference/sampling.py`: probabilities are float64, random numbers are fixed by seed,
position and purpose (Philox), equal logits count in the order of their ids. Every function runs on torch's current stream,
does not synchronise, and may be captured in a graph. docs/kernels/sampling.md tells how the cut is found.
"""

import ctypes

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import reference
from .checks import check, check_dimensions, check_rows, launch
from .delta import Progress
from .sampling_state import (
    LISTED,
    MAX_DRAFTS,
    MOST_LISTED_IDS,
    PASSES,
    ROWS,
    SLICES,
    WISHES,
    AnswerPointers,
    Cuts,
    Decision,
    Distributions,
    Drawn,
    LaneSampling,
    RowPointers,
    SequencePointers,
    WishPointers,
    pointers,
)

DISTRIBUTING, SHORTENING, DECIDING = "sampling.cu", "short_lists.cu", "speculation.cu"
SAMPLE, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a random number is for
_THREADS = 256


def decide(
    logits: Tensor,
    decision: Decision,
    sampling: LaneSampling,
    into: Distributions,
    *,
    cuts: Cuts,
    draft_rows: Distributions | None = None,
    purpose: int = SAMPLE,
    counted: bool = True,
    progress: Progress | None = None,
    mask: Tensor | None = None,
    sparse: bool = False,
    drawn: Drawn | None = None,
) -> Drawn:
    """Judge the drafts of each sequence and draw one token more.

    logits float32 [R, V], rows may stand apart. `into` receives the rows' distributions. `draft_rows`: those that drafts
    were drawn from, for `decision.sources`. `purpose` DRAFT and `counted` False draw a draft; `counted` adds the tokens to
    the lanes' histories. `progress`, of the delta rule, is advanced. mask int32 [R, V / 32 rounded up], a bit an id, the
    lowest first: ids without theirs cannot come; at least one must. Minus infinity is a logit of an id that cannot come: for
    a draft, and for any row with `sparse` (kernels/candidates.py). `drawn`: where the result goes;
    what stands there of a sequence without a lane stays.

    Raises InputError where shapes, dtypes, strides or devices do not fit, EnvironmentFault if a kernel cannot start.
    """
    stride = _checked(logits, decision, sampling, into, draft_rows, purpose, mask)
    rows, vocabulary = logits.shape
    count, device = decision.lanes.shape[0], logits.device
    wishes = pointers(WishPointers, {name: getattr(sampling, name) for name in WISHES})
    own = pointers(RowPointers, {name: getattr(into, name) for name in ROWS})
    theirs = own if draft_rows is None else pointers(RowPointers, {name: getattr(draft_rows, name) for name in ROWS})
    drawn = _checked_drawn(drawn, count, device)
    listed = LISTED if cuts.top_k and not cuts.greedy and vocabulary <= MOST_LISTED_IDS else 0
    firsts = torch.empty(rows, LISTED, SLICES, dtype=torch.int64, device=device) if listed else None
    sequences = pointers(SequencePointers, {**vars(decision), "seeds": sampling.seeds})
    answers = pointers(
        AnswerPointers,
        {
            **{"accepted": None, "turn": None, **(vars(progress) if progress is not None else {})},
            **vars(drawn),
            **{"seen": sampling.seen, "counts": sampling.counts},
        },
    )

    def start(
        source: str, name: str, grid: tuple[int, int], *arguments: Tensor | ctypes.Structure | int | None
    ) -> None:
        launch(source, f"sampling_{name}", grid, _THREADS, arguments, device)

    wide, narrow = (SLICES, rows), (1, rows)
    start(
        *(DISTRIBUTING, "adjust", wide, logits, stride, decision.row_lanes, decision.drafted),
        *(sampling.seen, sampling.counts, sampling.bias, mask, 0 if mask is None else mask.shape[1]),
        *(int(sparse or purpose == DRAFT), listed, wishes, own, vocabulary, firsts),
    )
    if listed:
        start(SHORTENING, "list", (rows, 1), decision.row_lanes, wishes, own, listed, int(cuts.top_p), firsts)
    shared = (sequences, wishes, own, theirs, vocabulary, listed)
    if cuts.greedy or (cuts.listed and listed):
        start(DECIDING, "settle", (count, 1), *shared, purpose, answers, int(counted))
        return drawn
    for by_mass, wanted in ((0, cuts.top_k), (1, cuts.top_p)):
        for step in range(PASSES + 1) if wanted else ():
            grid = wide if step < PASSES else narrow
            passing = (step, by_mass, int(cuts.top_k), listed)
            start(DISTRIBUTING, "select", grid, decision.row_lanes, wishes, own, vocabulary, *passing)
    if cuts.top_k or cuts.top_p:
        start(DISTRIBUTING, "ties", wide, decision.row_lanes, own, vocabulary)
    start(DISTRIBUTING, "mass", wide, decision.row_lanes, wishes, own, vocabulary, listed)
    verdict = torch.empty(count, 4, dtype=torch.int32, device=device)
    rest = torch.empty(count, SLICES, dtype=torch.float64, device=device)
    start(DECIDING, "rest", (SLICES, count), *shared, verdict, rest)
    start(DECIDING, "draw", (count, 1), *shared, purpose, verdict, rest, answers, int(counted))
    return drawn


def decide_reference(
    logits: Tensor,
    decision: Decision,
    sampling: LaneSampling,
    into: Distributions,
    *,
    cuts: Cuts,
    draft_rows: Distributions | None = None,
    purpose: int = SAMPLE,
    counted: bool = True,
    progress: Progress | None = None,
    mask: Tensor | None = None,
    sparse: bool = False,
    drawn: Drawn | None = None,
) -> Drawn:
    """What `decide` computes, in torch; reads the decision on the host. Of `into` only the logits are filled."""
    _checked(logits, decision, sampling, into, draft_rows, purpose, mask)
    tokens, produced, chances = [], [], []
    sequences = zip(
        *(x.tolist() for x in (decision.lanes, decision.firsts, decision.counts, decision.positions)), strict=True
    )
    for lane, first, count, position in sequences:
        own = HostLane(sampling, lane, cuts) if lane >= 0 else None
        taken: list[int] = []
        chance = 1.0
        if own is not None and _is_sound(logits[first : first + count], sparse or purpose == DRAFT):
            for row in range(first, first + count):
                adjusted = own.adjusted(logits[row], decision.drafted[row].tolist())
                into.logits[row] = adjusted if mask is None else _masked(adjusted, mask[row])
            taken, chance = own.verdict(decision, into, draft_rows, first, count, position, purpose)
        for token in taken if counted and own is not None else []:
            sampling.seen[lane, token] = 1
            sampling.counts[lane, token] += 1
        if progress is not None and lane >= 0:
            progress.advance(lane, len(taken))
        tokens.append([*taken, *[-1] * (MAX_DRAFTS + 1 - len(taken))])
        produced.append(len(taken))
        chances.append(chance)
    drawn = _checked_drawn(drawn, len(tokens), logits.device)
    drawn.tokens.copy_(torch.tensor(tokens, dtype=torch.int32))
    drawn.produced.copy_(torch.tensor(produced, dtype=torch.int32))
    drawn.chance.copy_(torch.tensor(chances, dtype=torch.float64))
    return drawn


def _is_sound(logits: Tensor, is_open: bool) -> bool:
    finite = torch.isfinite(logits)
    return bool((finite | (logits < 0) if is_open else finite).all())


def _masked(logits: Tensor, words: Tensor) -> Tensor:
    ids = torch.arange(len(logits), device=logits.device)
    allowed = (words[ids // 32] >> (ids % 32)) & 1
    return torch.where(allowed.bool(), logits, -torch.inf)


class HostLane:
    """One lane's wishes on the host, for the reference."""

    def __init__(self, sampling: LaneSampling, lane: int, cuts: Cuts) -> None:
        self._sampling, self._lane = sampling, lane
        self._wishes = {name: getattr(sampling, name)[lane].item() for name in WISHES}
        self._seed = int(sampling.seeds[lane]) & ((1 << 64) - 1)
        self._cuts = (int(self._wishes["top_k"]) if cuts.top_k else 0, self._wishes["top_p"] if cuts.top_p else 1.0)

    def adjusted(self, logits: Tensor, drafted: list[int]) -> Tensor:
        sampling, lane = self._sampling, self._lane
        seen, counts = sampling.seen[lane].bool(), sampling.counts[lane].clone()
        for token in drafted:
            if token >= 0:
                seen[token] = True
                counts[token] += 1
        names = ("repetition", "presence", "frequency")
        bias = None if sampling.bias is None else sampling.bias[lane]
        return reference.adjust_logits(logits, seen, counts, bias=bias, **{name: self._wishes[name] for name in names})

    def distribution(self, adjusted: Tensor) -> Tensor:
        return reference.distribution(adjusted, self._wishes["temperature"], *self._cuts, self._wishes["min_p"])

    def random(self, position: int, purpose: int) -> float:
        return reference.uniform(self._seed, position, purpose)

    def verdict(
        self,
        decision: Decision,
        into: Distributions,
        draft_rows: Distributions | None,
        first: int,
        count: int,
        position: int,
        purpose: int,
    ) -> tuple[list[int], float]:
        taken: list[int] = []
        standing = -1 if decision.forced is None else min(int(decision.forced[self._lane]), count - 1)
        if standing >= 0:
            kept = decision.drafts[first : first + standing].tolist()
            return [*kept, reference.greedy(into.logits[first + standing])], 1.0
        for index in range(count):
            row = first + index
            draft = int(decision.drafts[row]) if index + 1 < count else None
            if self._wishes["temperature"] == 0:
                best = reference.greedy(into.logits[row])
                taken.append(best)
                if best != draft:
                    return taken, 1.0
                continue
            target = self.distribution(into.logits[row])
            if draft is None:
                taken.append(reference.draw(target, self.random(position + index, purpose)))
                return taken, float(target[taken[-1]])
            source = int(decision.sources[row])
            chance = 1.0 if source < 0 else float(decision.chances[row])
            if self.random(position + index, ACCEPT) * chance < float(target[draft]):
                taken.append(draft)
                continue
            drafted = torch.zeros_like(target)
            if source < 0 or draft_rows is None:
                drafted[draft] = 1.0
            else:
                drafted = self.distribution(draft_rows.logits[source])
            rest = reference.residual(target, drafted)
            taken.append(reference.draw(rest, self.random(position + index, RESIDUAL)))
            return taken, float(target[taken[-1]])
        return taken, 1.0


def _checked(
    logits: Tensor,
    decision: Decision,
    sampling: LaneSampling,
    into: Distributions,
    draft_rows: Distributions | None,
    purpose: int,
    mask: Tensor | None,
) -> int:
    check_dimensions("logits", logits, 2, "[R, V]")
    rows, vocabulary = logits.shape
    device = logits.device
    stride = check_rows("logits", logits, torch.float32, (rows, vocabulary), device, 4)
    check_dimensions("lanes", decision.lanes, 1, "[S]")
    count, lanes = decision.lanes.shape[0], sampling.temperature.shape[0]
    for name in ("row_lanes", "drafts", "sources"):
        check(name, getattr(decision, name), torch.int32, (rows,), device)
    check("drafted", decision.drafted, torch.int32, (rows, MAX_DRAFTS), device)
    check("chances", decision.chances, torch.float64, (rows,), device)
    for name in ("lanes", "firsts", "counts"):
        check(name, getattr(decision, name), torch.int32, (count,), device)
    check("positions", decision.positions, torch.int64, (count,), device)
    for name, dtype in zip(WISHES, [torch.float64] * 3 + [torch.int32] + [torch.float32] * 3, strict=True):
        check(name, getattr(sampling, name), dtype, (lanes,), device)
    check("seeds", sampling.seeds, torch.int64, (lanes,), device)
    check("seen", sampling.seen, torch.uint8, (lanes, vocabulary), device)
    check("counts", sampling.counts, torch.float32, (lanes, vocabulary), device)
    if sampling.bias is not None:
        check("bias", sampling.bias, torch.float32, (lanes, vocabulary), device)
    check("into.logits", into.logits, torch.float32, (rows, vocabulary), device)
    if draft_rows is not None:
        check_dimensions("draft_rows.logits", draft_rows.logits, 2, "[rows, V]")
        check("draft_rows.logits", draft_rows.logits, torch.float32, (draft_rows.logits.shape[0], vocabulary), device)
    if mask is not None:
        check("mask", mask, torch.int32, (rows, -(-vocabulary // 32)), device)
    if decision.forced is not None:
        check("forced", decision.forced, torch.int32, (lanes,), device)
    if purpose not in (SAMPLE, DRAFT):
        raise InputError(f"purpose is {purpose}: expected {SAMPLE} (an answer's token) or {DRAFT} (a draft).")
    return stride


def _checked_drawn(drawn: Drawn | None, count: int, device: torch.device) -> Drawn:
    if drawn is None:
        return Drawn.empty(count, device)
    check("drawn.tokens", drawn.tokens, torch.int32, (count, MAX_DRAFTS + 1), device)
    check("drawn.produced", drawn.produced, torch.int32, (count,), device)
    check("drawn.chance", drawn.chance, torch.float64, (count,), device)
    return drawn
