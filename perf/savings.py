"""What a round saves where launches overlap: seconds of each launch by what stands before it, measured or of its kind.

saved(launch) = that of the same launch behind the same two, on a line between the depths that were measured
                else the mean of launches of its kernel behind those of the same two kernels, else behind the same one
                else the card file's of the two kernels, else nothing
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .launch_file import BEHIND, Edge
from .ledger import Launch

Names = tuple[str, ...]


@dataclass(frozen=True)
class Savings:
    """`exact`: keys of a launch and of those before it, the nearest first -> (bytes, seconds) by rising bytes; `kinds`:
    kernels in that order -> seconds; `table`: a card file's, `before>launch` -> seconds."""

    exact: Mapping[Names, list[tuple[float, float]]] = field(default_factory=dict)
    kinds: Mapping[Names, float] = field(default_factory=dict)
    table: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.exact or self.table)

    def of(self, launch: Launch, before: Sequence[Launch]) -> float:
        """Seconds that `launch` saves behind `before`, the nearest first."""
        names = (launch.key, *(one.key for one in before))
        if points := self.exact.get(names):
            return _between(points, sum(one.kv for one in (launch, *before)))
        kinds = (launch.kernel, *(one.kernel for one in before))
        for some in (kinds, kinds[:2]):
            if some in self.kinds:
                return self.kinds[some]
        return self.table.get(kind_name(kinds), 0.0)

    def of_round(self, launches: Sequence[Launch]) -> tuple[int, float]:
        """How many launches save something or cost more, and the seconds of all; launches as they are called, in order."""
        found = [
            self.of(launch, launches[max(0, place - BEHIND) : place][::-1])
            for place, launch in enumerate(launches)
            if place
        ]
        return sum(seconds != 0 for seconds in found), sum(found)


def kind_name(kinds: Names) -> str:
    """As a card file names an edge."""
    return f"{kinds[1]}>{kinds[0]}"


def savings_of(edges: Iterable[Edge], table: Mapping[str, float]) -> Savings:
    """From measured edges, a later one in place of an earlier; what they lack is the card file's."""
    exact: dict[Names, dict[float, float]] = {}
    for edge in edges:
        exact.setdefault((edge.key, *edge.after), {})[edge.nbytes] = edge.saved
    kinds: dict[Names, list[float]] = {}
    for names, points in exact.items():
        kernels = tuple(name.split(" ", 1)[0] for name in names)
        for some in {kernels, kernels[:2]}:
            kinds.setdefault(some, []).extend(points.values())
    return Savings(
        {names: sorted(points.items()) for names, points in exact.items()},
        {names: statistics.fmean(seconds) for names, seconds in kinds.items()},
        table,
    )


def _between(points: list[tuple[float, float]], nbytes: float) -> float:
    """On a line between measured sizes, beyond them the nearest."""
    if nbytes <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if nbytes <= right:
            return low + (high - low) / (right - left) * (nbytes - left)
    return points[-1][1]
