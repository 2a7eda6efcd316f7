"""How much of the exchanges between two cards stands beside computation: from the times of kernels."""

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[float, float, str]  # begin, end in microseconds, name
Interval = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Of one pass, in milliseconds. `exchange`: an exchange runs, waiting included; `hidden`: something else runs meanwhile.

    `whole`: from the first kernel's begin to the last one's end; `idle`: nothing runs.
    """

    whole: float
    exchange: float
    hidden: float
    idle: float


def overlap_of(spans: list[Span], exchanges: set[str]) -> Overlap | None:
    """`exchanges`: the names of kernels that exchange; None if nothing ran."""
    if not spans:
        return None
    exchanging = union((begin, end) for begin, end, name in spans if name in exchanges)
    computing = union((begin, end) for begin, end, name in spans if name not in exchanges)
    busy = length(union((begin, end) for begin, end, _ in spans))
    whole = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    both = length(exchanging) + length(computing) - busy
    return Overlap(whole / 1e3, length(exchanging) / 1e3, both / 1e3, (whole - busy) / 1e3)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points, in order and apart."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def length(intervals: Iterable[Interval]) -> float:
    """Of intervals that are apart."""
    return sum(end - begin for begin, end in intervals)
