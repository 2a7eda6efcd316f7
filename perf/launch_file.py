"""Times of a model's own launches, each measured alone on a card: what `bench launches` writes and `predict` adds up."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..checkpoint.directory import read_json
from ..checkpoint.errors import InputError, one_line
from .ledger import Launch
from .machine import Machine

FORMAT = "duovolt-launches-1"


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


class LaunchTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of them. `models`: what was measured for."""

    machine: Machine
    models: list[str]
    launches: list[LaunchTime]
    format: str = FORMAT

    def encode(self) -> bytes:
        """The file's content."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


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


def distinct(launches: Iterable[Launch]) -> list[Launch]:
    """One launch of each key and size that is worth measuring: those whose extents are known."""
    found: dict[tuple[str, float], Launch] = {}
    for launch in launches:
        if launch.form:
            found.setdefault((launch.key, launch.moved), launch)
    return list(found.values())


def at_bytes(points: list[tuple[float, float]], nbytes: float) -> float | None:
    """Seconds at `nbytes`: on a line between measured sizes, or beyond; a single size is only good for about itself."""
    if len(points) == 1:
        return points[0][1] if abs(nbytes - points[0][0]) <= 0.01 * max(nbytes, points[0][0]) else None
    index = 1
    while index < len(points) - 1 and nbytes > points[index][0]:
        index += 1
    (left, low), (right, high) = points[index - 1], points[index]
    return max(low + (high - low) / (right - left) * (nbytes - left), min(low, high) * 0.5)


def coverage(launches: Iterable[Launch], exact: Mapping[str, list[tuple[float, float]]]) -> tuple[int, int]:
    """How many launches have a measurement of their own, and how many there are, collectives apart."""
    own = [launch for launch in launches if launch.family != "collective"]
    return sum(launch.key in exact for launch in own), len(own)
