"""What a pair of child processes finds out about the ways between two cards. `choice.py` starts it and judges.

`python -m duovolt.runtime.parallel.probe SHARED RANK DEVICE TRANSPORT...`, one line of JSON for every find:
`{"began": T}`, then `{"tried": T, "fault": null or why, "microseconds": of a 40 KB sum in a graph}`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import cast

import torch

from ...checkpoint.errors import EnvironmentFault, InputError
from .device import CpuDeviceCollective, DeviceCollective
from .handshake import exchange_bytes, exchange_facts
from .links import MailboxDevice, Transport, open_mailbox
from .mailbox import MailboxCollective
from .nccl import NcclDevice, obey, refusal, version
from .timing import reduce_seconds
from .trial import try_collective
from .twins import Twin, be_twin

BUDGET_SECONDS = 2.0  # a link that takes longer for a word is broken
EXCHANGE_SECONDS = 45.0  # the twins may be apart by a compilation
TOKENS = 4
ROUNDS, CPU_ROUNDS = 1000, 30
DISTRUSTED = "distrusted"


def probe(twin: Twin) -> None:
    """Try the transports in order; a fault of one leaves the others their turn."""
    device = torch.device("cpu") if twin.device == "cpu" else torch.device("cuda", int(twin.device))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # two processes may share two cores
    peer_memory = DISTRUSTED not in twin.arguments
    for transport in twin.arguments:
        if transport == DISTRUSTED:
            continue
        twin.say(began=transport)
        microseconds = None
        try:
            fault, microseconds = _try(twin, transport, device, peer_memory)
        except EnvironmentFault as error:  # both ranks have it, or know it
            fault = str(error)
        theirs = exchange_facts(twin.mailbox, {"fault": fault})["fault"]
        fault = fault or theirs
        peer_memory = peer_memory and not (transport == "ipc" and fault)
        twin.say(tried=transport, fault=fault, microseconds=None if fault else microseconds)


def _try(twin: Twin, transport: str, device: torch.device, peer_memory: bool) -> tuple[str | None, float | None]:
    collective = _open(twin, transport, device, peer_memory)
    try:
        fault = try_collective(collective, device, ROUNDS if device.type == "cuda" else CPU_ROUNDS)
        theirs = exchange_facts(twin.mailbox, {"fault": fault})["fault"]
        if fault or theirs or device.type != "cuda":
            return fault, None
        meet = partial(exchange_bytes, twin.mailbox, b"")
        return None, reduce_seconds(collective, meet, device, TOKENS) * 1e6
    finally:
        exchange_facts(twin.mailbox, {})  # neither frees what the other may still write to
        if isinstance(collective, MailboxDevice | NcclDevice):
            collective.close()


def _open(twin: Twin, transport: str, device: torch.device, peer_memory: bool) -> DeviceCollective:
    if transport == "cpu":
        return CpuDeviceCollective(MailboxCollective(twin.mailbox))
    if transport in ("ipc", "host"):
        return open_mailbox(cast(Transport, transport), twin.mailbox, device, BUDGET_SECONDS)
    if transport != "nccl":
        raise InputError(f"transport {transport!r} is unknown.")
    found = version()
    if reason := refusal(found, torch.cuda.get_device_capability(device)):
        raise EnvironmentFault(reason)
    obey(peer_memory)
    return NcclDevice(twin.mailbox, device, EXCHANGE_SECONDS)


if __name__ == "__main__":
    sys.exit(be_twin(probe, EXCHANGE_SECONDS))
