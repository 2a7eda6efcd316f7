"""What a pair of child processes finds out about the ways between two cards. `choice.py` starts it and judges.

`python -m duovolt.runtime.parallel.probe SHARED RANK DEVICE TRANSPORT... [SWITCH...]`, one line of JSON for every find:
`{"began": T}`, then `{"tried": T, "fault": null or why, "microseconds": of a 40 KB sum in a graph, "large": the same by
bytes}`. Switches: `trusted`, peer memory is tried whatever the IOMMU does; `distrusted`, NCCL is to keep away from it;
`together`, both ranks are on one card, which gives their kernels turns: times would say nothing and are not taken.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ...checkpoint.errors import EnvironmentFault, InputError
from ...kernels.peer import native_link, pci_address
from .device import CpuDeviceCollective, DeviceCollective
from .faults import MAILBOX_DOOR, trial_fault
from .handshake import exchange_bytes, exchange_facts
from .links import MailboxDevice, Transport, open_mailbox
from .mailbox import MailboxCollective
from .nccl import NcclDevice, obey, refusal, version, warning
from .timing import large_seconds, reduce_seconds
from .trial import try_collective
from .twins import DISTRUSTED, TOGETHER, TRUSTED, Twin, be_twin

BUDGET_SECONDS = 2.0  # a link that takes longer for a word is broken
EXCHANGE_SECONDS = 45.0  # the twins may be apart by a compilation
TOKENS = 4
LARGE = (1 << 19, 1 << 20, 1 << 21, 1 << 22, 1 << 23)  # bytes of fp16
ROUNDS, CPU_ROUNDS = 1000, 30
PCI_DEVICES = Path("/sys/bus/pci/devices")
TRANSLATED = ("DMA", "DMA-FQ")  # types of IOMMU group in which peer writes over PCIe may go astray


def probe(twin: Twin) -> None:
    """Try the transports in order; a fault of one leaves the others their turn."""
    device = torch.device("cpu") if twin.device == "cpu" else torch.device("cuda", int(twin.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # two processes may share two cores
    peer_memory = DISTRUSTED not in twin.arguments
    for transport in twin.arguments:
        if transport in (DISTRUSTED, TOGETHER, TRUSTED):
            continue
        twin.say(began=transport)
        fault: str | None = None
        facts: dict[str, Any] = {}
        try:
            if transport == "ipc" and not {TRUSTED, TOGETHER} & set(twin.arguments):
                _check_trust()
            fault, facts = _try(twin, transport, device, peer_memory)
        except EnvironmentFault as error:  # both ranks have it, or know it
            fault = str(error)
        theirs = exchange_facts(twin.mailbox, {"fault": fault})["fault"]
        fault = fault or theirs
        peer_memory = peer_memory and not (transport == "ipc" and fault)
        twin.say(tried=transport, fault=fault, **({} if fault else facts))


def _try(twin: Twin, transport: str, device: torch.device, peer_memory: bool) -> tuple[str | None, dict[str, Any]]:
    collective = _open(twin, transport, device, peer_memory)
    try:
        fault = try_collective(collective, device, ROUNDS if device.type == "cuda" else CPU_ROUNDS)
        theirs = exchange_facts(twin.mailbox, {"fault": fault})["fault"]
        if fault or theirs or device.type != "cuda" or TOGETHER in twin.arguments:
            return fault, {}
        meet = partial(exchange_bytes, twin.mailbox, b"")
        small = reduce_seconds(collective, meet, device, TOKENS) * 1e6
        large = {size: large_seconds(collective, meet, device, size) * 1e6 for size in LARGE}
        return None, {
            "microseconds": small,
            "large": large,
            "note": warning(version()) if transport == "nccl" else None,
        }
    finally:
        exchange_facts(twin.mailbox, {})  # neither frees what the other may still write to
        if isinstance(collective, MailboxDevice | NcclDevice):
            collective.close()


def _open(twin: Twin, transport: str, device: torch.device, peer_memory: bool) -> DeviceCollective:
    if transport == "cpu":
        return CpuDeviceCollective(MailboxCollective(twin.mailbox))
    if transport in ("ipc", "host"):
        os.environ[MAILBOX_DOOR] = trial_fault(transport)  # a fault ordered of the ranks is none of the trial's
        return open_mailbox(cast(Transport, transport), twin.mailbox, device, BUDGET_SECONDS)
    if transport != "nccl":
        raise InputError(f"transport {transport!r} is unknown.")
    found = version()
    if reason := refusal(found, torch.cuda.get_device_capability(device)):
        raise EnvironmentFault(reason)
    obey(peer_memory)
    return NcclDevice(twin.mailbox, device, EXCHANGE_SECONDS)


def _check_trust() -> None:
    if reason := distrusted([pci_address(0), pci_address(1)], native_link(0, 1)):
        raise EnvironmentFault(reason)


def distrusted(addresses: list[str], native: bool, root: Path = PCI_DEVICES) -> str | None:
    """Why peer memory between the PCI devices `addresses` is distrusted, whatever the driver says; None if it is not.

    An IOMMU that translates DMA may send peer writes over PCIe astray. `native`: the cards are joined by NVLink, which
    does not pass it.
    """
    if native:
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


if __name__ == "__main__":
    sys.exit(be_twin(probe, EXCHANGE_SECONDS))
