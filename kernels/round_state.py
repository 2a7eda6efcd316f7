"""What the kernels of a decode round work on: the lanes as the device knows them, drafts as they are drawn, passes."""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import Sequences
from .delta import Round
from .sampling_state import MAX_DRAFTS, Decision, Drawn, Pointers

KEPT, DRAFT, VERIFY = range(3)  # kinds of passes
MOST_ROWS = MAX_DRAFTS + 1  # of a sequence
STOPS = 8  # tokens that end an answer, as far as the device knows them
LANES = ("lengths", "limits", "prompts", "edges", "shifts", "tables", "stops", "kept", "next")
PASS = (
    *("tokens", "positions", "slots", "places", "homes", "lanes", "starts", "counts", "firsts", "tables", "picked"),
    *("row_lanes", "drafted", "drafts", "sources", "chances"),
    *("deciding", "deciding_firsts", "deciding_counts", "deciding_positions"),
)


class LanePointers(Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in LANES]


class DrawPointers(Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in ("tokens", "produced", "chance")]


class PassPointers(Pointers):
    _fields_ = [(name, ctypes.c_void_p) for name in PASS]


@dataclass(frozen=True)
class Lanes:
    """What the device knows of each lane; int32 [lanes] but where said otherwise.

    lengths  tokens whose keys, values and states are in place; the newest token stands at this index
    limits   tokens of prompt and answer together at most; 0: the lane rests
    prompts  tokens of the prompt
    edges    [3, lanes], rotary position of the prompt's last token
    shifts   rotary position less index, of the tokens behind the prompt
    tables   [lanes, pages a lane], -1 where there is none
    stops    [lanes, 8], tokens that end the answer, -1: none
    kept     the last rows that the draft layer has not read, 1 .. 6
    next     [lanes, 6], the token behind each of them; the last is the newest token
    """

    lengths: Tensor
    limits: Tensor
    prompts: Tensor
    edges: Tensor
    shifts: Tensor
    tables: Tensor
    stops: Tensor
    kept: Tensor
    next: Tensor

    @staticmethod
    def empty(lanes: int, pages: int, device: torch.device | str) -> "Lanes":
        """Lanes that rest, for up to `pages` pages each."""

        def filled(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return Lanes(
            lengths=filled(0, lanes),
            limits=filled(0, lanes),
            prompts=filled(0, lanes),
            edges=filled(0, 3, lanes),
            shifts=filled(0, lanes),
            tables=filled(-1, lanes, pages),
            stops=filled(-1, lanes, STOPS),
            kept=filled(0, lanes),
            next=filled(0, lanes, MOST_ROWS),
        )


@dataclass(frozen=True)
class Draws:
    """Drafts of a round: tokens int32 [drafts, S, 6] (the first of each six), produced int32 and chance float64 [drafts, S]."""

    tokens: Tensor
    produced: Tensor
    chance: Tensor

    @staticmethod
    def empty(drafts: int, sequences: int, device: torch.device | str) -> "Draws":
        shape = (max(drafts, 1), sequences)
        return Draws(
            torch.full((*shape, MAX_DRAFTS + 1), -1, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.ones(shape, dtype=torch.float64, device=device),
        )

    def step(self, step: int) -> Drawn:
        """Where draft `step` of every sequence is written."""
        return Drawn(self.tokens[step], self.produced[step], self.chance[step])


@dataclass(frozen=True)
class Pass:
    """The rows of a pass, T = S * rows, and what is decided behind it, R rows; int32 but where said otherwise.

    tokens, slots, places, homes [T] and positions [3, T]; places: index of the token in `tables`, -1: the row is not used;
        homes: the row of what the lanes keep [lanes * 6] that belongs to it
    lanes, starts, counts, firsts, picked [S]; picked: the last used row; tables [S, pages]
    row_lanes, drafts, sources [R], drafted [R, 5], chances float64 [R]
    deciding, deciding_firsts, deciding_counts int32 [S], deciding_positions int64 [S]
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    places: Tensor
    homes: Tensor
    lanes: Tensor
    starts: Tensor
    counts: Tensor
    firsts: Tensor
    tables: Tensor
    picked: Tensor
    row_lanes: Tensor
    drafted: Tensor
    drafts: Tensor
    sources: Tensor
    chances: Tensor
    deciding: Tensor
    deciding_firsts: Tensor
    deciding_counts: Tensor
    deciding_positions: Tensor

    @staticmethod
    def empty(kind: int, tables: Tensor, rows: int) -> "Pass":
        """`tables` int32 [S, pages] may be shared by the passes of a round; `rows` of each sequence."""
        sequences, device = tables.shape[0], tables.device
        total = sequences * rows
        decided = total if kind == VERIFY else sequences

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        parts = {name: zeros(total) for name in ("tokens", "slots", "places", "homes")}
        parts |= {name: zeros(decided) for name in ("row_lanes", "drafts", "sources")}
        parts |= {"positions": zeros(3, total), "tables": tables, "drafted": zeros(decided, MAX_DRAFTS)}
        parts["chances"] = zeros(decided, dtype=torch.float64)
        parts["deciding_positions"] = zeros(sequences, dtype=torch.int64)
        return Pass(**{name: parts[name] if name in parts else zeros(sequences) for name in PASS})

    @property
    def sequences(self) -> Sequences:
        """The pass as attention wants it."""
        return Sequences(self.tables, self.starts, self.counts, self.firsts, self.places)

    @property
    def round(self) -> Round:
        """The pass as the delta rule wants it."""
        return Round(self.lanes, self.counts, self.firsts)

    @property
    def decision(self) -> Decision:
        """What is decided behind the pass."""
        return Decision(
            *(self.row_lanes, self.drafted, self.deciding, self.deciding_firsts, self.deciding_counts),
            *(self.deciding_positions, self.drafts, self.sources, self.chances),
        )
