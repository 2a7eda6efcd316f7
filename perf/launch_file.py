"""Times of a model's own launches, each measured alone on a card: what `bench launches` writes and `predict` adds up."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from ..checkpoint.directory import read_json
from ..checkpoint.errors import InputError, one_line
from .ledger import Launch
from .machine import Machine

FORMAT = "duovolt-launches-1"
BEHIND = 2  # predecessors of an edge: a norm lets the product behind it begin while the one before the norm still runs
LEAST = 0.97  # of the sum of their times alone: what launches in turn take at least, which drain and fill between one another
Made = TypeVar("Made")
_MOST_SECONDS = 60.0  # of a few layers, on the slowest host


class LaunchTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One launch. `key` as in `Launch.key`, without a measurement of its own where `seconds` is 0: `why` tells.

    `spread`: (largest - smallest) / median of repeats. Attention's time has its merge in it.
    """

    key: str
    nbytes: float
    seconds: float
    spread: float = 0.0
    why: str = ""

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in (self.nbytes, self.seconds, self.spread)):
            raise ValueError("bytes, seconds and spread are 0 or more")
        if self.seconds >= _MOST_SECONDS:
            raise ValueError("a launch takes less than a minute")


class Edge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that a call saves by beginning before the one before it has ended, behind those that stand before it.

    `key`: of the call, as in `Launch.key`; `after`: of its predecessors in a round, the nearest first. `nbytes`: keys and
    values that the call and they read, which one key has in many sizes, else 0. Below 0: it takes longer. `in_turn`: seconds of
    the call and those before it, none of them early; 0 in old files.
    """

    key: str
    after: list[str]
    saved: float
    nbytes: float = 0.0
    in_turn: float = 0.0

    def __post_init__(self) -> None:
        if not (abs(self.saved) < _MOST_SECONDS and math.isfinite(self.nbytes) and self.nbytes >= 0):
            raise ValueError("an edge saves less than a minute, and has bytes of 0 or more")
        if not 0 <= self.in_turn < _MOST_SECONDS:
            raise ValueError("launches of an edge take less than a minute")
        if 0 < self.in_turn < self.saved:
            raise ValueError("an edge saves no more than its launches take in turn")
        if not 1 <= len(self.after) <= 8:
            raise ValueError("an edge has predecessors")


class Chain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A few layers of a round in a row: seconds of `calls` calls, and the sum of their times alone. `lanes`, `drafts`: its.

    `overlapped`: seconds of the same with launches that overlap, 0 if not measured; `saved`: by its edges; `begin`: what a
    graph of the layers in turn takes beside, once, which is in none of these. `asking`: of `alone`, exchanges that ask for what
    the next product reads, which then takes less than alone, by as much as they take at most; 0 in old files.
    """

    model: str
    tp: int
    calls: int
    seconds: float
    alone: float
    lanes: int = 1
    drafts: int = 3
    overlapped: float = 0.0
    saved: float = 0.0
    begin: float = 0.0
    asking: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.overlapped < _MOST_SECONDS and all(abs(x) < _MOST_SECONDS for x in (self.saved, self.begin))):
            raise ValueError("a chain that overlaps takes less than a minute")  # nor of NaN
        if not all(0 < x < _MOST_SECONDS for x in (self.seconds, self.alone)) or self.calls < 1 or self.tp < 1:
            raise ValueError("a chain has calls, ranks, and seconds below 60")
        if not 0 <= self.asking <= self.alone:
            raise ValueError("the exchanges of a chain are part of its calls")
        if abs(self.saved) > self.alone:
            raise ValueError("the edges of a chain save no more than its calls take alone")

    @property
    def gap(self) -> float:
        """Seconds a call that different launches in a row cost beyond launches of one kind."""
        return (self.seconds - self.alone) / self.calls

    @property
    def fault(self) -> str:
        """Why it says nothing of a round; empty if it does."""
        if self.seconds >= LEAST * (self.alone - self.asking):
            return ""
        return (
            f"{self.calls} calls in a row take {self.seconds * 1e6:.1f} us, and one by one {self.alone * 1e6:.1f}: "
            "in turn they cannot be faster, so that some of them did less than in a round"
        )

    @property
    def gap_overlapped(self) -> float | None:
        """The same where launches overlap, beyond what their edges save; None if not measured."""
        return (self.overlapped - (self.alone - self.saved)) / self.calls if self.overlapped else None


class LaunchTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of them. `models`: what was measured for; `replay`: seconds between the graphs of two rounds; `refused`: what has
    no number, and why."""

    machine: Machine
    models: list[str]
    launches: list[LaunchTime]
    chains: list[Chain] = []
    replay: float = 0.0
    format: str = FORMAT
    edges: list[Edge] = []
    refused: list[str] = []

    def __post_init__(self) -> None:
        if not (math.isfinite(self.replay) and 0 <= self.replay < 1):
            raise ValueError("replay is in seconds, below 1")

    def encode(self) -> bytes:
        """The file's content."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def printable(text: str) -> str:
    """Of a file that anyone may have made, in one line."""
    return "".join(c if c.isprintable() else " " for c in text)


def unless_impossible(make: Callable[[], Made], what: str, refused: list[str]) -> Made | None:
    """What was measured, or None and a line in `refused`, once, for numbers that no file may hold: one disturbed clock must
    not cost a run all it has measured.
    """
    try:
        return make()
    except ValueError as error:
        if (line := f"{what}: {error}") not in refused:
            refused.append(line)
        return None


def by_key(files: Iterable[LaunchTimes]) -> dict[str, list[tuple[float, float]]]:
    """key -> (bytes, seconds) by rising bytes; a later file's time takes the place of an earlier one's."""
    found: dict[str, dict[float, float]] = {}
    for one in (launch for file in files for launch in file.launches):
        if one.seconds:
            found.setdefault(one.key, {})[one.nbytes] = one.seconds
    return {key: sorted(points.items()) for key, points in found.items()}


def read_launch_times(path: Path) -> LaunchTimes:
    """Raises InputError for what is no such file."""
    try:
        found = msgspec.convert(read_json(path), LaunchTimes)
    except (msgspec.ValidationError, ValueError) as error:
        raise InputError(f"{path}: not a file of `duovolt bench launches --json`: {one_line(error)}.") from None
    if found.format != FORMAT:
        raise InputError(f"{path}: format {found.format!r:.40}, this duovolt reads {FORMAT}.")
    return found


def at_bytes(points: list[tuple[float, float]], nbytes: float) -> float | None:
    """Seconds at `nbytes`: on a line between measured sizes, or beyond; a single size is only good for about itself.

    Bytes of 0: a key that has one size.
    """
    if len(points) == 1 or points[0][0] == 0:
        return (
            points[0][1]
            if points[0][0] == 0 or abs(nbytes - points[0][0]) <= 0.05 * max(nbytes, points[0][0])
            else None
        )
    index = 1
    while index < len(points) - 1 and nbytes > points[index][0]:
        index += 1
    (left, low), (right, high) = points[index - 1], points[index]
    return max(low + (high - low) / (right - left) * (nbytes - left), min(low, high) * 0.5)


def is_measured(launch: Launch, exact: Mapping[str, list[tuple[float, float]]]) -> bool:
    """Whether a time of its own is known, or the time of what it is part of."""
    return launch.key in exact or is_within(launch, exact)


def is_within(launch: Launch, exact: Mapping[str, list[tuple[float, float]]]) -> bool:
    """Whether its time is in that of another launch that was measured."""
    return bool(launch.within) and any(key.startswith(f"{launch.within} ") for key in exact)


def coverage(launches: Iterable[Launch], exact: Mapping[str, list[tuple[float, float]]]) -> tuple[int, int]:
    """How many launches were measured, and how many there are; collectives only if any was."""
    own = list(launches)
    if not any(is_measured(launch, exact) for launch in own if launch.family == "collective"):
        own = [launch for launch in own if launch.family != "collective"]
    return sum(is_measured(launch, exact) for launch in own), len(own)
