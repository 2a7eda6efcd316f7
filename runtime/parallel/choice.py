"""Which way two cards exchange: tried in child processes, judged once, and obeyed by both ranks and by NCCL.

A driver's word that peer memory works proves nothing, so every way carries real data first. The children are bounded in
time: a way that hangs costs its children, never the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from ...checkpoint.errors import EnvironmentFault, InputError
from .twins import Heard, run_twins

Wish = Literal["auto", "host", "ipc", "nccl"]
WISHES = ("auto", "host", "ipc", "nccl")
TRANSPORTS = ("ipc", "host", "nccl")
SECONDS = 90.0  # of one pair of children, their start included
PROBE = "duovolt.runtime.parallel.probe"
PCI_DEVICES = Path("/sys/bus/pci/devices")
TRANSLATED = ("DMA", "DMA-FQ")  # types of IOMMU group in which peer writes over PCIe may go astray


@dataclass(frozen=True)
class Verdict:
    """What was found of one way: `fault` says why it is not used, `microseconds` is a 40 KB sum in a graph."""

    transport: str
    fault: str | None
    microseconds: float | None = None

    def __str__(self) -> str:
        if self.fault is not None:
            return f"{self.transport} not used ({self.fault})"
        return f"{self.transport} right" + (f", {self.microseconds:.1f} us" if self.microseconds is not None else "")


@dataclass(frozen=True)
class Choice:
    """The way for small messages, whether NCCL takes large ones, and whether it may use peer memory."""

    small: Literal["host", "ipc", "nccl"]
    nccl: bool
    peer_memory: bool
    found: tuple[Verdict, ...]

    def __str__(self) -> str:
        large = "nccl" if self.nccl else self.small
        return f"{self.small}, large messages {large}; found: {'; '.join(map(str, self.found))}"

    @property
    def argument(self) -> str:
        """As a word for a rank's command line; `Choice.parse` reads it."""
        return ",".join([self.small, *(["nccl"] if self.nccl else []), *(["peer"] if self.peer_memory else [])])

    @staticmethod
    def parse(text: str) -> Choice:
        """Raises InputError if it is no `argument`."""
        small, *more = text.split(",")
        if small not in TRANSPORTS or not set(more) <= {"nccl", "peer"}:
            raise InputError(f"--collective {text}: expected host, ipc or nccl, and then nccl and peer.")
        return Choice(cast(Literal["host", "ipc", "nccl"], small), "nccl" in more, "peer" in more, ())


def choose(
    wish: Wish,
    devices: Sequence[str],
    distrust: str | None,
    run: Callable[[Sequence[str], float], list[Heard]] | None = None,
    seconds: float = SECONDS,
) -> Choice:
    """Try what `wish` leaves open between two devices (CUDA indices) and choose.

    `distrust`: why peer memory is not even tried (`distrusted`); a wish for ipc overrides it. `run` starts the children.
    Raises EnvironmentFault if what was wished for, or everything, fails.
    """
    start = run or (lambda arguments, limit: run_twins(PROBE, devices, arguments, limit))
    left = [transport for transport in TRANSPORTS if wish in ("auto", transport) or transport == "nccl"]
    verdicts: dict[str, Verdict] = {}
    if distrust and wish != "ipc" and "ipc" in left:
        verdicts["ipc"] = Verdict("ipc", distrust)
        left.remove("ipc")
    while left:
        shy = ["distrusted"] if (distrust and wish != "ipc") or _failed(verdicts.get("ipc")) else []
        heard = start([*left, *shy], seconds)
        verdicts |= {verdict.transport: verdict for verdict in judge(left, heard)}
        left = [transport for transport in left if transport not in verdicts]
    return _decide(wish, verdicts, shy=bool(distrust) and wish != "ipc")


def _failed(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.fault is not None


def judge(transports: Sequence[str], heard: Sequence[Heard]) -> list[Verdict]:
    """A verdict on every transport that both children tried, and on the first that they did not come back from.

    Always at least one: whatever happens, the next run has less to try.
    """
    verdicts = []
    for transport in transports:
        finds = [next((line for line in one.lines if line.get("tried") == transport), None) for one in heard]
        if None in finds:
            verdicts.append(Verdict(transport, _silence(transport, heard)))
            break
        faults = [str(find["fault"]) for find in finds if find and find.get("fault")]
        times = [float(find["microseconds"]) for find in finds if find and find.get("microseconds")]
        verdicts.append(Verdict(transport, faults[0] if faults else None, max(times) if times else None))
    return verdicts


def _silence(transport: str, heard: Sequence[Heard]) -> str:
    for rank, one in enumerate(heard):
        if not any(line.get("tried") == transport for line in one.lines):
            if one.exit_code is None:
                return f"rank {rank}'s trial hung"
            last = one.errors.splitlines()[-1] if one.errors else "no word"
            return f"rank {rank}'s trial ended with exit code {one.exit_code}: {last}"
    return "no answer"


def _decide(wish: Wish, verdicts: dict[str, Verdict], shy: bool) -> Choice:
    found = tuple(verdicts[transport] for transport in TRANSPORTS if transport in verdicts)
    told = "; ".join(map(str, found))
    good = {verdict.transport: verdict for verdict in found if verdict.fault is None}
    nccl = "nccl" in good
    small: str
    if wish != "auto":
        if wish not in good:
            raise EnvironmentFault(f"--collective {wish}: {told}. Try --collective auto.")
        small = wish
    elif mailboxes := [verdict for name, verdict in good.items() if name != "nccl"]:
        small = min(mailboxes, key=lambda verdict: verdict.microseconds or 0.0).transport
    elif nccl:
        small = "nccl"
    else:
        raise EnvironmentFault(f"the two cards cannot exchange data: {told}.")
    peer_memory = not shy and not _failed(verdicts.get("ipc"))
    return Choice(cast(Literal["host", "ipc", "nccl"], small), nccl, peer_memory, found)


def distrusted(addresses: Sequence[str], native_link: bool, root: Path = PCI_DEVICES) -> str | None:
    """Why peer memory between the PCI devices `addresses` is distrusted, whatever the driver says; None if it is not.

    An IOMMU that translates DMA may send peer writes over PCIe astray. `native_link`: they are joined by NVLink, which
    does not pass it.
    """
    if native_link:
        return None
    for address in addresses:
        try:
            kind = (root / address.lower() / "iommu_group" / "type").read_text().strip()
        except OSError:
            continue  # no IOMMU, or not ours to see: the trial decides
        if kind in TRANSLATED:
            return (
                f"the IOMMU translates for GPU {address} (type {kind}); boot with iommu=pt, or ask for --collective ipc"
            )
    return None
