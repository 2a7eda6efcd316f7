"""Cards for `predict`: what a launch of n bytes takes on one, from a measured curve or from a card file.

A card file (perf/cards/*.toml) says where its numbers come from and what in it is assumed. Times include the launch.
"""

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

import msgspec

from ..checkpoint.directory import read_text
from ..checkpoint.encodings import tile_of, words_of
from ..checkpoint.errors import InputError, one_line
from ..checkpoint.numbers import is_count
from .curve import READ, Curve, Point, Series, read_curve
from .launch_file import Chain, LaunchTimes, at_bytes, by_key, is_within
from .ledger import Launch, Ledger
from .machine import Machine
from .savings import Savings, savings_of

LITTLE = 64 << 10  # bytes: below, a kernel's time is a constant
MEASURED = "measured"  # a link: what `bench launches` measured between two cards
_MAX_FILE = 1 << 20
_LARGEST = 1 << 40


class ReadForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The plain read: measured `points` (bytes, GB/s), or `start_us` and `gbps`, a constant and a constant a byte."""

    points: list[tuple[int, float]] = []
    gbps: float = 0.0
    start_us: float = 0.0


class SmallForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A node of a graph that does nothing, and a kernel that hardly touches memory.

    `gap_us`: between two kernels of a round, beyond what a launch costs in a row of its own kind; `gap_overlapped_us`: where
    launches overlap, beyond what [overlap] says that they save.
    """

    node_us: float
    kernel_us: float
    gap_us: float = 0.0
    gap_overlapped_us: float = 0.0


class LinkForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """(bytes, us) of collectives, by rising bytes."""

    reduce: list[tuple[int, float]]
    gather: list[tuple[int, float]]


class CardForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A card file. `overlap`: `before>kernel` -> us that a kernel saves by beginning before the one before it has ended."""

    name: str
    source: str
    assumed: str
    read: ReadForm
    small: SmallForm
    memory_mhz: int = 0
    memory_gb: float = 0.0  # as cards are sold, of 2^30 bytes; 0: not known
    kernel_us: dict[str, float] = {}
    share: dict[str, float | dict[str, float]] = {}
    link: dict[str, LinkForm] = {}
    overlap: dict[str, float] = {}


@dataclass(frozen=True)
class Card:
    """`series`: curves by kernel, the plain read always; `shares`: of the plain read's speed, by kernel and tokens.

    A key of `shares` is a kernel and an encoding (`linears.fp8`), a kernel, a family and an encoding, or a family: the
    first that is there holds, at the nearest number of tokens; for attention, of query rows a kv head. `exact`: launches
    that were measured alone, by key; `chains`: the same in a row; `replay`: seconds between rounds; `savings`: of launches
    that overlap, nothing where the card cannot or nobody has measured it. `memory`: its bytes, 0 if not known.
    """

    name: str
    source: str
    assumed: str
    node_us: float
    kernel_us: float
    series: Mapping[str, Sequence[Series]]
    small: Mapping[str, float]
    shares: Mapping[str, Mapping[int, float]]
    links: Mapping[str, LinkForm]
    exact: Mapping[str, list[tuple[float, float]]] = field(default_factory=dict)
    gap_us: float = 0.0
    chains: Sequence[Chain] = ()
    replay: float = 0.0
    savings: Savings = field(default_factory=Savings)
    gap_overlapped_us: float = 0.0
    memory: float = 0.0

    def seconds(self, launch: Launch) -> float:
        """Time of one kernel, its launch included."""
        if is_within(launch, self.exact):
            return 0.0
        if (points := self.exact.get(launch.key)) and (found := at_bytes(points, launch.moved)) is not None:
            return found
        if launch.moved < LITTLE:
            return self.small.get(launch.kernel, self.kernel_us) * 1e-6
        encoding = curve_name(launch.encodings[0]) if launch.encodings else READ
        node = self.node_us * 1e-6
        if launch.family in ("linear", "head") and (own := self.series.get(encoding)) and encoding != READ:
            return nearest(own, launch.tokens).seconds(launch.moved, node)
        read = self.series[READ][0].seconds(launch.moved, node) / self.share(launch, encoding)
        return max(read, self.kernel_us * 1e-6)

    def share(self, launch: Launch, encoding: str) -> float:
        """Share of the plain read's speed; 1 where nothing is known."""
        rows = launch.tokens
        if launch.family == "attention" and "/" in launch.form:
            query, kv = map(int, launch.form.split("/"))
            rows *= query // kv
        for key in (f"{launch.kernel}.{encoding}", launch.kernel, f"{launch.family}.{encoding}", launch.family):
            if table := self.shares.get(key):
                return table[min(table, key=lambda tokens: (abs(tokens - rows), tokens))]
        return 1.0

    def message(self, launch: Launch, link: str) -> float:
        """Seconds of a collective over `link`: none, measured, one of the card file's, or microseconds of any message.

        Raises InputError for another.
        """
        if link == "none":
            return 0.0
        if link == MEASURED:
            for key in (launch.key, launch.key.replace("reduce_norm", "reduce")):  # where a norm is a launch of its own
                if points := self.exact.get(key):
                    return points[0][1]
            raise InputError(f"{self.name}: `{launch.key}` was not measured between two cards: give --link.")
        if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", link):
            return float(link) * 1e-6
        if link not in self.links:
            known = ", ".join(["none", *self.links, "or microseconds"])
            raise InputError(f"{self.name}: no figures of a link {link!r}, only of {known}.")
        form = self.links[link]
        if launch.kernel != "gather":
            return _line(form.reduce, launch.message) * 1e-6
        found = _line(form.gather, launch.message)
        if launch.message <= min(
            form.reduce[0][0], form.gather[0][0]
        ):  # candidates, where only whole logits were timed
            found = min(found, form.reduce[0][1])
        return found * 1e-6

    def with_launches(self, files: Sequence[LaunchTimes]) -> "Card":
        """The same card with launches that were measured alone, what they save, and what lies between them; without chains that
        say nothing of a round (`Chain.fault`)."""
        chains = [one for file in files for one in file.chains if not one.fault]
        replays = [file.replay for file in files if file.replay]
        savings = savings_of((one for file in files for one in file.edges), self.savings.table)
        exact = by_key(files)
        return replace(self, exact=exact, chains=chains, replay=replays[-1] if replays else 0.0, savings=savings)

    def without_launches(self) -> "Card":
        """As it was before."""
        savings = Savings(table=self.savings.table)
        return replace(self, exact={}, chains=(), replay=0.0, savings=savings)

    def calls(self, ledger: Ledger) -> list[Launch]:
        """Launches of a round that are called by themselves, in order; a sum is one where no norm was measured with it."""
        fused = not self.exact or any(key.startswith("reduce_norm ") for key in self.exact)
        return [
            one if fused or one.kernel != "reduce_norm" else replace(one, kernel="reduce")
            for one in ledger.launches
            if not (is_within(one, self.exact) if self.exact else one.within)
        ]

    @property
    def has_exchanges(self) -> bool:
        """Whether sums between two cards were measured."""
        return any(key.startswith("reduce") for key in self.exact)

    def gap(self, ledger: Ledger, overlap: bool = False) -> float:
        """Seconds a launch that a round costs beyond launches of one kind in a row: of the most like round, the latest.

        Of other models with as many ranks the mean, where this one was not measured. `overlap`: beyond what its launches save.
        """
        gaps = {id(one): one.gap_overlapped if overlap and self.savings else one.gap for one in self.chains}
        alike = [one for one in self.chains if one.tp == ledger.tp and gaps[id(one)] is not None]
        if own := [one for one in alike if one.model == ledger.label]:
            shape = ledger.shape
            nearest = min(reversed(own), key=lambda one: (one.lanes != shape.lanes, one.drafts != shape.drafts))
            return gaps[id(nearest)] or 0.0
        if alike:
            return sum(gaps[id(one)] or 0.0 for one in alike) / len(alike)
        return (self.gap_overlapped_us if overlap and self.savings else self.gap_us) * 1e-6

    def with_shares(self, shares: Mapping[str, Mapping[int, float]]) -> "Card":
        """The same card with measured shares in place of what its file has."""
        return replace(self, shares={**self.shares, **shares})


def curve_name(encoding: str) -> str:
    """What a curve calls the kernel that reads an encoding."""
    words = words_of(encoding)
    if words == "fp8_e4m3":
        return "fp8" if tile_of(encoding) is None else "fp8_blocks"
    return {"bf16": "half", "fp16": "half", "fp32": "half"}.get(words, words)


def nearest(series: Sequence[Series], tokens: int) -> Series:
    """The longest series, among these the one measured at the nearest number of tokens."""
    return max(series, key=lambda one: (len(one.points), -abs((one.tokens or tokens) - tokens)))


def card_names() -> list[str]:
    """Names of the card files that ship with the package."""
    found = (resources.files(__package__) / "cards").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in found if file.name.endswith(".toml"))


def load_card(name_or_file: str) -> Card:
    """A known card, a card file (.toml), or a curve of `duovolt bench curve --json` (.json). Raises InputError."""
    if name_or_file.endswith(".json"):
        return card_of(read_curve(Path(name_or_file)))
    if name_or_file in card_names():
        text = (resources.files(__package__) / "cards" / f"{name_or_file}.toml").read_text(encoding="utf-8")
    elif name_or_file.endswith(".toml"):
        text = read_text(Path(name_or_file), _MAX_FILE, "a card file")
    else:
        raise InputError(f"card {name_or_file!r} is unknown: {', '.join(card_names())}, a .toml, or a curve's .json.")
    try:
        return _from_form(msgspec.convert(tomllib.loads(text), CardForm), name_or_file)
    except (ValueError, msgspec.ValidationError, RecursionError) as error:
        raise InputError(f"card {name_or_file}: {one_line(error)}.") from None


def _from_form(form: CardForm, where: str) -> Card:
    numbers = [
        form.small.node_us,
        form.small.kernel_us,
        form.small.gap_us,
        form.read.start_us,
        form.read.gbps,
        form.memory_gb,
        *form.kernel_us.values(),
    ]
    numbers += [value for point in form.read.points for value in point]
    shares: dict[str, dict[int, float]] = {}
    for key, found in form.share.items():
        table = found if isinstance(found, dict) else {"1": found}
        if not table or not all(is_count(tokens, 5) for tokens in table):
            raise ValueError(f"share {key!r}: tokens are whole numbers")
        shares[key] = {int(tokens): share for tokens, share in table.items()}
        if not all(0 < share <= 2 for share in shares[key].values()):
            raise ValueError(f"share {key!r}: expected above 0 and at most 2")
    for link in form.link.values():
        for points in (link.reduce, link.gather):
            numbers += [value for point in points for value in point]
            if not points or points != sorted(points) or len({nbytes for nbytes, _ in points}) != len(points):
                raise ValueError("a link needs points of rising bytes")
    if not all(math.isfinite(value) and 0 <= value < 1e15 for value in numbers):
        raise ValueError("numbers must be finite and not negative")
    either = [form.small.gap_overlapped_us, *form.overlap.values()]
    if not all(abs(us) < 1e6 for us in either) or not all(name.count(">") == 1 for name in form.overlap):
        raise ValueError("overlap: `before>kernel` and microseconds below a second")
    return Card(
        form.name, form.source, form.assumed, form.small.node_us, form.small.kernel_us, {READ: [_read(form.read)]},
        form.kernel_us, shares, form.link, gap_us=form.small.gap_us,
        savings=Savings(table={name: us * 1e-6 for name, us in form.overlap.items()}),
        gap_overlapped_us=form.small.gap_overlapped_us, memory=form.memory_gb * 2**30,
    )  # fmt: skip


def _read(form: ReadForm) -> Series:
    if form.points:
        points = form.points
    elif form.gbps > 0:  # a line: two points and what lies beyond
        points = [
            (nbytes, nbytes / (form.start_us * 1e-6 + nbytes / form.gbps / 1e9) / 1e9)
            for nbytes in (LITTLE, 1 << 20, _LARGEST)
        ]
    else:
        raise ValueError("read needs points, or gbps and start_us")
    return Series(READ, "", [Point(nbytes, gbps, gbps, 0.0) for nbytes, gbps in points])


def card_of(curve: Curve) -> Card:
    """A card as it was measured; what a curve does not hold is the card file's of the same card, if there is one."""
    series: dict[str, list[Series]] = {}
    for one in curve.series:
        if one.points:
            series.setdefault(one.kernel, []).append(one)
    if READ not in series:
        curve.find(READ)  # says what is missing
    machine, name = curve.machine, card_file_of(curve.machine)
    known = load_card(name) if name else None
    smallest = min(point.seconds for point in series[READ][0].points) * 1e6
    clock = f" (memory at {machine.memory_mhz} MHz)" if machine.memory_mhz else ""
    return Card(
        f"{machine.card}{clock}",
        f"`bench curve` of {machine.date}, driver {machine.driver}",
        f"the rest as {known.name}" if known else "small kernels take what the smallest read takes; no link is known",
        curve.node_us,
        known.kernel_us if known else smallest,
        series,
        known.small if known else {},
        {key: table for key, table in known.shares.items() if not key.partition(".")[2]} if known else {},
        known.links if known else {},
        gap_us=known.gap_us if known else 0.0,
        savings=known.savings if known else Savings(),
        gap_overlapped_us=known.gap_overlapped_us if known else 0.0,
        memory=machine.memory_bytes,
    )


def card_file_of(machine: Machine) -> str | None:
    """Name of the card file that is of the same card; a V100 is one by its compute capability, whatever it is called."""
    card = machine.card.lower()
    for name in card_names():
        words = name.split("-")
        if words[0] == "v100":
            if machine.capability == (7, 0) and str(machine.memory_mhz) == words[1]:
                return name
        elif all(word in card.replace("-", " ").split() for word in words if word != "rtx"):
            return name
    return None


def _line(points: Sequence[tuple[int, float]], nbytes: int) -> float:
    """us at `nbytes`: the first point's below it, a line between points; beyond the last in proportion, or on its line."""
    if nbytes <= points[0][0]:
        return points[0][1]
    if len(points) == 1:
        return points[0][1] * nbytes / max(1, points[0][0])
    index = 1
    while index < len(points) - 1 and nbytes > points[index][0]:
        index += 1
    (left, low), (right, high) = points[index - 1], points[index]
    found = low + (high - low) / (right - left) * (nbytes - left)
    return max(found, high) if nbytes > right else found
