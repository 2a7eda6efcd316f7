"""The model once more, in torch alone, with every value rounded to a chosen precision: what the engine's numbers are held to.

`fp32` rounds nothing. `bf16` rounds where a model in bfloat16 does: the residual stream, the outputs of every product, norm,
rotation, convolution and activation, keys, values, and attention's weights; sums, softmax and the delta rule's state are
FP32, as in transformers. Weights are those of the engine, exactly: a stored value times FP32 scales is not rounded again, so
that what is measured is the arithmetic and not another model. Products of rounded values are exact in TF32 and FP32, and
sums are FP32: the rounding is done here, on any device.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..kernels import reference as ops
from ..kernels.weights import BAND, Fp8BlockWeight, Nvfp4Weight, Weight
from ..runtime.engine.cuda.weights import CudaAttention, CudaDelta, CudaLayer, CudaWeights

SCORES = 1 << 28  # of attention at a time
VALUES = 1 << 24  # of a matrix at a time


@dataclass(frozen=True)
class Precision:
    """`round` gives float32 values that the precision holds; `kept`: dtype in which keys and values wait; `products`: of
    `torch.set_float32_matmul_precision`, exact for its values."""

    name: str
    round: Callable[[Tensor], Tensor]
    kept: torch.dtype
    products: str


FP32 = Precision("fp32", lambda x: x, torch.float32, "highest")
BF16 = Precision("bf16", lambda x: x.bfloat16().float(), torch.bfloat16, "high")
PRECISIONS = {precision.name: precision for precision in (FP32, BF16)}


def slices(weight: Weight, values: int = VALUES) -> Iterator[tuple[int, Weight]]:
    """(first row, part) of a matrix by its rows, about `values` values a part."""
    bands, columns = weight.words.shape[0], weight.shape[1]
    unit = weight.block[0] // BAND if isinstance(weight, Fp8BlockWeight) else 1  # bands that share a row of scales
    step = max(1, values // (BAND * columns) // unit) * unit
    for first in range(0, bands, step):
        rows = slice(first * BAND, (first + step) * BAND)
        words = weight.words[first : first + step]
        if isinstance(weight, Fp8BlockWeight):
            scales = weight.block_scale[first // unit : -(-(first + step) // unit)].contiguous()
            yield rows.start, replace(weight, words=words, block_scale=scales)
            continue
        scale = weight.scale if weight.scale.numel() == 1 < weight.shape[0] else weight.scale[rows]
        if isinstance(weight, Nvfp4Weight):
            blocks = weight.block_scale[first : first + step]
            yield rows.start, replace(weight, words=words, block_scale=blocks, scale=scale)
        else:
            yield rows.start, replace(weight, words=words, scale=scale)


class PlainModel:
    """One sequence, read in order. The whole model, not a rank's share."""

    def __init__(self, weights: CudaWeights, precision: Precision, positions: int, keep: int = 0) -> None:
        """`positions`: room for keys and values; `keep`: bytes of matrices' values to keep from chunk to chunk."""
        assert weights.tp_size == 1, "one rank holds the model"
        text, device, sizes = weights.config.text, weights.device, weights.sizes
        frequencies = ops.inverse_frequencies(text.head_dim, text.partial_rotary_factor, text.rope_theta)
        cosines, sines = ops.rope_table(positions, frequencies)
        self._table = precision.round(cosines.to(device)), precision.round(sines.to(device))
        self._weights, self._sizes, self._eps = weights, sizes, text.rms_norm_eps
        self._precision, self._round = precision, precision.round
        self._read, self._room = 0, keep
        self._kept: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        shape = (sizes.kv_heads, positions, sizes.head_dim)
        kinds = [layer.mixer for layer in weights.layers]
        self._keys, self._values = (
            [
                torch.zeros(shape, dtype=precision.kept, device=device)
                for mixer in kinds
                if isinstance(mixer, CudaAttention)
            ]
            for _ in range(2)
        )
        heads = (sizes.value_heads, sizes.value_dim, sizes.key_dim)
        delta = [mixer for mixer in kinds if isinstance(mixer, CudaDelta)]
        self._states = [torch.zeros(heads, device=device) for _ in delta]
        self._history = [torch.zeros(sizes.conv_width - 1, sizes.conv_channels, device=device) for _ in delta]

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """The hidden states of the next tokens after the last norm, float32 [T, hidden]."""
        with _products(self._precision.products):
            ids = torch.tensor(tokens, device=self._weights.device)
            x = self._round(self._weights.embed.index_select(0, ids).float())
            for layer in self._weights.layers:
                x = self._layer(layer, x)
            self._read += len(tokens)
            return self._norm(x, self._weights.norm)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, V]."""
        with _products(self._precision.products):
            return self._linear(hidden, self._weights.head)

    def _layer(self, layer: CudaLayer, x: Tensor) -> Tensor:
        mixer, normed = layer.mixer, self._norm(x, layer.input_norm)
        if isinstance(mixer, CudaAttention):
            mixed = self._attention(mixer, layer.index, normed)
        else:
            mixed = self._delta(mixer, layer.index, normed)
        x = self._round(x + self._linear(mixed, mixer.output))
        normed = self._norm(x, layer.post_norm)
        gate = self._round(ops.silu(self._linear(normed, layer.gate)))
        inner = self._round(gate * self._linear(normed, layer.up))
        return self._round(x + self._linear(inner, layer.down))

    def _attention(self, weights: CudaAttention, index: int, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, query heads * D], gated."""
        sizes, count, first = self._sizes, len(x), self._read
        query_gate, key, value = (self._linear(x, weight) for weight in weights.inputs)
        query, gate = query_gate.view(count, sizes.query_heads, 2 * sizes.head_dim).chunk(2, dim=-1)
        cos, sin = (table[first : first + count] for table in self._table)
        query = self._round(ops.apply_rope(self._norm(query, weights.query_norm), cos, sin))
        key = self._round(ops.apply_rope(self._norm(key.view(count, -1, sizes.head_dim), weights.key_norm), cos, sin))
        here = slice(first, first + count)
        self._keys[index][:, here] = key.transpose(0, 1).to(self._precision.kept)
        self._values[index][:, here] = value.view(count, -1, sizes.head_dim).transpose(0, 1).to(self._precision.kept)
        attended = self._attend(query, self._keys[index], self._values[index])
        return self._round(attended * self._round(ops.sigmoid(gate))).flatten(1)

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """query [T, Q heads, D] over keys, values [KV heads, positions, D], up to each token: [T, Q heads, D]."""
        count, heads, dim = query.shape
        kv_heads, group, last = len(keys), heads // len(keys), self._read + count
        out = torch.empty_like(query)
        step = max(1, SCORES // (group * last))
        positions = torch.arange(last, device=query.device)
        for head in range(kv_heads):
            own = slice(head * group, (head + 1) * group)
            key, value = keys[head, :last].float(), values[head, :last].float()
            for begin in range(0, count, step):
                end = min(count, begin + step)
                seen = self._read + end
                rows = query[begin:end, own].flatten(0, 1)
                scores = (rows @ key[:seen].t()).mul_(dim**-0.5).view(end - begin, group, seen)
                scores.masked_fill_(
                    positions[None, None, :seen] > positions[self._read + begin : seen, None, None], -torch.inf
                )
                weights = self._round(torch.softmax(scores, dim=-1))
                out[begin:end, own] = self._round(weights.flatten(0, 1) @ value[:seen]).view(end - begin, group, dim)
        return out

    def _delta(self, weights: CudaDelta, index: int, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, value heads * value dim], gated and normalised."""
        sizes, count = self._sizes, len(x)
        mixed, z, b, a = (self._linear(x, weight) for weight in weights.inputs)
        rows = torch.cat((self._history[index], mixed))
        convolved, _ = ops.causal_conv(mixed, self._history[index], weights.delta.conv)
        self._history[index] = rows[len(rows) - sizes.conv_width + 1 :]
        keys = sizes.key_heads * sizes.key_dim
        query, key, value = self._round(convolved).split([keys, keys, sizes.value_heads * sizes.value_dim], dim=-1)
        log_decay, beta = ops.delta_gates(a, b, weights.delta.a_log, weights.delta.dt_bias)
        output, self._states[index] = ops.delta_rule_chunked(
            ops.l2_normalize(query.reshape(count, sizes.key_heads, -1)),
            ops.l2_normalize(key.reshape(count, sizes.key_heads, -1)),
            value.reshape(count, sizes.value_heads, -1),
            log_decay,
            self._round(beta),
            self._states[index],
        )
        output, gate = self._round(output), z.view(count, sizes.value_heads, -1)
        return self._round(ops.gated_rms_norm(output, gate, weights.norm, self._eps)).flatten(1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._round(ops.rms_norm(x, weight, self._eps))

    def _linear(self, x: Tensor, weight: Weight) -> Tensor:
        """x [T, K] times the weight transposed -> [T, N], rounded once."""
        out = torch.empty(len(x), weight.shape[0], device=x.device)
        for first, values, scale in self._values_of(weight):
            out[:, first : first + len(values)] = self._round((x @ values.t()) * scale)
        return out

    def _values_of(self, weight: Weight) -> Iterable[tuple[int, Tensor, Tensor]]:
        """(first row, values, scale) of the parts of a matrix."""
        parts = ((first, part.values(), part.scale) for first, part in slices(weight))
        if (kept := self._kept.get(id(weight))) is not None:
            return kept
        rows, columns = weight.shape
        if (size := 4 * rows * columns) > self._room:
            return parts
        self._room -= size
        return self._kept.setdefault(id(weight), list(parts))


@contextlib.contextmanager
def _products(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
