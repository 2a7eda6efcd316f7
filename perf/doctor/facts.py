"""What the probes find, and the interface behind which they stand. None: not told, or not asked."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol

import msgspec

_MOST_PAIRS = 6  # all of four cards; of more, neighbours only


class Card(msgspec.Struct, frozen=True):
    """One card as the driver sees it. Clocks in MHz, memory in bytes, temperature in degrees Celsius.

    `pci`: its address, as in sysfs. `*_most`: what card and slot could do. `retired`: memory pages put out of use;
    `uncorrected`: memory errors of the card's life that were not corrected.
    """

    index: int
    name: str
    pci: str = ""
    capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    memory: int | None = None
    memory_free: int | None = None
    core_mhz: int | None = None
    memory_mhz: int | None = None
    memory_mhz_application: int | None = None
    bus_bits: int | None = None
    pcie: int | None = None
    pcie_most: int | None = None
    lanes: int | None = None
    lanes_most: int | None = None
    nvlinks: int | None = None
    temperature: int | None = None
    slowdown_temperature: int | None = None
    power_limit: float | None = None
    retired: int | None = None
    uncorrected: int | None = None
    processes: int | None = None
    iommu: str | None = None  # type of its group: DMA, DMA-FQ, identity; None: no group


class Software(msgspec.Struct, frozen=True):
    """Driver and libraries. `nccl_arches`: None where its file was not found."""

    python: str
    torch: str
    torch_cuda: str | None = None
    torch_arches: list[str] = []
    driver: str | None = None
    nvrtc: tuple[int, int] | None = None
    nvrtc_fault: str | None = None
    nvrtc_reaches_volta: bool = False
    nccl: tuple[int, ...] | None = None
    nccl_arches: list[str] | None = None
    prebuilt: bool = False


class Disk(msgspec.Struct, frozen=True):
    """Speeds of a folder in bytes a second, of `nbytes` written and flushed, then read from the disk; or why not."""

    nbytes: int = 0
    write: float = 0.0
    read: float = 0.0
    free: int = 0
    fault: str | None = None


class Host(msgspec.Struct, frozen=True):
    """The machine around the cards. Bytes. `pci_cards`: NVIDIA's display devices on the bus, as vendor:device."""

    cores: int
    memory: int
    memory_available: int
    shm: int | None = None
    shm_free: int | None = None
    remove_ipc: bool | None = None
    pci_cards: tuple[str, ...] = ()
    disk: Disk | None = None


class Way(msgspec.Struct, frozen=True):
    """One way of a link: were the words right, microseconds there and back, bytes a second of stores."""

    right: bool
    round_trip_us: float | None = None
    rate: float | None = None


class Link(msgspec.Struct, frozen=True):
    """Two cards, tested with real stores in a child process. `claimed`: what the driver says about peer access.

    `there`, `back`: stores of the first card into the second's memory and the reverse; `host`: through pinned memory.
    `fault`: why the test, or what of it is missing, has no result.
    """

    first: int
    second: int
    claimed: bool | None = None
    there: Way | None = None
    back: Way | None = None
    host: Way | None = None
    fault: str | None = None


class Sample(msgspec.Struct, frozen=True):
    """A card under load at one moment. `slowed`: reasons of the driver why the clock is lower than asked for."""

    seconds: float
    clock: int | None
    temperature: int | None
    power: float | None = None
    slowed: tuple[str, ...] = ()
    pcie: int | None = None


class Load(msgspec.Struct, frozen=True):
    """All cards at work together for `seconds`; samples of each card, in order of the cards. `fault`: why it ended early."""

    seconds: float
    samples: list[list[Sample]]
    fault: str | None = None


class Facts(msgspec.Struct, frozen=True):
    """All of it. `reason`: why no card is seen."""

    cards: list[Card]
    reason: str | None
    software: Software
    host: Host
    links: list[Link] = []
    load: Load | None = None


class Probes(Protocol):
    """Asks a machine. Nothing here judges, and nothing raises for what a machine lacks."""

    def cards(self) -> tuple[list[Card], str | None]:
        """The driver's cards, and if there are none, why."""
        ...

    def software(self) -> Software: ...

    def host(self, folder: Path | None) -> Host:
        """`folder`: whose disk to measure."""
        ...

    def link(self, first: Card, second: Card) -> Link: ...

    def load(self, cards: list[Card], seconds: float, tell: Callable[[float], None]) -> Load:
        """`tell` is told now and then how many seconds have passed."""
        ...


Grade = Literal["good", "limited", "broken"]


class Finding(msgspec.Struct, frozen=True):
    """One line: a grade, what it is about, what was found, and what to do about it."""

    grade: Grade
    about: str
    text: str
    remedy: str | None = None


def examine(
    probes: Probes,
    folder: Path | None = None,
    links: bool = True,
    load_seconds: float = 0.0,
    tell: Callable[[float], None] = lambda passed: None,
) -> Facts:
    """Ask everything; links and load only where there are cards for them. `tell`: the seconds of the load that have passed."""
    cards, reason = probes.cards()
    pairs = list(itertools.combinations(cards, 2))
    if len(pairs) > _MOST_PAIRS:
        pairs = list(itertools.pairwise(cards))
    return Facts(
        cards=cards,
        reason=reason,
        software=probes.software(),
        host=probes.host(folder),
        links=[probes.link(first, second) for first, second in pairs] if links else [],
        load=_load(probes, cards, load_seconds, tell) if load_seconds > 0 else None,
    )


def _load(probes: Probes, cards: list[Card], seconds: float, tell: Callable[[float], None]) -> Load:
    return probes.load(cards, seconds, tell) if cards else Load(0.0, [], "no card is seen")
