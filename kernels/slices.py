"""Launches of the decode linear whose warps own slices of K (csrc/linear_slices.cuh): which matrices go that way, and how a
launch is cut.

A matrix goes by its encoding and its columns alone, never by the number of tokens or its company: the bits of a token depend
on the way. A block a multiprocessor holds as many whole bands as every other, and of what is left over a run of units. More
than eight tokens go in bands, with the same chains of additions (`SLICED` in kernels/tuning.py).
"""

import functools

from .task import SWIGLU, Task

SLICES = 16  # of K, a warp each
THREADS = 32 * SLICES
TOKENS = 8  # whose activations stay in registers
KERNEL = f"linear_nvfp4_slices_{TOKENS}"
ENCODING = "nvfp4"
FOUR_COLUMNS = 64  # of a product: columns are dealt in fours of tiles
_FOURS = 5  # of the longest slice; others may have one less: from 4,160 to 5,120 columns
_RINGS = SLICES * _FOURS * 1152  # bytes of all warps' rings: a band of a slice each
_SUM_PITCH = 17  # floats of a token's sums of sixteen rows
OLDEST = 80  # the first architecture with copies that need no registers
_LEAST_SHARED = 163 << 10  # bytes that a block must be able to have: rings, and twice the sums of gate and up of a band


@functools.cache
def goes(encoding: str, columns: int, arch: str, shared_bytes: int) -> bool:
    """Whether a matrix goes in slices, by code for `arch` on a card whose blocks may have `shared_bytes` of shared memory."""
    if encoding != ENCODING or int(arch.partition("_")[2]) < OLDEST or shared_bytes < _LEAST_SHARED:
        return False
    return columns % FOUR_COLUMNS == 0 and -(-columns // (FOUR_COLUMNS * SLICES)) == _FOURS


def cut(filled: Task, blocks: int, most_bytes: int) -> int:
    """Cuts a launch of bands into shares of `blocks` blocks; bytes of shared memory of each, which may have `most_bytes`."""
    paired = filled.epilogue == SWIGLU
    # Of a band, or of gate and up of one; slots hold sums of sixteen rows, or a unit's.
    units, slots = (8, 4) if paired else (4, 2)
    filled.cut.bands, left = divmod(filled.items, blocks)
    filled.cut.units, filled.cut.more = divmod(left * units, blocks)
    filled.cut.round, rounds = filled.cut.bands * slots + filled.cut.units + bool(filled.cut.more), 1
    slot_bytes = SLICES * filled.tokens * _SUM_PITCH * 4
    if _RINGS + filled.cut.round * slot_bytes > most_bytes:  # two that take turns; gate and up of a row are in one
        filled.cut.round, rounds = (most_bytes - _RINGS) // (2 * slot_bytes) // slots * slots, 2
    assert filled.cut.round, "less shared memory than `goes` asks for"
    return _RINGS + rounds * filled.cut.round * slot_bytes
