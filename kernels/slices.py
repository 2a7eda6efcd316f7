"""Launches of the decode linear whose warps own slices of K (csrc/linear_slices*.cuh): which matrices go that way, and how a
launch is cut.

A matrix goes by its encoding and its columns alone, never by the number of tokens or its company: the bits of a token depend
on the way. A block a multiprocessor holds as many whole bands as every other, and of what is left over a run of units. More
than eight tokens go in bands, with the same chains of additions (`SLICED` in kernels/tuning.py).
"""

import functools
from dataclasses import dataclass

from .task import SWIGLU, Task

SLICES = 16  # of K, a warp each
THREADS = 32 * SLICES
TOKENS = 8  # whose activations stay in registers
_FOUR = 4  # tiles of a product; columns are dealt in fours
_FOUR_BYTES = {"nvfp4": 576, "fp8": 1024}  # of sixteen rows, in a warp's ring
FOURS = {"nvfp4": (5, 9)}  # of the longest slice, that are compiled (SLICES_KEPT in csrc/linear.cuh)
_SUM_PITCH = 17  # floats of a token's sums in a step
_UNITS = {False: 4, True: 8}  # of a band, or of gate and up of one
_STEPS = {False: 2, True: 4}
_OLDEST = 80  # the first architecture with copies that need no registers
# Bytes of shared memory that a block must be able to have: rings of nine fours, and the sums of four steps of eight tokens.
_LEAST_SHARED = 120 << 10


@dataclass(frozen=True)
class Launch:
    """What `cut` found: the kernel's name, and bytes of dynamic shared memory."""

    name: str
    shared_bytes: int


@functools.cache
def goes(encoding: str, columns: int, arch: str, shared_bytes: int) -> bool:
    """Whether a matrix goes in slices, by code for `arch` on a card whose blocks may have `shared_bytes` of shared memory."""
    if encoding not in FOURS or int(arch.partition("_")[2]) < _OLDEST or shared_bytes < _LEAST_SHARED:
        return False
    return columns % (16 * _FOUR) == 0 and _longest(columns) in FOURS[encoding]


def cut(filled: Task, encoding: str, blocks: int, most_bytes: int) -> Launch:
    """Cuts a launch of bands into shares of `blocks` blocks; `most_bytes` of shared memory for a block."""
    paired = filled.epilogue == SWIGLU
    filled.cut.bands, left = divmod(filled.items, blocks)
    filled.cut.units, filled.cut.more = divmod(left * _UNITS[paired], blocks)
    most_units = filled.cut.units + bool(filled.cut.more)
    steps = filled.cut.bands * _STEPS[paired] + (most_units + 1) // 2
    longest = _longest(16 * filled.groups)
    rings = SLICES * longest * _FOUR_BYTES[encoding]
    step_bytes = SLICES * filled.tokens * _SUM_PITCH * 4
    filled.cut.round, rounds = steps, 1
    if rings + steps * step_bytes > most_bytes:  # two that take turns
        filled.cut.round, rounds = (most_bytes - rings) // (2 * step_bytes), 2
    return Launch(f"linear_{encoding}_slices_{longest}_{TOKENS}", rings + rounds * filled.cut.round * step_bytes)


def _longest(columns: int) -> int:
    """Fours of the longest slice."""
    return -(-columns // (16 * _FOUR * SLICES))
