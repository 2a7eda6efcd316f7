"""What sampling on a GPU works on: the lanes' wishes and histories, rows of distributions, and what is to be decided."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..checkpoint.errors import InputError

MAX_DRAFTS = 5
SLICES, DIGITS, PASSES, LISTED = 32, 16, 8, 64  # as in sampling.cuh
MOST_LISTED_IDS = (
    1 << 18
)  # of a vocabulary whose rows may become short lists: short_lists.cuh keeps so many keys of a slice


class Pointers(ctypes.Structure):
    """A struct of device pointers, passed by value; `tensors` keeps what they point to alive."""

    tensors: list[Tensor]


def pointers(kind: type[Pointers], tensors: Mapping[str, Tensor | None]) -> Pointers:
    """None: a null pointer."""
    given = [tensors[field[0]] for field in kind._fields_]
    made = kind(*(0 if tensor is None else tensor.data_ptr() for tensor in given))
    made.tensors = [tensor for tensor in given if tensor is not None]
    return made


WISHES = ("temperature", "top_p", "min_p", "top_k", "repetition", "presence", "frequency")
ROWS = (
    *("logits", "slice_peak", "slice_best", "digit_counts", "digit_masses", "prefix", "above", "mass_above", "limit"),
    *("floor", "floor_ties", "cut", "ties", "slice_equal", "slice_mass"),
    *("list_ids", "list_weights", "list_sums", "list_size"),
)
SEQUENCES = ("lanes", "firsts", "counts", "positions", "drafts", "sources", "chances", "forced", "seeds")
ANSWERS = ("tokens", "produced", "chance", "accepted", "turn", "seen", "counts")


class WishPointers(Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in WISHES]


class RowPointers(Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in ROWS]


class SequencePointers(Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in SEQUENCES]


class AnswerPointers(Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in ANSWERS]


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
        for name, value in zip(WISHES, wishes, strict=True):
            getattr(self, name)[lane] = value
        self.seeds[lane] = seed - (1 << 64) if seed >> 63 else seed
        self.seen[lane] = 0
        self.seen[lane, torch.tensor(prompt, dtype=torch.int64, device=self.seen.device)] = 1
        self.counts[lane] = 0
        if self.bias is not None:
            self.bias[lane] = 0
            if bias:  # in one step: there may be one for every token
                ids = torch.tensor(list(bias), dtype=torch.int64, device=self.bias.device)
                self.bias[lane, ids] = torch.tensor(list(bias.values()), dtype=self.bias.dtype, device=self.bias.device)
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
    list_ids: Tensor
    list_weights: Tensor
    list_sums: Tensor
    list_size: Tensor

    @staticmethod
    def empty(rows: int, vocabulary: int, device: torch.device | str) -> "Distributions":
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        single, double = torch.float32, torch.float64
        return Distributions(
            zeros(rows, vocabulary, dtype=single),
            zeros(rows, SLICES, dtype=single),
            zeros(rows, SLICES),
            zeros(rows, 2, SLICES, DIGITS),
            zeros(rows, 2, SLICES, DIGITS, dtype=double),
            zeros(rows, PASSES + 1),
            zeros(rows, PASSES + 1),
            zeros(rows, PASSES + 1, dtype=double),
            zeros(rows, dtype=double),
            zeros(rows),
            zeros(rows),
            zeros(rows),
            zeros(rows),
            zeros(rows, SLICES),
            zeros(rows, SLICES, dtype=double),
            zeros(rows, LISTED),
            zeros(rows, LISTED, dtype=double),
            zeros(rows, LISTED, dtype=double),
            zeros(rows),
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
    forced     int32 [lanes] or None: how many drafts stand whatever the logits say, -1: as they say; the best id follows.
               For measuring only: the answer is not the model's
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
    forced: Tensor | None = None

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
    """Which cuts some lane asks for; passes for the others are not started. Known to the host, part of a graph.

    `greedy`: no lane draws, so nothing is weighed. `listed`: every lane that draws has a top-k of at most `LISTED`, so that
    no passes over whole rows are needed.
    """

    top_k: bool = True
    top_p: bool = True
    greedy: bool = False
    listed: bool = False


@dataclass(frozen=True)
class Drawn:
    """tokens int32 [S, 6]: the drafts that stand, the new token, then -1; produced int32 [S], how many (0: the logits
    were not finite); chance float64 [S], the new token's probability (1 if greedy)."""

    tokens: Tensor
    produced: Tensor
    chance: Tensor

    @classmethod
    def empty(cls, sequences: int, device: torch.device) -> "Drawn":
        """What sequences have to which no lane belongs: no tokens."""
        return cls(
            torch.full((sequences, MAX_DRAFTS + 1), -1, dtype=torch.int32, device=device),
            torch.zeros(sequences, dtype=torch.int32, device=device),
            torch.ones(sequences, dtype=torch.float64, device=device),
        )
