"""How the blocks of a decode linear share its work on sm_80 and newer, and the memory through which they hand it on.

A block takes an equal run of the launch's turns, counted by their bytes (csrc/linear_share.cuh). Where a run ends inside
of an item, the block hands unfinished sums to the next one, in a slot of its own that both leave with all bits set. So
launches that may run at the same time need slots apart: there is a set for each stream, and one for what is captured on it.
"""

import functools
import itertools
import threading

import torch

from ..checkpoint.errors import EnvironmentFault
from .task import SWIGLU, Task

WARPS, WARPS_OF_LARGE = 8, 16  # of a block that multiply, as in csrc/linear_task.cuh
TURNS = {
    "nvfp4": 8,
    "fp8": 4,
    "fp8_blocks": 4,
    "half": 4,
}  # tiles that a warp takes at a time, as in csrc/encodings.cuh
COSTS = {"nvfp4": 9, "fp8": 8, "fp8_blocks": 8, "half": 16}  # of a turn in a mixture, as in csrc/linear_share.cuh
SPARE = 4  # sets kept ready for captures to come, which must not allocate
_BAND, _MOST_TOKENS = 32, 24


def is_shared(arch: str) -> bool:
    """Whether blocks of this architecture share items: all but sm_70 and sm_75."""
    return _number(arch) >= 80


def warps(arch: str) -> int:
    """Of a block that multiply."""
    return WARPS_OF_LARGE if 90 <= _number(arch) < 120 else WARPS


def threads(arch: str) -> int:
    """Of a block: those of its warps and, where items are shared, of one that finishes them."""
    return 32 * (warps(arch) + is_shared(arch))


def pages(tokens: int) -> int:
    """Bands whose sums a block holds for the warp that finishes them, for tokens rounded up to eights."""
    return 2 if tokens <= 8 else 1


def blocks_a_multiprocessor(arch: str) -> int:
    """That are there at a time, and share a launch."""
    return 1 if warps(arch) == WARPS_OF_LARGE else 2


def share(filled: Task, encodings: list[str], arch: str, blocks: int) -> int:
    """Fills in the shares of at most `blocks` blocks; returns how many there are. No share is less than an item."""
    if filled.epilogue == SWIGLU:
        encodings, bands = encodings[:1], [filled.items]
    else:
        firsts = [filled.matrix[index].first_band for index in range(filled.matrices)] + [filled.items]
        bands = [after - first for first, after in itertools.pairwise(firsts)]
    parts = 2 if filled.epilogue == SWIGLU else 1
    mixed = len(set(encodings)) > 1
    costs = [parts * -(-filled.groups // TURNS[encoding]) * (COSTS[encoding] if mixed else 1) for encoding in encodings]
    total = sum(count * cost for count, cost in zip(bands, costs, strict=True))
    blocks = max(1, min(blocks, total // max(costs)))
    filled.share, filled.extra = divmod(total, blocks)
    return blocks


def slot_bytes(arch: str, tokens: int = _MOST_TOKENS) -> int:
    """Of what one block hands on: a float for each of its warps, rows and tokens, and the gates."""
    return 4 * _BAND * tokens * (warps(arch) + 1)


class Slots:
    """The sets of slots of one device, for launches of `arch` with up to `blocks` blocks."""

    def __init__(self, device: int, arch: str, blocks: int) -> None:
        self._words = slot_bytes(arch) // 4 * blocks
        self._device = device
        self._sets: dict[tuple[int, bool], torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def of_stream(self) -> torch.Tensor:
        """The set for launches on torch's current stream. Raises EnvironmentFault in a capture for which none is ready."""
        key = (torch.cuda.current_stream(self._device).cuda_stream, torch.cuda.is_current_stream_capturing())
        with self._lock:
            if key not in self._sets:
                if not key[1]:
                    self._refill(SPARE + 1)
                if not self._spare:
                    raise EnvironmentFault(
                        f"the linears captured on another stream of GPU {self._device} have no memory to hand sums on: "
                        "run one uncaptured before, or call `prepare`."
                    )
                self._sets[key] = self._spare.pop()
            elif not key[1]:
                self._refill(SPARE)
            return self._sets[key]

    def _refill(self, count: int) -> None:
        if len(self._spare) >= count:
            return
        while len(self._spare) < count:
            self._spare.append(torch.full((self._words,), -1, dtype=torch.int32, device=f"cuda:{self._device}"))
        torch.cuda.current_stream(self._device).synchronize()  # other streams will use them


@functools.cache
def slots(device: int, arch: str, blocks: int) -> Slots:
    """Those of a CUDA device, one for the process."""
    return Slots(device, arch, blocks)


def _number(arch: str) -> int:
    return int(arch.partition("_")[2].rstrip("af"))
