"""Launches of the decode linear in one pass (csrc/linear_pass.cuh): which matrices go that way, and how a launch is cut.

A matrix goes by its encoding and its shape, on cards with as many multiprocessors as suit it; never by the number of tokens
or its company: the bits of a token depend on the way. It has a launch of its own: a block a multiprocessor, each with a band,
and some with a unit of eight rows of the bands that are left over. More than eight tokens go in bands, with the same chains of
additions (`SLICED` in kernels/tuning.py).
"""

import functools

from .slices import ENCODING, FOUR_COLUMNS, OLDEST, SLICES
from .task import Task
from .weights import BAND

TOKENS = 8
KERNEL = f"linear_nvfp4_pass_{TOKENS}"
_LEAST_FOURS = 8  # of a slice: from 8,192 columns on; of fewer, slices whose rows stream past are sooner
_UNITS = 4  # of a band
_RING = 3  # fours of each warp in shared memory
_FOUR_BYTES = 1536  # of one there, with what spreads the banks
SHARED_BYTES = SLICES * _RING * _FOUR_BYTES


@functools.cache
def goes(encoding: str, rows: int, columns: int, arch: str, shared_bytes: int, multiprocessors: int) -> bool:
    """Whether a matrix goes in one pass, by code for `arch` on a card of so many multiprocessors whose blocks may have
    `shared_bytes` of shared memory."""
    if encoding != ENCODING or int(arch.partition("_")[2]) < OLDEST or shared_bytes < SHARED_BYTES:
        return False
    left = rows // BAND - multiprocessors
    return (
        columns % FOUR_COLUMNS == 0
        and columns // FOUR_COLUMNS >= _LEAST_FOURS * SLICES
        and 0 <= left * _UNITS <= multiprocessors
    )


def cut(filled: Task, blocks: int) -> int:
    """Cuts a launch of one matrix into shares of `blocks` blocks; bytes of shared memory of each."""
    filled.cut.bands, filled.cut.units = 1, 0
    filled.cut.more = (filled.items - blocks) * _UNITS
    assert filled.matrices == 1 and 0 <= filled.cut.more <= blocks
    return SHARED_BYTES
