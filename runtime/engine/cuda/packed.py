"""A lane's saved state in the host's memory: tensors end to end, in pieces of page-locked memory that waste none of it."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

GRAIN = 64 << 10  # bytes of the smallest piece


def sizes(nbytes: int) -> list[int]:
    """Powers of two, the largest first, that hold so many bytes, less than `GRAIN` too much: torch hands page-locked memory out
    in powers of two, and would round a state of 78 MB up to 128, or its 48 parts of 1.6 to 2."""
    grains = -(-nbytes // GRAIN)
    return [GRAIN << bit for bit in reversed(range(grains.bit_length())) if grains >> bit & 1]


class Packed:
    """Copies of contiguous tensors, made and put back on the current stream in its order: nobody waits for them.

    blocks uint8; what is kept are their first `used` bytes.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        pinned = tensors[0].device.type == "cuda"
        self.used = sum(tensor.nbytes for tensor in tensors)
        self.blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes(self.used)]
        for kept, here in self._pairs(tensors):
            kept.copy_(here, non_blocking=True)

    def put_back(self, tensors: Sequence[Tensor]) -> None:
        """Into tensors of the same sizes in the same order."""
        for kept, here in self._pairs(tensors):
            here.copy_(kept, non_blocking=True)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def _pairs(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a block, and those of a tensor, or of a part of one where a block ends."""
        blocks = iter(self.blocks)
        room = self.blocks[0][:0]
        for tensor in tensors:
            rest = tensor.view(-1).view(torch.uint8)
            while len(rest):
                if not len(room):
                    room = next(blocks)
                count = min(len(room), len(rest))
                yield room[:count], rest[:count]
                room, rest = room[count:], rest[count:]
