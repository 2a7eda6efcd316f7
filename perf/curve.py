"""Read bandwidth against bytes a kernel: the record that `bench curve` writes and `predict` reads.

A kernel of n bytes takes `Series.seconds(n)`, launch included. Between two points time is a line in n, which holds where a
kernel costs a constant and a constant a byte. Below the first point the line through the first two goes on, but not below
the cost of a graph node; above the last the last bandwidth holds.
"""

import bisect
import math
from pathlib import Path

import msgspec

from ..checkpoint.errors import InputError
from .machine import Machine

FORMAT = "duovolt-curve-1"
READ = "read"  # the kernel that only reads
MOST_BYTES = 16 << 20  # of a file


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One size. `gbps`: GB/s as launched, the median of repeats; `net_gbps`: with a graph node's cost taken off.

    `spread`: (largest - smallest) / median of the repeats' times.
    """

    nbytes: int
    gbps: float
    net_gbps: float
    spread: float

    def __post_init__(self) -> None:
        good = all(math.isfinite(value) for value in (self.gbps, self.net_gbps, self.spread))
        if not good or self.nbytes <= 0 or self.gbps <= 0 or self.net_gbps < self.gbps or self.spread < 0:
            raise ValueError("a point needs nbytes > 0, gbps > 0, net_gbps >= gbps, spread >= 0")

    @property
    def seconds(self) -> float:
        """A launch, graph node included."""
        return self.nbytes / self.gbps / 1e9


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A size that was measured or asked for and has no number, and why."""

    nbytes: int
    why: str


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Points of one kernel by rising size: `read`, or a linear's encoding at K = `columns` and `tokens`.

    `arch`: what ran, sm_XY or compute_70.
    """

    kernel: str
    arch: str
    points: list[Point]
    columns: int = 0
    tokens: int = 0
    refused: list[Refused] = []

    def __post_init__(self) -> None:
        sizes = [point.nbytes for point in self.points]
        if sizes != sorted(set(sizes)):
            raise ValueError("points of a series must rise in nbytes")

    def seconds(self, nbytes: float, node_seconds: float = 0.0) -> float:
        """Time of a launch that reads `nbytes`, never below `node_seconds`. Raises InputError for a series of no points."""
        points = self.points
        if not points:
            raise InputError(f"the curve of {self.kernel!r} holds no point: nothing to interpolate.")
        if nbytes <= 0:
            return node_seconds
        if nbytes >= points[-1].nbytes or len(points) == 1:
            last = points[-1]
            return max(node_seconds, nbytes / last.gbps / 1e9)
        right = max(1, bisect.bisect_left([point.nbytes for point in points], nbytes))
        low, high = points[right - 1], points[right]
        slope = (high.seconds - low.seconds) / (high.nbytes - low.nbytes)
        return max(node_seconds, low.seconds + slope * (nbytes - low.nbytes))


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All series of one card in one run. `node_us`: a node of a captured graph that does nothing, in microseconds."""

    machine: Machine
    node_us: float
    node_spread: float
    pool_bytes: int
    repeats: int
    series: list[Series]
    format: str = FORMAT

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format is {self.format!r}, expected {FORMAT!r}")
        if not (math.isfinite(self.node_us) and self.node_us >= 0):
            raise ValueError("node_us must be 0 or more")

    def find(self, kernel: str, tokens: int = 1) -> Series:
        """The longest series of a kernel (all sizes), among those the first of the nearest number of tokens.

        Raises InputError if there is none.
        """
        found = [one for one in self.series if one.kernel == kernel and one.points]
        if not found:
            there = ", ".join(sorted({one.kernel for one in self.series}))
            raise InputError(f"the curve has no series of {kernel!r}, only of {there or 'nothing'}.")
        return max(found, key=lambda one: (len(one.points), -abs((one.tokens or tokens) - tokens)))

    def encode(self) -> bytes:
        """The file's content."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def read_curve(path: Path) -> Curve:
    """A curve from its file. Raises InputError for one that is damaged, another format's, or too large."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InputError(
            f"{path}: larger than {MOST_BYTES >> 20} MB; a curve of `duovolt bench curve --json` is small."
        )
    try:
        return msgspec.json.decode(content, type=Curve)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"{path}: not a curve of `duovolt bench curve --json`: {error}.") from None
