"""Words to the service manager: systemd's notification protocol, a datagram to the socket that the environment names."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from ...checkpoint.numbers import is_count


def notify(state: str, patience_seconds: float = 1.0) -> None:
    """Tell it `state`, such as READY=1; nothing happens where nobody listens, and a listener that is full is not waited
    for beyond `patience_seconds`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # an abstract name
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.settimeout(patience_seconds)
        sock.sendto(state.encode(), address)


async def keep_alive() -> None:
    """Tell a service manager that watches this process, for ever and twice as often as it asks, that the loop turns."""
    limit, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not is_count(limit) or not int(limit) or pid not in ("", str(os.getpid())):
        return
    while True:
        notify("WATCHDOG=1", patience_seconds=0.0)
        await asyncio.sleep(int(limit) / 2e6)
