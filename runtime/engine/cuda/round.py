"""A decode round on the device: drafts, verification, decision, and the lanes moved on, without the host.

Every number that changes from round to round stands in device memory, so that a round of one `Shape` is always the same
launches on the same memory.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....kernels.linear import MAX_TOKENS
from ....kernels.norm import LARGEST
from ....kernels.round import REPORT
from ....kernels.round_state import DRAFT, KEPT, VERIFY, Draws, Pass
from ....kernels.sampling import DRAFT as TO_DRAFT
from ....kernels.sampling_state import MAX_DRAFTS, Cuts, Decision, Distributions, Drawn
from ..pages import PAGE
from .layers import RowLayers
from .model import CudaModel


@dataclass(frozen=True)
class Shape:
    """What a round's launches depend on.

    positions: more than every position, a bucket; given: the host writes the drafts, no MTP layer is asked; window:
    pages of context that drafting looks at, besides the newest, 0: all; few: of a head cut over the ranks only candidates
    are gathered, which hold all that these lanes can draw.
    """

    sequences: int
    drafts: int
    positions: int
    cuts: Cuts
    given: bool
    window: int = 0
    few: bool = False

    @property
    def draft_positions(self) -> int:
        """More than every position that drafting sees."""
        return min(self.positions, (self.window + 2) * PAGE) if self.window else self.positions

    @property
    def rows(self) -> int:
        """Of a sequence in the verification pass."""
        return 1 + self.drafts


class Canvas:
    """Memory that all rounds share, one after the other: logits, distributions, hidden states."""

    def __init__(self, model: CudaModel, lanes: int, drafts: int, vocabulary: int) -> None:
        """vocabulary: ids that may be drawn."""
        device, width = model.weights.device, model.weights.config.text.hidden_size
        rows = min(MAX_TOKENS, lanes * (1 + MAX_DRAFTS))
        self.vocabulary = vocabulary
        self.logits = torch.zeros(rows, model.vocabulary, device=device)
        self.wide = torch.zeros(rows, width, device=device)
        self.targets = Distributions.empty(rows, vocabulary, device)
        self.draft_logits = torch.full((lanes, model.vocabulary), -torch.inf, device=device)
        self.guesses = Distributions.empty(max(1, lanes * drafts), vocabulary, device)
        self.mask = torch.zeros(rows, -(-vocabulary // 32), dtype=torch.int32, device=device)


class Buffers:
    """What the passes of rounds of so many sequences and drafts say and find. order int32 [S]: the lanes."""

    def __init__(self, model: CudaModel, sequences: int, drafts: int) -> None:
        device, pages = model.weights.device, model.state.lanes.tables.shape[1]
        tables, near = (torch.zeros(sequences, pages, dtype=torch.int32, device=device) for _ in range(2))
        self.order = torch.full((sequences,), -1, dtype=torch.int32, device=device)
        self.draws = Draws.empty(drafts, sequences, device)
        self.kept = Pass.empty(KEPT, near, 1 + drafts)
        self.steps = [Pass.empty(DRAFT, near, 1) for _ in range(drafts)]
        self.verified = Pass.empty(VERIFY, tables, 1 + drafts)
        self.drawn = Drawn.empty(sequences, device)
        self.report = torch.zeros(sequences + 1, REPORT, dtype=torch.int32, device=device)


class Round:
    """Rounds of one shape: `draft`, `verify`, `settle`, in this order."""

    def __init__(self, model: CudaModel, shape: Shape, canvas: Canvas, buffers: Buffers) -> None:
        self.shape, self.buffers = shape, buffers
        self._model, self._canvas = model, canvas

    def whole(self) -> None:
        """All three."""
        self.draft()
        self.verify()
        self.settle()

    def draft(self) -> None:
        """Let the MTP layer read what the last round left, and draw the drafts one after the other."""
        shape, buffers, canvas, model, state = self.shape, self.buffers, self._canvas, self._model, self._model.state
        if shape.given or not shape.drafts:
            return
        draws, rows = buffers.draws, buffers.kept
        self._rows(KEPT, rows, draws.produced[0], window=shape.window, copies=True)
        layers = self._layers(rows, shape.rows, shape.draft_positions)
        kept = model.ops.embed(rows.homes, state.hidden.flatten(0, 1))
        _, wide = model.draft(model.embed(rows.tokens), kept, layers)
        hidden = model.ops.embed(rows.picked, wide)
        staged = hidden.clamp(-LARGEST, LARGEST).half()
        for step in range(shape.drafts):
            logits = model.draft_logits(staged, canvas.draft_logits[: shape.sequences], self._asked(rows))
            model.ops.decide(
                *(logits[:, : canvas.vocabulary], rows.decision, state.sampling),
                canvas.guesses.part(step * shape.sequences, shape.sequences),
                cuts=shape.cuts,
                purpose=TO_DRAFT,
                counted=False,
                drawn=draws.step(step),
            )
            if step + 1 < shape.drafts:
                rows = buffers.steps[step + 1]
                self._rows(DRAFT, rows, draws.produced[step + 1], step=step + 1, window=shape.window)
                layers = self._layers(rows, 1, shape.draft_positions)
                staged, hidden = model.draft(model.embed(rows.tokens), hidden, layers)

    def verify(self) -> None:
        """One pass of the newest tokens and their drafts through all layers: logits and hidden states on the canvas."""
        shape, rows, canvas, model = self.shape, self.buffers.verified, self._canvas, self._model
        self._rows(VERIFY, rows, self.buffers.drawn.produced, certain=shape.given, copies=True)
        total = shape.sequences * shape.rows
        layers = self._layers(rows, shape.rows, shape.positions)
        staged, _ = model.forward(model.embed(rows.tokens), layers, canvas.wide[:total])
        model.logits(staged, canvas.logits[:total], self._asked(rows))

    def settle(self, *, masked: bool = False) -> None:
        """Judge the drafts, draw a token more, move on. masked: by the canvas's mask."""
        shape, buffers, canvas, model, state = self.shape, self.buffers, self._canvas, self._model, self._model.state
        total = shape.sequences * shape.rows
        drafted = shape.sequences * shape.drafts
        model.ops.decide(
            canvas.logits[:total, : canvas.vocabulary],
            *(replace(buffers.verified.decision, forced=state.forced), state.sampling, canvas.targets.part(0, total)),
            cuts=shape.cuts,
            draft_rows=canvas.guesses.part(0, drafted) if drafted and not shape.given else None,
            progress=state.progress,
            mask=canvas.mask[:total] if masked else None,
            sparse=shape.few,
            drawn=buffers.drawn,
        )
        self._advance(canvas.wide[:total], through=True)

    def first(self, lane: int, *, masked: bool) -> None:
        """An answer's first token, of a lane whose prompt has been read; the shape is one sequence without drafts."""
        buffers, canvas, model, state = self.buffers, self._canvas, self._model, self._model.state
        self._rows(VERIFY, buffers.verified, buffers.drawn.produced)
        hidden = state.hidden[lane, :1].clone()
        staged = hidden.clamp(-LARGEST, LARGEST).half()
        logits = model.logits(staged, canvas.logits[:1], self._asked(buffers.verified))
        model.ops.decide(
            logits[:, : canvas.vocabulary],
            *(buffers.verified.decision, state.sampling, canvas.targets.part(0, 1)),
            cuts=self.shape.cuts,
            mask=canvas.mask[:1] if masked else None,
            sparse=self.shape.few,
            drawn=buffers.drawn,
        )
        self._advance(hidden, through=False)

    def _rows(
        self,
        kind: int,
        rows: Pass,
        produced: Tensor,
        *,
        step: int = 0,
        window: int = 0,
        certain: bool = False,
        copies: bool = False,
    ) -> None:
        self._model.ops.round_rows(
            *(self.buffers.order, self._model.state.lanes, self.buffers.draws, rows, produced),
            kind=kind,
            drafts=self.shape.drafts,
            step=step,
            window=window,
            certain=certain,
            copies=copies,
        )

    def _asked(self, rows: Pass) -> Decision | None:
        """What is to be decided behind a pass, where its candidates are enough."""
        return rows.decision if self.shape.few else None

    def _layers(self, rows: Pass, tokens: int, positions: int) -> RowLayers:
        return RowLayers(self._model.common, rows, max_tokens=tokens, max_positions=positions)

    def _advance(self, wide: Tensor, *, through: bool) -> None:
        state = self._model.state
        self._model.ops.round_advance(
            *(state.lanes, self.buffers.verified, self.buffers.drawn, state.progress if through else None),
            *(wide, state.hidden, state.overflows, self.buffers.report),
        )
