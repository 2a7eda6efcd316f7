"""The model, top to bottom, on a flat batch of tokens from several lanes. Residual stream and sums in float32."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...checkpoint.errors import InputError
from ...kernels import reference as ops
from ..parallel.base import Collective
from .cache import Cache
from .kv import PagedKV
from .states import Trail
from .weights import AttentionWeights, DeltaWeights, LayerWeights, ModelWeights, Projection

Angles = tuple[Tensor, Tensor]
Observe = Callable[[int, Tensor], None]  # number of a layer, and its output [T, hidden], which is not to be kept


@dataclass(frozen=True)
class Segment:
    """Tokens start .. start + count - 1 of one lane, side by side in the batch."""

    lane: int
    start: int
    count: int


@dataclass(frozen=True)
class Batch:
    """tokens int64 [T] in the order of `segments`; rope int64 [3, T], the rotary positions (time, height, width).

    by_rows: decoding; every token gets the bits it would get alone, and recurrent states wait for `Cache.commit`.
    Otherwise a prefill chunk: one product for all tokens, and states move to the end of each segment.
    images: rows of the batch whose embeddings are a picture's: where they begin, and these, float32 [n, hidden].
    """

    tokens: Tensor
    segments: list[Segment]
    rope: Tensor
    by_rows: bool
    images: list[tuple[int, Tensor]] = field(default_factory=list)

    def parts(self) -> list[tuple[Segment, slice]]:
        """Each segment with its rows of the batch."""
        found, begin = [], 0
        for segment in self.segments:
            found.append((segment, slice(begin, begin + segment.count)))
            begin += segment.count
        return found


class Model:
    """One rank's share. Every rank calls the same methods with the same batches."""

    def __init__(
        self, weights: ModelWeights, collective: Collective, max_context: int, draft_head: bool = True
    ) -> None:
        """`draft_head`: drafts are drawn with the reduced head, where the weights have one.

        Raises InputError for the weights of another rank than the collective's.
        """
        if (collective.size, collective.rank) != (weights.tp_size, weights.tp_rank):
            raise InputError(
                f"the weights are those of rank {weights.tp_rank} of {weights.tp_size}, this process is rank "
                f"{collective.rank} of {collective.size}. Start each rank with its own directory."
            )
        text = weights.config.text
        frequencies = ops.inverse_frequencies(text.head_dim, text.partial_rotary_factor, text.rope_theta)
        self.weights = weights
        self.eps = text.rms_norm_eps
        self._collective = collective
        self._draft_head = weights.draft_head if draft_head else None
        self._draft_ids: Tensor | None = None
        self.observe: Observe | None = None
        self._rope_table = ops.rope_table(max_context, frequencies)
        self._rope_axes = ops.mrope_axes(len(frequencies), list(text.mrope_section))

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        """Run the batch through all layers: the hidden states after the final norm, float32 [T, hidden]."""
        x = self._embed(batch)
        angles = self._angles(batch)
        for number, layer in enumerate(self.weights.layers):
            x = self._layer(layer, x, batch, angles, cache, cache.kv)
            if self.observe is not None:
                self.observe(number, x)
        return ops.rms_norm(x, self.weights.norm, self.eps)

    def draft(self, batch: Batch, hidden: Tensor, cache: Cache) -> Tensor:
        """Run the MTP layer: batch.tokens are the tokens after those that `hidden` [T, hidden] belongs to.

        Returns its hidden states after `mtp.norm` [T, hidden]; logits of them guess the token after batch.tokens.
        """
        mtp = self.weights.mtp
        assert mtp is not None, "the model has no MTP layer"
        embedding = ops.rms_norm(self._embed(batch), mtp.embedding_norm, self.eps)
        joined = torch.cat((embedding, ops.rms_norm(hidden, mtp.hidden_norm, self.eps)), dim=-1)
        x = self._linear(joined, mtp.fc, batch)
        x = self._layer(mtp.layer, x, batch, self._angles(batch), cache, cache.mtp_kv)
        return ops.rms_norm(x, mtp.norm, self.eps)

    def logits(self, hidden: Tensor, *, by_rows: bool = True) -> Tensor:
        """Logits over the whole vocabulary, padding rows included: [T, hidden] -> float32 [T, V] on every rank."""
        multiply = ops.linear_rows if by_rows else ops.linear_block
        local = multiply(hidden, self.weights.head)
        return self._collective.all_gather(local) if self.weights.head_cut else local

    @property
    def shared_head(self) -> bool:
        """Whether each rank has a part of the head, so that logits are gathered."""
        return self.weights.head_cut and self._collective.size > 1

    @property
    def draft_rows(self) -> int:
        """Tokens that drafts are drawn from with a reduced head; 0: the whole vocabulary."""
        return 0 if self._draft_head is None else self.weights.config.text.draft_rows

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """As `logits`, for drafting: with a reduced head, minus infinity for every token that it has no row for."""
        head = self._draft_head
        if head is None:
            return self.logits(hidden)
        local = ops.linear_rows(hidden, head.weight)
        if self._draft_ids is None:  # ids below 2^24 are exact in what a collective carries
            ids = head.ids.float()
            self._draft_ids = (self._collective.all_gather(ids) if head.cut else ids).long()
        found = self._collective.all_gather(local) if head.cut else local
        full = found.new_full((len(found), self.weights.config.text.vocab_size), -math.inf)
        full[:, self._draft_ids] = found
        return full

    def _embed(self, batch: Batch) -> Tensor:
        x = ops.embed(batch.tokens, self.weights.embed)
        for begin, rows in batch.images:
            x[begin : begin + len(rows)] = rows
        return x

    def _layer(self, layer: LayerWeights, x: Tensor, batch: Batch, angles: Angles, cache: Cache, kv: PagedKV) -> Tensor:
        mixer, normed = layer.mixer, ops.rms_norm(x, layer.input_norm, self.eps)
        if isinstance(mixer, AttentionWeights):
            mixed = self._attention(mixer, layer.index, normed, batch, angles, kv)
        else:
            mixed = self._delta(mixer, layer.index, normed, batch, cache)
        x = x + self._project(mixer.output, mixed, batch)
        normed = ops.rms_norm(x, layer.post_norm, self.eps)
        inner = ops.silu_gate(self._linear(normed, layer.gate_up, batch))
        return x + self._project(layer.down, inner, batch)

    def _attention(
        self, weights: AttentionWeights, index: int, x: Tensor, batch: Batch, angles: Angles, kv: PagedKV
    ) -> Tensor:
        sizes, tokens = self.weights.sizes, x.shape[0]
        queries, keys = sizes.query_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        query_gate, key, value = self._linear(x, weights.inputs, batch).split([2 * queries, keys, keys], dim=-1)
        query, gate = query_gate.reshape(tokens, sizes.query_heads, 2 * sizes.head_dim).chunk(2, dim=-1)
        key = key.reshape(tokens, sizes.kv_heads, sizes.head_dim)
        value = value.reshape(tokens, sizes.kv_heads, sizes.head_dim)
        query = ops.apply_rope(ops.rms_norm(query, weights.query_norm, self.eps), *angles)
        key = ops.apply_rope(ops.rms_norm(key, weights.key_norm, self.eps), *angles)
        slots = torch.cat([kv.slots(s.lane, s.start, s.count) for s in batch.segments])
        ops.write_kv(kv.keys[index], kv.values[index], key, value, slots)
        attend = ops.attend_rows if batch.by_rows else ops.attend_block
        attended = torch.cat(
            [
                attend(query[rows], kv.keys[index], kv.values[index], kv.table(segment.lane), segment.start)
                for segment, rows in batch.parts()
            ]
        )
        return ops.output_gate(attended, gate).flatten(1)

    def _delta(self, weights: DeltaWeights, index: int, x: Tensor, batch: Batch, cache: Cache) -> Tensor:
        sizes = self.weights.sizes
        values = sizes.value_heads * sizes.value_dim
        mixed, z, b, a = self._linear(x, weights.inputs, batch).split(
            [sizes.conv_channels, values, sizes.value_heads, sizes.value_heads], dim=-1
        )
        log_decay, beta = ops.delta_gates(a, b, weights.a_log, weights.dt_bias)
        states, outputs = cache.recurrent, []
        for segment, rows in batch.parts():
            lane = segment.lane
            convolved, history = ops.causal_conv(mixed[rows], states.histories[index][lane], weights.conv)
            query, key, value = self._delta_heads(convolved)
            inputs = (query, key, value, log_decay[rows], beta[rows], states.states[index][lane])
            if batch.by_rows:
                output, trail = ops.delta_rule_steps(*inputs)
                states.remember(index, lane, Trail(history, trail))
            else:
                output, state = ops.delta_rule_chunked(*inputs)
                states.store(index, lane, history, state)
            outputs.append(output)
        output = torch.cat(outputs)
        return ops.gated_rms_norm(output, z.reshape(output.shape), weights.norm, self.eps).flatten(1)

    def _delta_heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, channels] -> q, k [T, key heads, DK], L2-normalised, and v [T, value heads, DV]."""
        sizes, tokens = self.weights.sizes, convolved.shape[0]
        keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
        query, key, value = convolved.split([keys, keys, values], dim=-1)
        return (
            ops.l2_normalize(query.reshape(tokens, sizes.key_heads, sizes.key_dim)),
            ops.l2_normalize(key.reshape(tokens, sizes.key_heads, sizes.key_dim)),
            value.reshape(tokens, sizes.value_heads, sizes.value_dim),
        )

    def _linear(self, x: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        return ops.linear_rows(x, weight) if batch.by_rows else ops.linear_block(x, weight)

    def _project(self, projection: Projection, x: Tensor, batch: Batch) -> Tensor:
        local = self._linear(x, projection.weight, batch)
        return self._collective.all_reduce(local) if projection.summed else local

    def _angles(self, batch: Batch) -> Angles:
        return ops.rope_angles(batch.rope, self._rope_axes, self._rope_table)
