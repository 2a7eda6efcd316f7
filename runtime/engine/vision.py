"""The vision tower: a picture to the embeddings of its tokens. Every rank holds all of it and computes the same bits.

A large picture takes seconds, so it goes through in parts, between which running answers have their rounds.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...checkpoint.errors import InputError
from ...kernels import reference as ops
from ...kernels.weights import Weight, dense
from ..images.processor import ImageProcessor
from ..messages import ImageInput

EPS = 1e-6
ROWS_AT_ONCE = 8192  # patches that go through an MLP at a time
PROJECTION_BYTES = 256 << 20  # of queries, keys and values at a time
ROPE_THETA = 10000.0
PRODUCTS_A_PATCH = 3 * 10**7  # what to make a patch of its pixels counts as: it is the host's work
PRODUCTS_A_LOOK = (
    5 * 10**11
)  # multiplications after which a picture lets others go on: five layers of a 1024 x 1024 one


@dataclass(frozen=True)
class Affine:
    """weight and bias of a linear layer or a norm. A quantised weight stays as it is stored, and is decoded when it is used."""

    weight: Tensor | Weight
    bias: Tensor

    @property
    def plain(self) -> Tensor:
        """The weight as a tensor: as it is stored, or decoded to float32."""
        return self.weight if isinstance(self.weight, Tensor) else dense(self.weight)


@dataclass(frozen=True)
class VisionBlock:
    """One layer; `qkv`: rows of all heads' queries, then keys, then values."""

    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True)
class VisionWeights:
    """`patch` takes flattened patches; `positions` [S * S, hidden] is a square table. float32, or 16 bits as stored."""

    heads: int
    patch: Affine
    positions: Tensor
    blocks: list[VisionBlock]
    merger_norm: Affine
    merger_fc1: Affine
    merger_fc2: Affine


class VisionTower:
    """Pictures to embeddings, by the settings of `processor`, in float32 on the device of the weights."""

    def __init__(self, weights: VisionWeights, processor: ImageProcessor) -> None:
        """Raises InputError for extents that no picture could go through."""
        hidden, table = weights.positions.shape[1], weights.positions.shape[0]
        if hidden % (4 * weights.heads) or math.isqrt(table) ** 2 != table:
            raise InputError(
                f"the vision tower has {weights.heads} heads on {hidden} values and {table} positions; expected heads of "
                "a multiple of 4 values, and a square of positions."
            )
        self._weights = weights
        self.processor = processor

    def tokens(self, image: ImageInput) -> int:
        """Tokens that the picture takes in the prompt."""
        return self.processor.tokens(image.height, image.width)

    def embed(self, image: ImageInput) -> Tensor:
        """float32 [tokens, hidden of the text model]."""
        return _all(self.look(image))

    def look(self, image: ImageInput) -> "Walk":
        """`embed` in parts."""
        processor, weights = self.processor, self._weights
        pixels = np.frombuffer(image.pixels, dtype=np.uint8).reshape(image.frames, image.height, image.width, 3)
        step = processor.factor * max(1, ROWS_AT_ONCE * processor.patch // (processor.merge * image.width))
        parts = []
        for top in range(0, image.height, step):  # whole rows of tokens, so that patches keep their order
            patches = torch.from_numpy(processor.patches(pixels[:, top : top + step]))
            parts.append(_apply(patches.to(weights.positions.device), weights.patch))
            yield len(patches) * PRODUCTS_A_PATCH
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        del parts, patches
        return (yield from self._walk(x, image.height // processor.patch, image.width // processor.patch))

    def _walk(self, x: Tensor, rows: int, columns: int) -> "Walk":
        """x float32 [rows * columns, hidden], merge squares side by side -> [rows * columns / merge^2, hidden of the text model].

        After each part, how many multiplications it was.
        """
        weights, merge = self._weights, self.processor.merge
        positions = ops.grid_positions(rows, columns, merge, weights.positions.device)
        count, hidden = x.shape
        x += ops.resample_table(weights.positions, positions, rows, columns)
        angles = ops.grid_angles(positions, hidden // weights.heads, ROPE_THETA)
        for block in weights.blocks:
            attended = yield from self._attention(block, _norm(x, block.norm1), angles)
            x += attended
            del attended
            for part in x.split(ROWS_AT_ONCE):  # the inner values are four times as wide
                inner = ops.gelu_tanh(_apply(_norm(part, block.norm2), block.fc1))
                part += _apply(inner, block.fc2)
            yield count * hidden * (hidden + 2 * len(block.fc1.bias))
        merged = _norm(x, weights.merger_norm).reshape(-1, merge * merge * hidden)
        return _apply(ops.gelu(_apply(merged, weights.merger_fc1)), weights.merger_fc2)

    def _attention(self, block: VisionBlock, x: Tensor, angles: tuple[Tensor, Tensor]) -> "Walk":
        """[T, hidden] -> [T, hidden]; of a large picture a few heads at a time, so that little lies beside x."""
        heads, (count, hidden) = self._weights.heads, x.shape
        weight = block.qkv.plain.view(3, heads, -1, hidden)
        bias = block.qkv.bias.view(3, heads, -1)
        at_once = heads if 12 * x.numel() <= PROJECTION_BYTES else max(1, heads * PROJECTION_BYTES // (12 * x.numel()))
        parts = []
        for first in range(0, heads, at_once):
            some = slice(first, min(first + at_once, heads))
            layer = Affine(weight[:, some].reshape(-1, hidden), bias[:, some].reshape(-1))
            query, key, value = _apply(x, layer).reshape(count, 3, some.stop - first, -1).unbind(1)
            parts.append(ops.attend_all(ops.apply_rope(query, *angles), ops.apply_rope(key, *angles), value).flatten(1))
            del query, key, value
            yield count * parts[-1].shape[1] * (3 * hidden + 2 * count)
        return _apply(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), block.proj)


Walk = Generator[int, None, Tensor]


def _all(walk: Walk) -> Tensor:
    """What comes out at the end."""
    while True:
        try:
            next(walk)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class PromptImages:
    """The pictures of one prompt, and its videos' groups of frames, while it is read.

    Each is embedded when the first chunk needs it, and let go after.
    """

    def __init__(self, images: list[ImageInput], tower: VisionTower | None) -> None:
        self._waiting = list(images)
        self._tower = tower
        self._ready: dict[int, Tensor] = {}
        self._walk: Walk | None = None  # of the first picture that is not ready

    def look(self, start: int, count: int) -> bool:
        """Do at most about `PRODUCTS_A_LOOK` of the work for the tokens at start .. start + count - 1; whether all is done."""
        left = PRODUCTS_A_LOOK
        for image in self._needed(start, count):
            walk = self._walk = self._walk or self._tower_of(image).look(image)
            while image.start not in self._ready:
                if left <= 0:
                    return False
                try:
                    left -= next(walk)
                except StopIteration as end:
                    self._ready[image.start], self._walk = end.value, None
        return True

    def _needed(self, start: int, count: int) -> list[ImageInput]:
        """The pictures of those tokens that are not ready."""
        return [
            image
            for image in self._waiting
            if image.start not in self._ready
            and image.start < start + count
            and image.start + self._tower_of(image).tokens(image) > start
        ]

    def _tower_of(self, image: ImageInput) -> VisionTower:
        assert self._tower is not None, f"admission lets no picture at {image.start} in without a tower"
        return self._tower

    def rows(self, start: int, count: int) -> list[tuple[int, Tensor]]:
        """For the tokens at start .. start + count - 1: where in them a picture's embeddings begin, and these."""
        while not self.look(start, count):
            pass
        found = []
        for image in self._waiting:
            begin, end = max(start, image.start), min(start + count, image.start + self._tower_of(image).tokens(image))
            if begin < end:
                found.append((begin - start, self._ready[image.start][begin - image.start : end - image.start]))
        return found

    def release(self, read: int) -> None:
        """The prompt has been read up to index `read`: forget the pictures that lie before."""
        assert self._tower is not None or not self._waiting
        for image in list(self._waiting):
            if self._tower is not None and image.start + self._tower.tokens(image) <= read:
                self._waiting.remove(image)
                self._ready.pop(image.start, None)


def rows_hash(rows: list[tuple[int, Tensor]]) -> bytes:
    """A digest of embeddings and their places, for the lockstep record; empty where there are none."""
    if not rows:
        return b""
    digest = xxhash.xxh64()
    for begin, values in rows:
        digest.update(begin.to_bytes(8, "little"))
        digest.update(values.contiguous().cpu().numpy().tobytes())
    return digest.digest()


def _apply(x: Tensor, layer: Affine) -> Tensor:
    return ops.linear_bias(x, layer.plain, layer.bias)


def _norm(x: Tensor, layer: Affine) -> Tensor:
    return ops.layer_norm(x, layer.plain, layer.bias, EPS)
