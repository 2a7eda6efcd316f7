"""Whether the compiled loops can be used, and where their machine code is kept.

numba compiles them on first use (some seconds) and keeps the result in `$XDG_CACHE_HOME/duovolt/loops`, never in the
installed package, which may be read-only. Where that cannot be written, each process compiles for itself. Whatever goes
wrong, a numba too old for the installed numpy or a damaged cache, the numpy formulas give the same bytes, more slowly.
"""

import atexit
import functools
import importlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ...checkpoint import cache
from ...checkpoint.encodings import fp8, nvfp4
from ...checkpoint.errors import EnvironmentFault

WORTH_COMPILING = 512 << 20  # source bytes that numpy quantises in about the time of a first compilation


@dataclass(frozen=True)
class Loops:
    """`module` is convert/quantisers/loops.py compiled; None, and why, if numpy does the work."""

    module: ModuleType | None
    reason: str

    def __str__(self) -> str:
        return "compiled" if self.module is not None else f"numpy ({self.reason})"


def cache_directory() -> Path:
    """Where compiled loops are kept. Raises EnvironmentFault as `checkpoint.cache` does."""
    return cache.cache_directory("loops")


def _place_for_code() -> str:
    """`cache_directory` if it can be written, else one of this process alone."""
    try:
        place = cache_directory()
        place.mkdir(parents=True, exist_ok=True)
        if os.access(place, os.W_OK | os.X_OK):
            return str(place)
    except (OSError, EnvironmentFault):
        pass
    alone = tempfile.mkdtemp(prefix="duovolt-loops-")
    atexit.register(shutil.rmtree, alone, ignore_errors=True)
    return alone


def _import() -> Any:
    """The loops module, decorated so that numba keeps its code where we say."""
    config = importlib.import_module("numba").config
    before = config.CACHE_DIR
    config.CACHE_DIR = _place_for_code()
    try:
        return importlib.import_module(".loops", __package__)
    finally:
        config.CACHE_DIR = before


def _self_test(loops: Any) -> None:
    """Raises ArithmeticError unless a small band gives the numpy formulas' bytes. Compiles what conversions use."""
    words = (np.arange(32 * 32, dtype=np.uint32) * 2654435761 >> 16).astype(np.uint16).reshape(32, 32)
    words &= np.uint16(0xBFFF)  # magnitudes below 2: finite, with both signs and many exponents
    weight = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    codes, scales = np.empty(64, np.uint64), np.empty(64, np.uint8)
    multiplier = nvfp4.multiplier(float(np.abs(weight).max()))
    loops.nvfp4(words, multiplier, codes, scales, False, False)
    expected, expected_scales = nvfp4.encode(weight, multiplier)
    equal = np.array_equal(codes.view(np.uint8), expected.reshape(-1))
    equal &= np.array_equal(scales, expected_scales.reshape(-1))
    rows, packed = fp8.row_scales(np.abs(weight).max(axis=1)), np.empty(128, np.uint64)
    loops.fp8(words, rows, packed, False)
    equal &= np.array_equal(packed.view(np.uint8), fp8.encode_rows(weight, rows).reshape(-1))
    if not equal:
        raise ArithmeticError("compiled loops and numpy give different bytes")


@functools.cache
def _load() -> Loops:
    try:
        loops = _import()
        _self_test(loops)
    except Exception as error:  # numba raises many kinds, and none of them must cost a conversion
        return Loops(None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no detail'}")
    return Loops(loops, "")


def choose(arithmetic: str, source_bytes: int) -> Loops:
    """`arithmetic`: auto, compiled or numpy; `source_bytes` are those that will be quantised.

    Raises EnvironmentFault if `compiled` is asked for and cannot be had.
    """
    if arithmetic == "numpy":
        return Loops(None, "asked for")
    if arithmetic == "auto" and source_bytes < WORTH_COMPILING:
        return Loops(None, "little to quantise")
    loops = _load()
    if arithmetic == "compiled" and loops.module is None:
        raise EnvironmentFault(
            f"compiled loops cannot be used: {loops.reason}. `--arithmetic numpy` gives the same bytes."
        )
    return loops
