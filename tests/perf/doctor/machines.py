"""Made-up machines for the doctor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from duovolt.perf.doctor.facts import Card, Disk, Host, Link, Load, Sample, Software, Way

GB = 1 << 30
PCIE_V100 = Card(
    index=0, name="Tesla PG500-216", pci="0000:3b:00.0", capability=(7, 0), multiprocessors=72, memory=32 * GB,
    memory_free=32 * GB, core_mhz=1380, memory_mhz=1107, memory_mhz_application=1107, bus_bits=4096, pcie=1, pcie_most=3,
    lanes=16, lanes_most=16, nvlinks=0, temperature=38, slowdown_temperature=90, power_limit=250.0, retired=0, uncorrected=0,
    processes=0,
)  # fmt: skip
SXM2_V100 = msgspec.structs.replace(
    PCIE_V100, name="Tesla V100-SXM2-32GB", multiprocessors=80, core_mhz=1530, memory_mhz=877, memory_mhz_application=877,
    nvlinks=6,
)  # fmt: skip
NCCL_ARCHES = ["sm_50", "sm_60", "sm_61", "sm_70", "sm_80", "compute_90", "sm_90"]
SOFTWARE = Software(
    python="3.12.3", torch="2.7.1", torch_cuda="12.6", torch_arches=["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_90"],
    driver="580.65.06", nvrtc=(12, 6), nvrtc_reaches_volta=True, nccl=(2, 26, 2), nccl_arches=NCCL_ARCHES,
)  # fmt: skip
HOST = Host(
    cores=16, memory=64 * GB, memory_available=60 * GB, shm=32 * GB, shm_free=32 * GB, remove_ipc=False,
    pci_cards=("10de:1df0", "10de:1df0"),
)  # fmt: skip
HOST_WAY = Way(True, 4.1, 11.8e9)
LINK = Link(0, 1, True, Way(True, 2.2, 10.9e9), Way(True, 2.3, 10.8e9), HOST_WAY)


def change(value: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(value, **fields)


class Machine:
    """Probes that answer as they were told: by default two PCIe V100 without NVLink, all in order."""

    def __init__(self, *cards: Card, **given: Any) -> None:
        chosen = cards or (PCIE_V100, PCIE_V100)
        self.found = [change(card, index=index) for index, card in enumerate(chosen)]
        self.reason = given.get("reason")
        self.answers = {"software": SOFTWARE, "host": HOST, "link": LINK} | given

    def cards(self) -> tuple[list[Card], str | None]:
        return ([], self.reason) if self.reason else (self.found, None)

    def software(self) -> Software:
        return self.answers["software"]

    def host(self, folder: Path | None) -> Host:
        disk = Disk(GB, 900e6, 1900e6, 100 * GB) if folder else None
        return change(self.answers["host"], disk=self.answers.get("disk", disk))

    def link(self, first: Card, second: Card) -> Link:
        return change(self.answers["link"], first=first.index, second=second.index)

    def load(self, cards: list[Card], seconds: float, tell: Callable[[float], None]) -> Load:
        for half in (1, 2):
            tell(half * seconds / 2)
        return self.answers.get("load") or Load(seconds, [samples([1380] * 9) for _ in cards])


def samples(clocks: list[int], temperature: int = 70, slowed: tuple[str, ...] = (), pcie: int = 3) -> list[Sample]:
    return [Sample(float(i), clock, temperature, 240.0, slowed, pcie) for i, clock in enumerate(clocks)]
