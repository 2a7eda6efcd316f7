"""Launches of gate and up in one pass (csrc/linear_pair_pass.cuh): which go that way, and how they are cut.

Of the matrices that go in slices of K (kernels/slices.py), with the same bits: the way is free. A block a multiprocessor has two
bands of gate and the same of up, and most blocks a unit of what is left over, so a launch goes that way whose pairs of bands are
twice the multiprocessors and a few more.
"""

from .slices import SLICES
from .task import SWIGLU, Task
from .weights import BAND

KERNEL = "linear_nvfp4_pairs_8"
_PAIRS = 2  # of bands of a block
_OUTPUTS = 2  # of a unit, each a row of gate and of up
_UNITS = BAND // _OUTPUTS  # of a pair
_WARP_BYTES = 4 * 4 * (256 + 32) + 2 * 512 + 4 * 64  # four bands' tiles, two sets of scales, a unit
SHARED_BYTES = SLICES * _WARP_BYTES
_MOST_BYTES = 2**32  # of a matrix: addresses are told from its beginning


def goes(filled: Task, blocks: int) -> bool:
    """Whether a launch in slices may go in one pass of so many blocks."""
    left = filled.items - _PAIRS * blocks
    small = filled.items * filled.groups * BAND * 8 < _MOST_BYTES
    return filled.epilogue == SWIGLU and small and 0 <= left * _UNITS <= blocks


def cut(filled: Task, blocks: int) -> int:
    """Cuts a launch into shares of `blocks` blocks; bytes of shared memory of each."""
    filled.cut.bands, filled.cut.units = _PAIRS, 0
    filled.cut.more = (filled.items - _PAIRS * blocks) * _UNITS
    assert 0 <= filled.cut.more <= blocks
    return SHARED_BYTES
