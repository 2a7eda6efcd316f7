"""The cards of this machine and the libraries that are to drive them, as facts; and whether they can.

`probe` asks torch and the driver. What is decided from the facts is decided by functions of them alone.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import msgspec

from ...checkpoint.errors import EnvironmentFault, InputError
from ...kernels.fatbin import runs_on
from ...kernels.libraries import INSTALL_FOR_VOLTA, VOLTA, driver_version

OLDEST = (7, 0)
CONTEXT = 640 << 20  # bytes of a card that a process takes before it allocates: 0.55 GB on an H200, less on older ones
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


class Card(msgspec.Struct, frozen=True):
    """One card. Memory in bytes, clock in MHz (0: not told); `index`: its place in PCI order among those that are seen."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_mhz: int
    memory: int
    free: int
    pci: str

    @property
    def kind(self) -> tuple[str, tuple[int, int], int, int]:
        """What two cards must share to give equal bits at equal speed."""
        return self.name, self.capability, self.multiprocessors, self.memory_mhz

    def __str__(self) -> str:
        clock = f", memory {self.memory_mhz} MHz" if self.memory_mhz else ""
        major, minor = self.capability
        return f"{self.name} (compute {major}.{minor}, {self.multiprocessors} multiprocessors{clock})"


class Probe(msgspec.Struct, frozen=True):
    """What is there. `arches`: code that torch's build holds; `kernels`: why ours cannot be had for a card, by index."""

    cards: list[Card]
    torch: str
    cuda: str | None
    arches: list[str]
    nccl: str | None = None
    driver: str | None = None
    kernels: dict[int, str] = {}
    reason: str = ""


def probe() -> Probe:
    """Ask torch and the driver; no card is an answer too. Call it where a context on every card does no harm."""
    import torch

    base: dict[str, Any] = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "driver": driver_version()}
    if torch.version.cuda is None:
        return Probe([], arches=[], reason=f"torch {base['torch']} is built without CUDA", **base)
    if not torch.cuda.is_available():
        return Probe([], arches=torch.cuda.get_arch_list(), reason="torch finds no usable NVIDIA card", **base)
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return Probe([], arches=[], reason='the driver\'s bindings are missing: pip install "duovolt[cuda]"', **base)
    cards, faults = [], {}
    for index in range(torch.cuda.device_count()):
        cards.append(_card(index))
        if fault := _kernel_fault(index):
            faults[index] = fault
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    return Probe(cards, arches=torch.cuda.get_arch_list(), nccl=nccl, kernels=faults, **base)


def choose_cards(found: Probe, ranks: int, wanted: list[int] | None) -> list[Card]:
    """A card for every rank, in rank order: `wanted` by number, else the first ones. One card for both only where it is
    named twice.

    Raises EnvironmentFault for too few cards, for unlike ones, and for a card that torch or our kernels hold no code for;
    InputError for numbers that make no sense.
    """
    if wanted is not None and len(wanted) != ranks:
        number = wanted[0]
        remedy = f", or {number},{number} to try both on one card (slow)" if ranks == 2 else ""
        raise InputError(
            f"--devices {','.join(map(str, wanted))}: {ranks} rank{'s need' if ranks > 1 else ' needs'} {ranks} card"
            f"{'s' if ranks > 1 else ''}{remedy}."
        )
    if not found.cards:
        raise EnvironmentFault(
            f"no card for the CUDA engine: {found.reason}. `duovolt doctor` tells more; --backend reference needs none."
        )
    numbers = list(range(ranks)) if wanted is None else wanted
    if beyond := [number for number in numbers if number >= len(found.cards)]:
        seen = "; ".join(f"{card.index}: {card}" for card in found.cards)
        raise EnvironmentFault(
            f"{ranks} rank{'s' if ranks > 1 else ''} asked for card {beyond[0]}, this machine shows {len(found.cards)} "
            f"({seen}). Split the model for as many ranks as there are cards (`duovolt shard --tp N`)."
        )
    cards = [found.cards[number] for number in numbers]
    for card in cards:
        check_code(found, card)
    first = cards[0]
    if other := next((card for card in cards if card.kind != first.kind), None):
        raise EnvironmentFault(
            f"card {first.index} is {first}, card {other.index} {other}: ranks on unlike cards may give different bits, and "
            "the slower one would set the pace. Choose two of a kind with --devices, or serve one rank."
        )
    return cards


def room_a_rank(cards: list[Card]) -> int:
    """Bytes that every rank can have on its card. Ranks on one card share what is free, less the contexts of all but one:
    who measured what is free held a context there."""
    sharing = {card.index: sum(other.index == card.index for other in cards) for card in cards}
    return min((card.free - (sharing[card.index] - 1) * CONTEXT) // sharing[card.index] for card in cards)


def check_code(found: Probe, card: Card) -> None:
    """Raises EnvironmentFault if torch, or our kernels, cannot run on the card: what each library holds, and the remedy."""
    major, minor = card.capability
    if card.capability < OLDEST:
        raise EnvironmentFault(
            f"card {card.index} is {card}: the kernels need compute 7.0 (V100) or newer. Choose another with --devices."
        )
    if not runs_on(found.arches, card.capability):
        remedy = INSTALL_FOR_VOLTA if card.capability == VOLTA else "install a torch build that names it"
        raise EnvironmentFault(
            f"card {card.index} is {card}, but torch {found.torch} (CUDA {found.cuda}) holds code for "
            f"{', '.join(found.arches) or 'no card at all'} only; nothing of it runs on sm_{major}{minor}. Remedy: {remedy}."
        )
    if (fault := found.kernels.get(card.index)) is not None:
        raise EnvironmentFault(
            f"card {card.index} is {card}: duovolt's kernels cannot be had for it. torch {found.torch} holds "
            f"{', '.join(found.arches)}; {fault}"
        )


def cpus_near(card: Card, nodes: Path = _NODES, pci: Path = _PCI) -> set[int]:
    """The CPUs of the card's memory node that this process may use; empty where the system does not tell."""
    try:
        node = int((pci / card.pci.lower() / "numa_node").read_text())
        if node < 0:
            return set()
        cpus = parse_cpus((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return set()
    return cpus & os.sched_getaffinity(0)


def parse_cpus(text: str) -> set[int]:
    """`0-3,8` as numbers. Raises ValueError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _card(index: int) -> Card:
    import torch
    from cuda.bindings import driver

    def attribute(handle: Any, name: str) -> int:
        status, value = driver.cuDeviceGetAttribute(
            getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle
        )
        return int(value) if int(status) == 0 else 0

    free, memory = torch.cuda.mem_get_info(index)
    properties = torch.cuda.get_device_properties(index)
    _, handle = driver.cuDeviceGet(index)
    status, uuid = driver.cuDeviceGetUuid(handle)
    domain, bus, slot = (attribute(handle, f"PCI_{part}_ID") for part in ("DOMAIN", "BUS", "DEVICE"))
    return Card(
        index=index,
        name=properties.name,
        uuid=_uuid_text(bytes(uuid.bytes)) if int(status) == 0 else str(index),
        capability=(properties.major, properties.minor),
        multiprocessors=properties.multi_processor_count,
        memory_mhz=attribute(handle, "MEMORY_CLOCK_RATE") // 1000,
        memory=memory,
        free=free,
        pci=f"{domain:04x}:{bus:02x}:{slot:02x}.0",
    )


def _uuid_text(raw: bytes) -> str:
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _kernel_fault(index: int) -> str:
    """Why our kernels cannot be loaded on a card; empty if they can. Compiles one source, or takes it from the cache."""
    from ...kernels.module import load
    from ...kernels.norm import SOURCE

    try:
        load(SOURCE, index)
    except (EnvironmentFault, InputError) as fault:
        return str(fault)
    return ""
