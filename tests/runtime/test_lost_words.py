"""A server whose messages nobody can be told: its standard error is on a full disk, or its reader has left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from .conftest import ranks_of, wait_gone
from .stub_model import blocks, make_ranks, write_script


def wait_until(found: Callable[[], object], seconds: float = 40) -> None:
    start = time.monotonic()
    while not found():
        assert time.monotonic() - start < seconds
        time.sleep(0.05)


@pytest.mark.parametrize("words", ["2>/dev/full", "2> >(true)", "2>&- >&- <&-"])
def test_it_serves_and_starts_its_ranks_again(tmp_path: Path, words: str) -> None:
    script = write_script(tmp_path / "script.jsonl", {"blocks": blocks("</think>\n\nHello", 2)})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [make_ranks(tmp_path / "ranks", 2), "--backend", f"scripted:{script}", "--port", str(port)]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" {words}', "-", sys.executable, "-m", "duovolt", "serve", *arguments]
    )

    def ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/health/ready", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_until(ready)
        before = ranks_of(process.pid)
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)  # of which much would be said
        wait_gone(before, 10)
        wait_until(ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
