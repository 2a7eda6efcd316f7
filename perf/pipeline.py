"""What `bench pipeline` measures: quantising a matrix, and whole conversions, each beside a peer in the same run.

Ratios are taken within a round, between neighbours in time, and the median of the rounds is reported: on a shared
machine both sides of a ratio then suffer alike.
"""

import functools
import shutil
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ..checkpoint.encodings import fp8, nvfp4
from ..checkpoint.encodings.plain import to_bf16
from ..checkpoint.errors import InputError
from ..checkpoint.layouts import ROWS
from ..convert.quantisers import QUANTISERS, compiled
from ..convert.quantisers.bands import BandEncoder
from .peers import Peer, fp8_peer, nvfp4_peer
from .processes import copy_files, require_new, run_duovolt, timed
from .specimen import write_source

BAND_ROWS = 4 * ROWS
MAGNITUDE = np.uint16(0x7FFF)


@dataclass(frozen=True)
class Race:
    """Medians in seconds for one BF16 matrix of `nbytes`; `ratio` of the peer's time to ours, None without the peer."""

    what: str
    nbytes: int
    ours: float
    peer: str
    theirs: float | None
    ratio: float | None
    missing: str


@dataclass(frozen=True)
class Conversion:
    """Medians: seconds of `convert`, and of `cp` + fsync of the source; `peak_anonymous` bytes of the converter."""

    source_bytes: int
    convert: float
    copy: float
    ratio: float
    peak_anonymous: int


def _row_amax(weight: np.ndarray, loops: compiled.Loops) -> np.ndarray:
    tops = np.empty(len(weight), np.uint16)
    if loops.module is None:
        tops = (weight & MAGNITUDE).max(axis=1)
    else:
        loops.module.row_tops(weight, MAGNITUDE, tops)
    return (tops.astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantise_nvfp4(weight: np.ndarray, encoder: BandEncoder, pool: ThreadPoolExecutor) -> list[object]:
    """All that a conversion does to a BF16 matrix (uint16 words): largest magnitude, scales, codes, V100 layout."""
    bands = [weight[first : first + BAND_ROWS] for first in range(0, len(weight), BAND_ROWS)]
    tops = pool.map(lambda band: float(_row_amax(band, encoder.loops).max()), bands)
    scale = QUANTISERS[encoder.quantiser].global_scale(max(tops), "BF16")
    return list(pool.map(lambda band: encoder.nvfp4(band, "BF16", scale, "v100-nvfp4", "v100-scale"), bands))


def quantise_fp8(weight: np.ndarray, encoder: BandEncoder, pool: ThreadPoolExecutor) -> list[object]:
    """As `quantise_nvfp4`, with one FP8 scale a row."""
    bands = [weight[first : first + BAND_ROWS] for first in range(0, len(weight), BAND_ROWS)]

    def work(band: np.ndarray) -> np.ndarray:
        return encoder.fp8(band, "BF16", fp8.row_scales(_row_amax(band, encoder.loops)), "v100-fp8")

    return list(pool.map(work, bands))


def _race(what: str, weight: np.ndarray, ours: Callable[[], object], peer: Peer, rounds: int) -> Race:
    tensor = torch.from_numpy(weight).view(torch.bfloat16)
    quantise, missing = peer.quantise, peer.missing
    mine: list[float] = []
    theirs: list[float] = []
    for _ in range(rounds):
        mine.append(timed(ours))
        if quantise is None:
            continue
        try:
            theirs.append(timed(functools.partial(quantise, tensor)))
        except Exception as error:  # a peer of another version: the figure is left out, with the reason
            quantise, missing = None, f"{type(error).__name__}: {error}".splitlines()[0]
    ratio = statistics.median(b / a for a, b in zip(mine, theirs, strict=True)) if quantise is not None else None
    return Race(
        what,
        weight.nbytes,
        statistics.median(mine),
        peer.name,
        statistics.median(theirs) if ratio else None,
        ratio,
        missing,
    )


def race_quantisers(rows: int, columns: int, rounds: int, workers: int, arithmetic: str) -> tuple[str, list[Race]]:
    """The arithmetic used, and the races on one Gaussian BF16 matrix. Raises InputError for a shape without tiles."""
    if rows % ROWS or columns % nvfp4.GROUP or min(rows, columns) < 1:
        raise InputError(f"{rows} x {columns}: rows must be a multiple of {ROWS}, columns of {nvfp4.GROUP}.")
    weight = to_bf16(np.random.default_rng(0).standard_normal((rows, columns), np.float32) * np.float32(0.02))
    loops = compiled.choose(arithmetic, weight.nbytes << 10)
    plain, search = BandEncoder("default", loops), BandEncoder("search", loops)
    nothing = Peer("", None, "")
    with ThreadPoolExecutor(workers) as pool:
        quantise_nvfp4(weight[:BAND_ROWS], search, pool)  # compiled before the clock runs
        races = [
            _race("nvfp4", weight, lambda: quantise_nvfp4(weight, plain, pool), nvfp4_peer(), rounds),
            _race("fp8_e4m3", weight, lambda: quantise_fp8(weight, plain, pool), fp8_peer(), rounds),
            _race("nvfp4, search", weight, lambda: quantise_nvfp4(weight, search, pool), nothing, 1),
        ]
    return str(loops), races


def race_conversion(work: Path, nbytes: int, rounds: int, workers: int, recipe: str) -> Conversion:
    """Convert a synthetic checkpoint of about `nbytes` under `work` (a new directory, removed again), and copy it.

    Raises InputError if `work` exists, EnvironmentFault if the disk is too small.
    """
    require_new(work)
    try:
        total = write_source(work / "source", nbytes)
        converts, copies, peaks = [], [], []
        for round_ in range(rounds):
            copies.append(timed(lambda: copy_files(work / "source", work / "copy")))
            shutil.rmtree(work / "copy")
            target = work / f"converted-{round_}"
            found = run_duovolt("convert", work / "source", target, "--recipe", recipe, "--workers", workers, "--quiet")
            converts.append(found.seconds)
            peaks.append(found.peak_anonymous)
            shutil.rmtree(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    ratio = statistics.median(copy / convert for copy, convert in zip(copies, converts, strict=True))
    return Conversion(total, statistics.median(converts), statistics.median(copies), ratio, max(peaks))
