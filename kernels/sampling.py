"""Choosing tokens on a GPU, without the host: penalties, cuts, lossless speculation, draws, log-probabilities.

Decisions are those of `kernels/reference/sampling.py`: probabilities are float64, random numbers are fixed by seed,
position and purpose (Philox), equal logits count in the order of their ids. Every function runs on torch's current stream,
does not synchronise, and may be captured in a graph. docs/kernels/sampling.md tells how the cut is found.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import reference
from .checks import check, check_dimensions, check_rows, launch
from .delta import Progress

SOURCE = "sampling.cu"
MAX_DRAFTS = 5
MAX_BEST = 20
SAMPLE, DRAFT, ACCEPT, RESIDUAL = range(4)  # what a random number is for
_SLICES, _DIGITS, _PASSES, _THREADS = 32, 16, 8, 256


class _Pointers(ctypes.Structure):
    """A struct of device pointers, passed by value; `tensors` keeps what they point to alive."""

    tensors: list[Tensor]


def _pointers(kind: type[_Pointers], tensors: Mapping[str, Tensor]) -> _Pointers:
    made = kind(*(tensors[name].data_ptr() for name in (field[0] for field in kind._fields_)))
    made.tensors = list(tensors.values())
    return made


_WISHES = ("temperature", "top_p", "min_p", "top_k", "repetition", "presence", "frequency")
_ROWS = (
    *("logits", "slice_peak", "slice_best", "digit_counts", "digit_masses", "prefix", "above", "mass_above", "limit"),
    *("floor", "floor_ties", "cut", "ties", "slice_equal", "slice_mass"),
)


class _Wishes(_Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in _WISHES]


class _Rows(_Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in _ROWS]


@dataclass(frozen=True)
class LaneSampling:
    """What each lane asked for, and its history.

    temperature, top_p, min_p float64 [lanes]; top_k int32; repetition, presence, frequency float32; seeds int64 (the bits
    of an unsigned number). seen uint8 [lanes, V]: tokens of prompt and answer; counts float32 [lanes, V]: how often in the
    answer; bias float32 [lanes, V], or None: no lane has any.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seeds: Tensor
    seen: Tensor
    counts: Tensor
    bias: Tensor | None

    @staticmethod
    def empty(lanes: int, vocabulary: int, device: torch.device | str, *, bias: bool = True) -> "LaneSampling":
        """Greedy lanes without a history."""
        return LaneSampling(
            torch.zeros(lanes, dtype=torch.float64, device=device),
            torch.ones(lanes, dtype=torch.float64, device=device),
            torch.zeros(lanes, dtype=torch.float64, device=device),
            torch.zeros(lanes, dtype=torch.int32, device=device),
            torch.ones(lanes, device=device),
            torch.zeros(lanes, device=device),
            torch.zeros(lanes, device=device),
            torch.zeros(lanes, dtype=torch.int64, device=device),
            torch.zeros(lanes, vocabulary, dtype=torch.uint8, device=device),
            torch.zeros(lanes, vocabulary, device=device),
            torch.zeros(lanes, vocabulary, device=device) if bias else None,
        )

    def start(
        self,
        lane: int,
        prompt: list[int],
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        bias: Mapping[int, float] | None = None,
        seed: int = 0,
    ) -> None:
        """A new answer in a lane. Raises InputError for a bias where the lanes were made without."""
        wishes = (temperature, top_p, min_p, top_k, repetition, presence, frequency)
        for name, value in zip(_WISHES, wishes, strict=True):
            getattr(self, name)[lane] = value
        self.seeds[lane] = seed - (1 << 64) if seed >> 63 else seed
        self.seen[lane] = 0
        self.seen[lane, torch.tensor(prompt, dtype=torch.int64, device=self.seen.device)] = 1
        self.counts[lane] = 0
        if self.bias is not None:
            self.bias[lane] = 0
            for token, value in (bias or {}).items():
                self.bias[lane, token] = value
        elif bias:
            raise InputError("a logit bias for lanes that were made without: LaneSampling.empty(..., bias=True).")


@dataclass(frozen=True)
class Distributions:
    """Adjusted logits of some rows, float32 [rows, V], and what describes the cut of each (see sampling.cu)."""

    logits: Tensor
    slice_peak: Tensor
    slice_best: Tensor
    digit_counts: Tensor
    digit_masses: Tensor
    prefix: Tensor
    above: Tensor
    mass_above: Tensor
    limit: Tensor
    floor: Tensor
    floor_ties: Tensor
    cut: Tensor
    ties: Tensor
    slice_equal: Tensor
    slice_mass: Tensor

    @staticmethod
    def empty(rows: int, vocabulary: int, device: torch.device | str) -> "Distributions":
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        single, double = torch.float32, torch.float64
        return Distributions(
            zeros(rows, vocabulary, dtype=single),
            zeros(rows, _SLICES, dtype=single),
            zeros(rows, _SLICES),
            zeros(rows, 2, _SLICES, _DIGITS),
            zeros(rows, 2, _SLICES, _DIGITS, dtype=double),
            zeros(rows, _PASSES + 1),
            zeros(rows, _PASSES + 1),
            zeros(rows, _PASSES + 1, dtype=double),
            zeros(rows, dtype=double),
            zeros(rows),
            zeros(rows),
            zeros(rows),
            zeros(rows),
            zeros(rows, _SLICES),
            zeros(rows, _SLICES, dtype=double),
        )

    def part(self, first: int, count: int) -> "Distributions":
        """Rows first .. first + count - 1, in place: the drafts of one step among those of a round."""
        return Distributions(*(getattr(self, field.name)[first : first + count] for field in fields(self)))


@dataclass(frozen=True)
class Decision:
    """The rows of logits that decide what each sequence goes on with: 1 + its drafts, together. On the device.

    row_lanes  int32 [R], lane of each row, -1: not used
    drafted    int32 [R, 5], the drafts that stand before the row's token, -1 where there are none
    lanes      int32 [S], lane of each sequence, -1: none
    firsts     int32 [S], its first row
    counts     int32 [S], its rows, 1 .. 6: one more than its drafts
    positions  int64 [S], position of the first row's token
    drafts     int32 [R], the draft that row r judges (unused in a sequence's last row)
    sources    int32 [R], the draft's row of the drafts' Distributions; -1: the draft was certain (greedy or given)
    chances    float64 [R], the draft's probability there
    """

    row_lanes: Tensor
    drafted: Tensor
    lanes: Tensor
    firsts: Tensor
    counts: Tensor
    positions: Tensor
    drafts: Tensor
    sources: Tensor
    chances: Tensor

    @staticmethod
    def of(
        lanes: list[int],
        positions: list[int],
        drafts: list[list[int]],
        device: torch.device | str,
        *,
        sources: list[list[int]] | None = None,
        chances: list[list[float]] | None = None,
        before: list[list[int]] | None = None,
    ) -> "Decision":
        """From host numbers. `before`: drafts that stand already (when the next draft is drawn)."""
        row_lanes: list[int] = []
        drafted: list[list[int]] = []
        firsts: list[int] = []
        row_drafts: list[int] = []
        row_sources: list[int] = []
        row_chances: list[float] = []
        for index, own in enumerate(drafts):
            firsts.append(len(row_lanes))
            known = before[index] if before else []
            for row in range(len(own) + 1):
                row_lanes.append(lanes[index])
                standing = [*known, *own[:row]]
                drafted.append([*standing, *[-1] * (MAX_DRAFTS - len(standing))])
            row_drafts += [*own, -1]
            row_sources += [*(sources[index] if sources else [-1] * len(own)), -1]
            row_chances += [*(chances[index] if chances else [1.0] * len(own)), 1.0]

        def made(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        counts = [len(own) + 1 for own in drafts]
        return Decision(
            made(row_lanes),
            made(drafted),
            made(lanes),
            made(firsts),
            made(counts),
            made(positions, torch.int64),
            made(row_drafts),
            made(row_sources),
            made(row_chances, torch.float64),
        )


@dataclass(frozen=True)
class Cuts:
    """Which cuts some lane asks for; passes for the others are not started. Known to the host, part of a graph."""

    top_k: bool = True
    top_p: bool = True


@dataclass(frozen=True)
class Drawn:
    """tokens int32 [S, 6]: the drafts that stand, the new token, then -1; produced int32 [S], how many (0: the logits
    were not finite); chance float64 [S], the new token's probability (1 if greedy)."""

    tokens: Tensor
    produced: Tensor
    chance: Tensor


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
) -> Drawn:
    """Judge the drafts of each sequence and draw one token more.

    logits float32 [R, V], rows may stand apart. `into` receives the rows' distributions. `draft_rows`: those that drafts
    were drawn from, for `decision.sources`. `purpose` DRAFT and `counted` False draw a draft; `counted` adds the tokens to
    the lanes' histories. `progress`, of the delta rule, is advanced.

    Raises InputError where shapes, dtypes, strides or devices do not fit, EnvironmentFault if a kernel cannot start.
    """
    stride = _checked(logits, decision, sampling, into, draft_rows, purpose)
    rows, vocabulary = logits.shape
    count, device = decision.lanes.shape[0], logits.device
    wishes = _pointers(_Wishes, {name: getattr(sampling, name) for name in _WISHES})
    own = _pointers(_Rows, {name: getattr(into, name) for name in _ROWS})
    theirs = own if draft_rows is None else _pointers(_Rows, {name: getattr(draft_rows, name) for name in _ROWS})
    drawn = Drawn(
        torch.empty(count, MAX_DRAFTS + 1, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.int32, device=device),
        torch.empty(count, dtype=torch.float64, device=device),
    )
    verdict = torch.empty(count, 4, dtype=torch.int32, device=device)
    rest = torch.empty(count, _SLICES, dtype=torch.float64, device=device)
    selected = int(cuts.top_k or cuts.top_p)

    def start(name: str, grid: tuple[int, int], *arguments: Tensor | ctypes.Structure | int | None) -> None:
        launch(SOURCE, f"sampling_{name}", grid, _THREADS, arguments, device)

    history = (sampling.seen, sampling.counts)
    wide, narrow = (_SLICES, rows), (1, rows)
    start(
        "adjust",
        wide,
        logits,
        stride,
        decision.row_lanes,
        decision.drafted,
        *history,
        sampling.bias,
        wishes,
        own,
        vocabulary,
    )
    for by_mass, wanted in ((0, cuts.top_k), (1, cuts.top_p)):
        for step in range(_PASSES + 1) if wanted else ():
            grid = wide if step < _PASSES else narrow
            start("select", grid, decision.row_lanes, wishes, own, vocabulary, step, by_mass, by_mass * cuts.top_k)
    if selected:
        start("ties", wide, decision.row_lanes, own, vocabulary)
    start("mass", wide, decision.row_lanes, wishes, own, vocabulary, selected)
    members = (decision.lanes, decision.firsts, decision.counts, decision.positions, decision.drafts, decision.sources)
    start(
        *("judge", (count, 1), *members, decision.chances, sampling.seeds, wishes, own),
        *(vocabulary, selected, verdict),
    )
    judged = (decision.lanes, decision.drafts, decision.sources)
    start("rest", (_SLICES, count), *judged, wishes, own, theirs, vocabulary, selected, verdict, rest)
    start(
        *("draw", (count, 1), decision.lanes, decision.positions, decision.drafts, decision.firsts, decision.sources),
        *(sampling.seeds, wishes, own, theirs, vocabulary, selected, purpose, verdict, rest),
        *(drawn.tokens, drawn.produced, drawn.chance),
        *((None, None) if progress is None else (progress.accepted, progress.turn)),
        *(*history, int(counted)),
    )
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
) -> Drawn:
    """What `decide` computes, in torch; reads the decision on the host. Of `into` only the logits are filled."""
    _checked(logits, decision, sampling, into, draft_rows, purpose)
    tokens, produced, chances = [], [], []
    sequences = zip(
        *(x.tolist() for x in (decision.lanes, decision.firsts, decision.counts, decision.positions)), strict=True
    )
    for lane, first, count, position in sequences:
        own = _Lane(sampling, lane, cuts) if lane >= 0 else None
        taken: list[int] = []
        chance = 1.0
        if own is not None and bool(torch.isfinite(logits[first : first + count]).all()):
            for row in range(first, first + count):
                into.logits[row] = own.adjusted(logits[row], decision.drafted[row].tolist())
            taken, chance = own.verdict(decision, into, draft_rows, first, count, position, purpose)
        for token in taken if counted and own is not None else []:
            sampling.seen[lane, token] = 1
            sampling.counts[lane, token] += 1
        if progress is not None and lane >= 0:
            progress.advance(lane, len(taken))
        tokens.append([*taken, *[-1] * (MAX_DRAFTS + 1 - len(taken))])
        produced.append(len(taken))
        chances.append(chance)
    device = logits.device
    return Drawn(
        torch.tensor(tokens, dtype=torch.int32, device=device),
        torch.tensor(produced, dtype=torch.int32, device=device),
        torch.tensor(chances, dtype=torch.float64, device=device),
    )


class _Lane:
    """One lane's wishes on the host, for the reference."""

    def __init__(self, sampling: LaneSampling, lane: int, cuts: Cuts) -> None:
        self._sampling, self._lane = sampling, lane
        self._wishes = {name: getattr(sampling, name)[lane].item() for name in _WISHES}
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


def log_probabilities(logits: Tensor, tokens: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under the softmax of logits float32 [R, V]: of tokens int32 [R], and of the `best` (0 .. 20) first.

    Returns float64 [R] (NaN for a token outside of the vocabulary), float64 [R, best] and int32 [R, best], most likely
    first, ties by id. Raises InputError and EnvironmentFault as `decide` does.
    """
    stride = _checked_logprobs(logits, tokens, best)
    rows, vocabulary = logits.shape
    device, kept = logits.device, max(best, 1)
    sums = torch.empty(rows, _SLICES, dtype=torch.float64, device=device)
    values = torch.empty(rows, _SLICES, kept, device=device)
    ids = torch.empty(rows, _SLICES, kept, dtype=torch.int32, device=device)
    chosen = torch.empty(rows, dtype=torch.float64, device=device)
    best_values = torch.empty(rows, best, dtype=torch.float64, device=device)
    best_ids = torch.empty(rows, best, dtype=torch.int32, device=device)
    shared = (logits, stride, vocabulary, best, sums, values, ids)
    launch(SOURCE, "logprob_slices", (_SLICES, rows), _THREADS, shared, device)
    launch(SOURCE, "logprob_merge", rows, _THREADS, (*shared, tokens, chosen, best_values, best_ids), device)
    return chosen, best_values, best_ids


def log_probabilities_reference(logits: Tensor, tokens: Tensor, best: int) -> tuple[Tensor, Tensor, Tensor]:
    """What `log_probabilities` computes, in torch on any device."""
    _checked_logprobs(logits, tokens, best)
    normalised = torch.log_softmax(logits.double(), dim=-1)
    values, ids = torch.sort(normalised, dim=-1, descending=True, stable=True)
    inside = (tokens >= 0) & (tokens < logits.shape[1])
    chosen = normalised.gather(1, torch.where(inside, tokens, 0).long()[:, None])[:, 0]
    return torch.where(inside, chosen, float("nan")), values[:, :best], ids[:, :best].int()


def _checked_logprobs(logits: Tensor, tokens: Tensor, best: int) -> int:
    check_dimensions("logits", logits, 2, "[R, V]")
    if not 0 <= best <= MAX_BEST:
        raise InputError(f"best is {best}: expected 0 to {MAX_BEST} log-probabilities.")
    check("tokens", tokens, torch.int32, (logits.shape[0],), logits.device)
    return check_rows("logits", logits, torch.float32, tuple(logits.shape), logits.device, 4)


def _checked(
    logits: Tensor,
    decision: Decision,
    sampling: LaneSampling,
    into: Distributions,
    draft_rows: Distributions | None,
    purpose: int,
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
    for name, dtype in zip(_WISHES, [torch.float64] * 3 + [torch.int32] + [torch.float32] * 3, strict=True):
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
    if purpose not in (SAMPLE, DRAFT):
        raise InputError(f"purpose is {purpose}: expected {SAMPLE} (an answer's token) or {DRAFT} (a draft).")
    return stride
