"""The paged cache of keys and values as the GPU holds it: fp16, or int8 with Hadamard-turned keys.

A page holds 64 tokens; a pool is shared by all lanes, which find their pages in block tables. Within a page each kv head
has a tile of 64 x 256 elements whose 16-byte pieces are ordered for the tensor cores (docs/kernels/attention.md).

int8: value = (word - 128) * scale, with an fp16 scale for each token, kv head and 64 dimensions. Keys are multiplied by
the orthonormal 256 x 256 Hadamard matrix before they are rounded, and queries likewise, which leaves their products as
they were and spreads a key's outliers over all its dimensions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from .checks import check

PAGE = 64  # tokens a page
DIM = 256  # dimensions a head
BLOCK = 64  # dimensions an int8 scale
BLOCKS = DIM // BLOCK


@dataclass(frozen=True)
class KVCache:
    """The pool of one layer. Raises InputError if the parts do not fit one another.

    int8: keys uint8 [pages, KV heads, 8, 4, 4, 8, 16] (position / 8, piece of the block, block of 64 dimensions,
    position % 8, dimension % 16), values uint8 [pages, KV heads, 4, 256, 16] (position / 16, dimension, position % 16),
    key_scales and value_scales fp16 [pages, KV heads, 64, 4].
    fp16: keys [pages, KV heads, 8, 8, 4, 8, 8], values [pages, KV heads, 8, 256, 8], no scales.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def __post_init__(self) -> None:
        if self.keys.dim() != 7 or 0 in self.keys.shape:
            raise InputError(f"keys is {list(self.keys.shape)}: expected a pool as KVCache.empty makes it.")
        pages, heads = self.keys.shape[:2]
        piece, dtype = (16, torch.uint8) if self.is_int8 else (8, torch.float16)
        device = self.keys.device
        check("keys", self.keys, dtype, (pages, heads, 8, BLOCK // piece, BLOCKS, 8, piece), device)
        check("values", self.values, dtype, (pages, heads, PAGE // piece, DIM, piece), device)
        for name, scales in (("key_scales", self.key_scales), ("value_scales", self.value_scales)):
            if (scales is None) == self.is_int8:
                raise InputError(f"{name}: an int8 cache has scales, an fp16 cache has none.")
            if scales is not None:
                check(name, scales, torch.float16, (pages, heads, PAGE, BLOCKS), device)

    @staticmethod
    def empty(pages: int, kv_heads: int, *, int8: bool, device: torch.device | str = "cpu") -> "KVCache":
        """A pool of zeros: nothing that was never written may be NaN, because it meets weights of zero."""
        piece, dtype = (16, torch.uint8) if int8 else (8, torch.float16)
        keys = torch.zeros(pages, kv_heads, 8, BLOCK // piece, BLOCKS, 8, piece, dtype=dtype, device=device)
        values = torch.zeros(pages, kv_heads, PAGE // piece, DIM, piece, dtype=dtype, device=device)
        if not int8:
            return KVCache(keys, values)
        scales = [torch.zeros(pages, kv_heads, PAGE, BLOCKS, dtype=torch.float16, device=device) for _ in range(2)]
        return KVCache(keys, values, *scales)

    @property
    def is_int8(self) -> bool:
        return self.keys.dtype == torch.uint8

    @property
    def pages(self) -> int:
        return self.keys.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[1]

    def decoded(self) -> tuple[Tensor, Tensor]:
        """Keys (still turned, if int8) and values, float32 [pages, 64, KV heads, 256]."""
        pages, heads = self.keys.shape[:2]
        keys = self.keys.permute(0, 2, 5, 1, 4, 3, 6).reshape(pages, PAGE, heads, BLOCKS, BLOCK)
        values = self.values.permute(0, 2, 4, 1, 3).reshape(pages, PAGE, heads, BLOCKS, BLOCK)
        parts = []
        for words, scales in ((keys, self.key_scales), (values, self.value_scales)):
            wide = words.float()
            if scales is not None:
                wide = (wide - 128.0) * scales.float().transpose(1, 2)[..., None]
            parts.append(wide.reshape(pages, PAGE, heads, DIM))
        return parts[0], parts[1]

    def store(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys (turned, if int8) and values float32 [T, KV heads, 256] at slots int64 [T], in place, by torch."""
        page, offset = slots // PAGE, slots % PAGE
        for wide, pool, scales, is_key in (
            (keys, self.keys, self.key_scales, True),
            (values, self.values, self.value_scales, False),
        ):
            words = wide.half() if scales is None else self._quantised(wide, scales, page, offset)
            piece = words.element_size() * -8 + 24  # 16 bytes: 16 words or 8 halves
            if is_key:
                tiles = words.reshape(len(slots), self.kv_heads, BLOCKS, BLOCK // piece, piece)
                pool[page, :, offset // 8, :, :, offset % 8] = tiles.transpose(2, 3)
            else:
                pool[page, :, offset // piece, :, offset % piece] = words

    def _quantised(self, wide: Tensor, scales: Tensor, page: Tensor, offset: Tensor) -> Tensor:
        blocks = wide.reshape(*wide.shape[:2], BLOCKS, BLOCK)
        scale = (blocks.abs().amax(-1) / 127.0).half()
        scales[page, :, offset] = scale
        unit = scale.float()
        inverse = torch.where(unit > 0, 1.0 / unit, torch.zeros_like(unit))
        codes = (blocks * inverse[..., None]).round().clamp(-127.0, 127.0) + 128.0
        return codes.nan_to_num(128.0).to(torch.uint8).reshape(wide.shape)


def hadamard(x: Tensor) -> Tensor:
    """x [..., 256] float32 times the Hadamard matrix in Sylvester's order over 16."""
    size = x.shape[-1]
    step = 1
    while step < size:
        pairs = x.unflatten(-1, (size // (2 * step), 2, step))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        step *= 2
    return x / size**0.5
