"""The model on the device, top to bottom: embedding, layers, heads, and the MTP layer."""

import sys

import torch
from torch import Tensor

from ....checkpoint.errors import InputError
from ....kernels import reference
from ....kernels.candidates import CANDIDATES
from ....kernels.linear import MAX_TOKENS
from ....kernels.ops import Ops
from ....kernels.sampling_state import Decision
from ....kernels.weights import Weight
from ...parallel.device import DeviceCollective
from .graphs import Graphs, Outside
from .layers import CapturedChunk, ChunkLayers, Common, Kept, Layers, captures, in_turn
from .prompts import Prompts
from .state import CudaState
from .weights import CudaWeights

HALF = 512  # tokens of half a chunk
STEP = 64  # halves begin at multiples of this


class CudaModel:
    """One rank's share, at work on a `CudaState`. Every rank makes the same calls."""

    def __init__(
        self,
        weights: CudaWeights,
        state: CudaState,
        link: DeviceCollective,
        ops: Ops,
        *,
        positions: int,
        draft_head: bool = True,
        head_split: bool = False,
        keep: int = 0,
    ) -> None:
        """positions: rotary positions to know; draft_head: draw drafts with the reduced head where there is one;
        head_split: of a head that is cut over the ranks candidates may be gathered in place of whole logits; keep: bytes of plain
        weights that stay for prompts.

        Raises InputError if the ranks of weights and link differ.
        """
        if (link.size, link.rank) != (weights.tp_size, weights.tp_rank):
            raise InputError(
                f"the weights are those of rank {weights.tp_rank} of {weights.tp_size}, this process is rank "
                f"{link.rank} of {link.size}. Start each rank with its own directory."
            )
        text, device = weights.config.text, weights.device
        frequencies = reference.inverse_frequencies(text.head_dim, text.partial_rotary_factor, text.rope_theta)
        cosines, sines = reference.rope_table(positions, frequencies)
        axes = reference.mrope_axes(len(frequencies), list(text.mrope_section)).int().to(device)
        tables = (cosines.to(device), sines.to(device))
        self.weights, self.state, self.ops, self.link = weights, state, ops, link
        self.common = Common(ops, state, weights.sizes, text.rms_norm_eps, tables, axes, link)
        self.vocabulary = text.vocab_size
        self.shared_head = weights.head_cut and link.size > 1
        self.splits = head_split and self.shared_head
        self._few = torch.full((MAX_TOKENS, link.size * 2 * CANDIDATES), -1.0, device=device)  # -1: no candidate
        self._draft_head = weights.draft_head if draft_head else None
        self._draft_ids = self._gathered_ids()
        self._graphs: Graphs | None = None
        self._kept: Kept | None = None
        self._chunks: dict[int, CapturedChunk] = {}  # by lane
        self.prompts = Prompts(weights.config, link.size, device, keep, halves=link.halves)

    def capture_chunks(self, tokens: int, graphs: Graphs) -> None:
        """From now on capture chunks of so many tokens that begin at multiples of 64, unless they are long or go in halves.

        Memory: `Kept`, and what the launches of a chunk need beside, in the graphs' pool.
        """
        if graphs.enabled and self.is_captured(tokens):
            self._graphs, self._chunks = graphs, {}
            self._kept = Kept(tokens, self.weights.config.text.hidden_size, self.state.device)

    def is_captured(self, tokens: int) -> bool:
        """Whether chunks of so many tokens are, where work is: the same on every rank."""
        return captures(tokens) and not self._in_halves(tokens)

    @property
    def captures_chunks(self) -> bool:
        return self._kept is not None

    @property
    def head_split(self) -> str:
        """For the log line: `none` where nothing is gathered, because the whole head is here."""
        return ("on" if self.splits else "off") if self.shared_head else "none"

    @property
    def draft_rows(self) -> int:
        """Tokens that drafts are drawn from with a reduced head; 0: the whole vocabulary."""
        return 0 if self._draft_ids is None else len(self._draft_ids)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens int32 [T] -> float32 [T, H]."""
        return self.ops.embed(tokens, self.weights.embed)

    def forward(self, x: Tensor, layers: Layers, wide: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x float32 [T, H], which is overwritten, through all layers and the last norm: fp16 and float32 [T, H].

        The latter in `wide`, if given.
        """
        delta = layers.run(x, self.weights.layers, self.state.kv)
        return self._last(x, delta, self.weights.norm, layers, wide)

    def read(self, x: Tensor, lane: int, start: int, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """`forward` of a prompt's chunk: x float32 [T, H], positions int32 [3, T], slots int32 [T].

        Where sums take long a long chunk goes in two halves, so that one's are on their way while the other computes. Others of
        the usual length are captured: some thousand launches one by one take the host longer than the card. Results stand until
        the next call.
        """
        tokens = x.shape[0]
        kept = self._kept
        if kept is not None and tokens == kept.slots.shape[0] and start % STEP == 0 and self.common.observe is None:
            return self._read_captured(kept, x, lane, start, positions, slots)
        halves = [tokens]
        if self._in_halves(tokens):
            halves = [tokens // 2 // STEP * STEP]
            halves.append(tokens - halves[0])
        passes, begin = [], 0
        for count in halves:
            rows = slice(begin, begin + count)
            passes.append(self.chunk(lane, start + begin, positions[:, rows].contiguous(), slots[rows].contiguous()))
            begin += count
        parts = x.split(halves)
        walks = [own.walk(part, self.weights.layers, self.state.kv) for own, part in zip(passes, parts, strict=True)]
        wide = torch.empty_like(x)
        staged = []
        with self.prompts.reading(f"read in {len(halves)}", halves[0]):
            deltas = in_turn(walks)
        for own, part, delta, into in zip(passes, parts, deltas, wide.split(halves), strict=True):
            staged.append(self._last(part, delta, self.weights.norm, own, into)[0])
            self.state.counter.add_(own.overflows.sum())
        return torch.cat(staged), wide

    def _in_halves(self, tokens: int) -> bool:
        return self.link.halves and tokens >= 2 * HALF

    def _read_captured(
        self, kept: Kept, x: Tensor, lane: int, start: int, positions: Tensor, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`read`, with the same bits; what it returns stands until the next chunk."""
        graphs, chunk = self._graphs, self._chunks.get(lane)
        assert graphs is not None
        if chunk is None:
            chunk = self._chunks[lane] = CapturedChunk(self.common, lane, kept)
        chunk.begin(x, start, positions, slots)

        def work(outside: Outside) -> None:
            chunk.outside = outside
            kept.overflows.zero_()
            with self.prompts.reading("read in 1", len(kept.slots)):
                delta = chunk.run(kept.x, self.weights.layers, self.state.kv)
            kept.staged.copy_(self._last(kept.x, delta, self.weights.norm, chunk, kept.wide)[0])
            self.state.counter.add_(kept.overflows.sum())

        graphs.run_parts(("chunk", lane, kept), work, known=len(self._chunks) > 1)
        if graphs.parts_fault is not None:  # from now on as they are written, without memory that is kept for graphs
            print(f"duovolt rank: prompts' chunks are not captured: {graphs.parts_fault}", file=sys.stderr, flush=True)
            self._kept, self._chunks = None, {}
        return kept.staged, kept.wide

    def draft(self, x: Tensor, hidden: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
        """The MTP layer: x [T, H] the embeddings of the tokens behind those of `hidden` float32 [T, H]. As `forward`."""
        mtp, pool = self.weights.mtp, self.state.mtp_kv
        assert mtp is not None and pool is not None, "the model has no MTP layer"
        tokens, width = x.shape
        joined = torch.empty(tokens, 2 * width, dtype=torch.float16, device=x.device)
        for part, source, norm in (
            (joined[:, :width], x, mtp.embedding_norm),
            (joined[:, width:], hidden, mtp.hidden_norm),
        ):
            self.ops.rms_norm(source, norm, self.common.eps, out=part, overflows=layers.overflows)
        x = torch.empty_like(x)
        with self.prompts.reading("drafts", tokens, layers=False):
            layers.multiply(joined, [mtp.fc], [x])
            delta = layers.run(x, [mtp.layer], [pool])
        return self._last(x, delta, mtp.norm, layers)

    def logits(self, hidden: Tensor, out: Tensor, asked: Decision | None = None) -> Tensor:
        """hidden fp16 [T, H], T up to 24 -> out float32 [T, V], over the whole vocabulary, padding rows included.

        asked: what is to be decided by the rows. With a head that is cut only what can decide it is gathered, and the rest
        of `out` is minus infinity (kernels/candidates.py).
        """
        return self._head(hidden, self.weights.head, self.weights.head_cut, out, asked)

    def draft_logits(self, hidden: Tensor, out: Tensor, asked: Decision | None = None) -> Tensor:
        """As `logits`, for drafting: with a reduced head, only its tokens' places are written."""
        head, ids = self._draft_head, self._draft_ids
        if head is None or ids is None:
            return self._head(hidden, self.weights.head, self.weights.head_cut, out, asked, is_open=True)
        if asked is not None and head.cut:
            return self._gathered(self.ops.linear(hidden, head.weight), out, asked, ids=head.ids, is_open=True)
        values = torch.empty(hidden.shape[0], len(ids), device=hidden.device)
        return self.ops.scatter_logits(self._head(hidden, head.weight, head.cut, values), ids, out)

    def chunk(self, lane: int, start: int, positions: Tensor, slots: Tensor) -> ChunkLayers:
        """A pass of a prompt's chunk: positions int32 [3, T], slots int32 [T]."""
        return ChunkLayers(self.common, lane, start, positions, slots)

    def _last(
        self, x: Tensor, delta: Tensor | None, norm: Tensor, layers: Layers, wide: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        wide = torch.empty_like(x) if wide is None else wide
        return layers.norm(x, norm, delta, wide), wide

    def _head(
        self,
        hidden: Tensor,
        weight: Weight,
        cut: bool,
        out: Tensor,
        asked: Decision | None = None,
        *,
        is_open: bool = False,
    ) -> Tensor:
        assert hidden.shape[0] <= MAX_TOKENS
        if not cut:
            return self.ops.linear(hidden, weight, out)
        share = self.ops.linear(hidden, weight)
        if asked is not None:
            return self._gathered(share, out, asked, is_open=is_open)
        self.link.gather(share, out)
        return out

    def _gathered(
        self, share: Tensor, out: Tensor, asked: Decision, *, ids: Tensor | None = None, is_open: bool
    ) -> Tensor:
        """The candidates of all ranks' shares at their places, where they are of `ids`, or else in rank order."""
        own = self.ops.candidates(
            share, asked, self.state.sampling, first=self.link.rank * share.shape[1], ids=ids, open_rows=is_open
        )
        gathered = self._few[: len(own)]
        self.link.gather(own, gathered)
        return self.ops.spread(gathered, out)

    def _gathered_ids(self) -> Tensor | None:
        """The draft head's tokens of all ranks; ids below 2^24 are exact in what the link carries."""
        head = self._draft_head
        if head is None:
            return None
        if not head.cut:
            return head.ids
        share = head.ids.float()[None]
        ids = torch.empty(1, self.link.size * share.shape[1], device=share.device)
        self.link.gather(share, ids)
        return ids[0].int()
