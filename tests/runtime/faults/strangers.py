"""Processes that should not be there: a rank that is started a second time by hand, a second server beside the first."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .invariants import serves, whole
from .reader import Reader
from .trials import running, wait_ranks
from .world import World


def second_rank_process(world: World) -> None:
    """The very command line of a running rank, once more: it leaves by itself, and the server does not notice."""
    with running(world, DUOVOLT_START_FAULT="0:1:1500") as server:
        command = Path(f"/proc/{wait_ranks(world, server)[-1]}/cmdline").read_text().split("\0")[:-1]
        early = subprocess.run(command, capture_output=True, text=True, timeout=30)
        server.wait_ready()
        late = subprocess.run(command, capture_output=True, text=True, timeout=30)
        for second in (early, late):
            assert second.returncode == 3
            assert "the proxy that started this rank is gone" in second.stderr
        serves(world, server)
        assert server.metric("restarts_total") == 0


def second_server(world: World) -> None:
    """Its start sweeps the dead and leaves the living alone: the first one's answer goes on."""
    with running(world) as server:
        server.wait_ready()
        reader = Reader(server, world.body())
        reader.wait_pieces(3)
        with running(world) as other:
            other.wait_ready()
            serves(world, other)
        reader.join(60)
        whole(world, reader, world.long)
        assert server.metric("restarts_total") == 0
