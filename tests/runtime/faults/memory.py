"""A memory file system without room: a small /dev/shm of the server's own, in a mount namespace."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from ..conftest import Server
from .invariants import logs_agree, refuses_or_serves, serves
from .trials import running, wait_ranks
from .world import World

_REGION = 600_000  # bytes that hold the shared file


def can_unshare() -> bool:
    """Whether this machine lets a test have a mount namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0


def small(size: int = 2 * _REGION) -> list[str]:
    """The command before a server's that gives it `size` bytes."""
    script = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    return ["unshare", "-rm", "--propagation", "private", "sh", "-c", script, "sh"]


def full_at_start(world: World) -> None:
    """One message with the bytes that are needed, exit code 3, nothing left."""
    with running(world, before=small(_REGION // 4)) as server:
        assert server.wait_exit(40) == 3
        assert "bytes needed; free some room there" in server.log, server.log
        assert len([line for line in server.lines if line.startswith("duovolt:")]) == 1


def full_at_restart(world: World) -> None:
    """The ranks start again as soon as there is room, and not before; meanwhile the server says so."""
    began = time.monotonic()
    with running(world, before=small()) as server:
        server.wait_ready()
        fill_while_starting(world, server, time.monotonic() - began)


def fill_while_starting(world: World, server: Server, load_seconds: float) -> None:
    """Of a ready server that runs behind `small`, whose ranks take at most `load_seconds` to start."""
    again, ready = (server.log.count(words) for words in ("Ranks start again in", "ready on"))
    os.kill(wait_ranks(world, server)[-1], signal.SIGKILL)
    server.wait_log("Ranks start again in", count=again + 1)
    filler = Path(f"/proc/{server.pid}/root/dev/shm/filler")
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            server.wait_log("bytes needed; free some room there")
    assert refuses_or_serves(server) == 503
    filler.unlink()
    freed = time.monotonic()
    pause = float(re.findall(r"start again in ([\d.]+) s", server.log)[-1])
    server.wait_log("ready on", count=ready + 1)
    assert time.monotonic() - freed < pause + load_seconds + 5  # at the next try
    serves(world, server)
    logs_agree(world, server.pid, server.metric("completion_tokens_total"))
