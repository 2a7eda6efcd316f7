"""Shares of the plain read that kernels reached, from a file of `duovolt bench kernels --json`."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..checkpoint.directory import read_json
from ..checkpoint.errors import InputError, one_line

# Case of `bench kernels` -> keys of a card's shares. Sizes differ little between models; encodings matter most.
CASES: Mapping[str, tuple[str, ...]] = {
    "attention in": ("linears.fp8",),
    "delta in": ("linears.fp8",),
    "mixer out": ("linear.fp8",),
    "gate up": ("swiglu.nvfp4",),
    "down": ("linear.nvfp4",),
    "mtp fc": ("linear.fp8",),
    "draft head": ("head.fp8",),
    "head": ("head.fp8",),
    "head fp16": ("head.half", "linear.half", "linears.half"),
}


class Measured(msgspec.Struct, frozen=True):
    """A row of the file."""

    case: str
    arch: str
    tokens: int
    nbytes: int
    share: float
    without: str = ""
    overlap: bool = False


def read_shares(path: Path) -> dict[str, dict[int, float]]:
    """Key -> tokens -> share: of several cases under a key the mean, weighted by bytes. The card's own code only.

    Raises InputError for what is no such file, and for shares of launches that overlap.
    """
    try:
        rows = msgspec.convert(read_json(path), list[Measured])
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: not a file of `duovolt bench kernels --json`: {one_line(error)}.") from None
    if any(row.overlap for row in rows):
        raise InputError(
            f"{path}: of launches that overlap. A forecast takes shares in turn: measure without --overlap."
        )
    rows = [row for row in rows if not row.without and row.arch != "compute_70" and row.case in CASES]
    if not rows or any(not 0 < row.share <= 2 or row.nbytes <= 0 or not 1 <= row.tokens <= 1024 for row in rows):
        raise InputError(f"{path}: no rows of linears with a share of the plain read, or impossible ones.")
    sums: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        for key in CASES[row.case]:
            entry = sums.setdefault(key, {}).setdefault(row.tokens, [0.0, 0.0])
            entry[0] += row.nbytes / row.share  # times add up, so shares are averaged harmonically
            entry[1] += row.nbytes
    return {key: {tokens: both[1] / both[0] for tokens, both in table.items()} for key, table in sums.items()}
