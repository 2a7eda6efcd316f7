"""Words to the service manager: systemd's notification protocol, a datagram to the socket that the environment names."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(state: str) -> None:
    """Tell it `state`, such as READY=1; nothing happens where nobody listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # an abstract name
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state.encode(), address)
