"""Rounds on their way: started on the stream, their few numbers read when they are asked for."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....kernels.candidates import CANDIDATES
from ....kernels.round import REPORT
from ....kernels.sampling_state import LISTED, Cuts
from ..lane import Lane
from ..pages import PAGE
from .graphs import Graphs
from .masks import Masks
from .model import CudaModel
from .round import Buffers, Canvas, Round, Shape

BUCKETS = (1 << 11, 1 << 13, 1 << 15, 1 << 17)  # positions that rounds are made for, below the context
RING = 16  # rounds whose numbers may be on their way to the host


@dataclass(frozen=True)
class Reading:
    """One lane's numbers: tokens (none: its logits were not finite) and drafts judged, -1 if it rested."""

    tokens: list[int]
    judged: int


@dataclass
class Flight:
    """A round that was started. `shape` tells where its logits are; `masks` what its grammars allowed."""

    lanes: list[Lane]
    shape: Shape
    report: Tensor
    landed: torch.cuda.Event | None
    masks: Masks | None = None

    def carries(self, lane: Lane) -> bool:
        return any(lane is other for other in self.lanes)

    def number(self, lane: Lane) -> int:
        return next(number for number, other in enumerate(self.lanes) if other is lane)

    def land(self) -> None:
        """Wait for the numbers."""
        if self.landed is not None:
            self.landed.synchronize()
            self.landed = None

    def reading(self, lane: Lane) -> Reading:
        made, judged, *tokens = self.report[self.number(lane)].tolist()
        return Reading(tokens[:made], judged)

    @property
    def overflows(self) -> int:
        return int(self.report[len(self.lanes), 0])


class Flights:
    """Starts rounds of any lanes, in graphs where they are on."""

    def __init__(
        self, model: CudaModel, graphs: Graphs, *, lanes: int, drafts: int, vocabulary: int, window: int = 0
    ) -> None:
        """window: pages of context that drafting looks at, besides the newest; 0: all."""
        self.window = window
        self._model, self._graphs, self._drafts = model, graphs, drafts
        self.canvas = Canvas(model, lanes, drafts, vocabulary)
        self._buffers: dict[tuple[int, int], Buffers] = {}
        self._rounds: dict[Shape, Round] = {}
        self._orders: dict[tuple[int, int], list[int]] = {}
        self._most = model.state.lanes.tables.shape[1] * PAGE
        cuda = model.weights.device.type == "cuda"
        self._ring = [torch.zeros(lanes + 1, REPORT, dtype=torch.int32, pin_memory=cuda) for _ in range(RING)]
        self._turn = 0

    def start(self, lanes: list[Lane], ahead: int = 0, *, whole: bool = False) -> Flight:
        """One round of these lanes, `ahead` rounds of which are on their way. whole: leave all logits on the canvas."""
        given = [lane.forced_drafts() for lane in lanes]
        drafts, is_given = self._drafts, any(own is not None for own in given)
        if is_given:
            drafts = max(len(own or []) for own in given)
        reach = max(lane.length for lane in lanes) + (1 + ahead) * (1 + drafts)
        bucket = min(self._most, next((bound for bound in BUCKETS if reach < bound), self._most))
        few = not whole and self._few(lanes)
        shape = Shape(len(lanes), drafts, bucket, cuts_of(lanes), is_given, self.window, few)
        made = self._round(shape, lanes)
        if is_given:
            self._give(made.buffers, [own or [] for own in given])
        masks = None
        if any(lane.constraint is not None for lane in lanes):
            masks = self._masked(made, lanes)
        else:
            self._graphs.run((shape, "whole"), made.whole)
        return self._sent(lanes, shape, made.buffers, masks)

    def first(self, lane: Lane) -> Flight:
        """The first token of a lane whose prompt has been read."""
        shape = Shape(1, 0, self._most, cuts_of([lane]), False, self.window, self._few([lane]))
        made, masks = self._round(shape, [lane]), None
        if lane.constraint is not None:
            masks = Masks([lane], [[]], 1, self.canvas.vocabulary)
            self.canvas.mask[:1].copy_(masks.words)
        made.first(lane.index, masked=masks is not None)
        return self._sent([lane], shape, made.buffers, masks)

    def warm(self, shapes: list[Shape]) -> None:
        """Run rounds of lanes that rest, twice each: kernels are loaded and graphs captured before anybody waits."""
        for shape in shapes:
            for _ in range(2):
                made = self._round(shape, [])
                self._graphs.run((shape, "whole"), made.whole)

    def shapes(self, sequences: int, *, every_depth: bool) -> list[Shape]:
        """Those that most answers need: with the usual cuts and without any, at every depth or the least."""
        buckets = [*(bound for bound in BUCKETS if bound < self._most), self._most]
        cuts = (Cuts(False, False, greedy=True), Cuts(listed=True))
        chosen = buckets if every_depth else buckets[:1]
        shape = Shape(sequences, self._drafts, self._most, cuts[0], False, self.window, self._model.splits)
        return [replace(shape, positions=bucket, cuts=cut) for bucket in chosen for cut in cuts]

    def _few(self, lanes: list[Lane]) -> bool:
        """Whether candidates are gathered in place of whole logits, and are enough for all of these lanes."""
        return self._model.splits and all(draws_from_few(lane) for lane in lanes)

    def _round(self, shape: Shape, lanes: list[Lane]) -> Round:
        key = (shape.sequences, shape.drafts)
        if key not in self._buffers:
            self._buffers[key] = Buffers(self._model, *key)
        if shape not in self._rounds:
            self._rounds[shape] = Round(self._model, shape, self.canvas, self._buffers[key])
        order = [lane.index for lane in lanes] or [-1] * shape.sequences
        if self._orders.get(key) != order:
            self._buffers[key].order.copy_(torch.tensor(order, dtype=torch.int32))
            self._orders[key] = order
        return self._rounds[shape]

    def _give(self, buffers: Buffers, drafts: list[list[int]]) -> None:
        most = buffers.draws.tokens.shape[0]
        tokens = torch.tensor([[*own, *[-1] * (most - len(own))] for own in drafts], dtype=torch.int32).t()
        buffers.draws.tokens[:, :, 0].copy_(tokens)
        buffers.draws.produced.copy_((tokens >= 0).int())

    def _masked(self, made: Round, lanes: list[Lane]) -> Masks:
        """A round whose masks are made on the host, from its drafts, while the device verifies them."""
        shape, draws = made.shape, made.buffers.draws
        if shape.drafts and not shape.given:
            self._graphs.run((shape, "draft"), made.draft)
        drawn = torch.where(draws.produced > 0, draws.tokens[:, :, 0], -1).to("cpu", non_blocking=True)
        landed = self._event()
        self._graphs.run((shape, "verify"), made.verify)
        if landed is not None:
            landed.synchronize()
        drafts = []
        for lane, column in zip(lanes, drawn.t().tolist(), strict=True):
            own = column[: min(shape.drafts, lane.remaining - 1)]
            drafts.append(own[: own.index(-1)] if -1 in own else own)
        masks = Masks(lanes, drafts, shape.rows, self.canvas.vocabulary)
        self.canvas.mask[: len(masks.words)].copy_(masks.words)
        self._graphs.run((shape, "settle"), lambda: made.settle(masked=True))
        return masks

    def _sent(self, lanes: list[Lane], shape: Shape, buffers: Buffers, masks: Masks | None) -> Flight:
        self._turn = (self._turn + 1) % RING
        report = self._ring[self._turn][: len(lanes) + 1]
        report.copy_(buffers.report, non_blocking=True)
        return Flight(list(lanes), shape, report, self._event(), masks)

    def _event(self) -> torch.cuda.Event | None:
        if self._model.weights.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def cuts_of(lanes: list[Lane]) -> Cuts:
    """What some of the lanes ask for. Of short lists there is one kind: top-p is theirs to ask for or not."""
    wishes = [lane.request.sampling for lane in lanes]
    drawing = [wish for wish in wishes if wish.temperature > 0]
    if drawing and all(0 < wish.top_k <= LISTED for wish in drawing):
        return Cuts(listed=True)
    top_k, top_p = any(wish.top_k for wish in drawing), any(wish.top_p < 1 for wish in drawing)
    return Cuts(top_k, top_p, not drawing)


def draws_from_few(lane: Lane) -> bool:
    """Whether the first `CANDIDATES` of each rank hold all that the lane can get: a greedy token, or one of a top-k.

    A grammar's mask comes after them, and scores need every logit.
    """
    wishes = lane.request.sampling
    few = wishes.temperature == 0 or 0 < wishes.top_k <= CANDIDATES
    return few and lane.constraint is None and not wishes.logprobs
