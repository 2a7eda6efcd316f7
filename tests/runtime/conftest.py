from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

START_SECONDS = float(os.environ.get("TEST_START_SECONDS", "40"))  # more where many start side by side


class Server:
    """A running `duovolt serve`; `before`: a command that becomes the one that follows it."""

    def __init__(self, arguments: list[str], environment: dict[str, str], before: list[str] | None = None) -> None:
        self.process = subprocess.Popen(
            [*(before or []), sys.executable, "-m", "duovolt", "serve", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | environment,
        )
        self.pid = self.process.pid
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_log(self, pattern: str, seconds: float = START_SECONDS, count: int = 1) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            matches = list(re.finditer(pattern, self.log))
            if len(matches) >= count:
                return matches[count - 1]
            if self.process.poll() is not None:
                self._reader.join(2)
                matches = list(re.finditer(pattern, self.log))
                if len(matches) >= count:
                    return matches[count - 1]
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{self.log}")

    def wait_ready(self, seconds: float = START_SECONDS) -> Server:
        self.url = self.wait_log(r"ready on (https?://\S+)", seconds)[1]
        return self

    def rank_pids(self) -> list[int]:
        return ranks_of(self.pid)

    def wait_exit(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(2)
        return code

    def seconds_to_end(self, *numbers: signal.Signals, apart: float = 0.1, most: float = 60) -> float:
        """Send signals and wait for the end, with exit code 0: seconds, less those in which it waited for a processor, which
        say how busy the machine is."""
        start, queued = time.monotonic(), self._queued_seconds()
        waits, due = 0.0, list(numbers)
        while True:
            if due and time.monotonic() - start >= apart * (len(numbers) - len(due)):
                self.process.send_signal(due.pop(0))
            waits = max(waits, self._queued_seconds() - queued)
            if self.process.poll() is not None:
                break
            assert time.monotonic() - start < most, self.log
            time.sleep(0.005)
        seconds = time.monotonic() - start - waits
        assert self.wait_exit(5) == 0, self.log
        return seconds

    def _queued_seconds(self) -> float:
        """How long its main thread has stood in the queue for a processor; 0 where the system does not tell, or it is gone."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[1]) / 1e9
        return 0.0

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def client(self, timeout: float = 20) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout)

    def metric(self, name: str) -> int:
        with self.client() as client:
            text = client.get("/metrics").text
        return int(re.search(rf"^duovolt_{name} (\d+)", text, re.MULTILINE)[1])  # type: ignore[index]


def ranks_of(server: int) -> list[int]:
    """Pids of a server's ranks."""
    found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return sorted(pid for pid in found if _parent(pid) == server and _is_rank(pid))


def _is_rank(pid: int) -> bool:
    """Not one of the children that look at the cards before there are ranks."""
    with contextlib.suppress(OSError):
        return b"\0--rank\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return (
            ended and len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
        )  # a driver may hold other threads for a while
    return True


def wait_gone(pids: list[int], seconds: float) -> float:
    """Seconds until all are gone; fails after `seconds`."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        if all(gone(pid) for pid in pids):
            return time.monotonic() - start
        time.sleep(0.02)
    raise AssertionError(f"still running after {seconds} s: {[pid for pid in pids if not gone(pid)]}")


def leftovers(pid: int) -> list[str]:
    """Files and folders that carry the pid of a server."""
    found = [str(path) for path in Path("/dev/shm").iterdir() if f"duovolt-{pid}-" in path.name]
    for base in {os.environ.get("XDG_RUNTIME_DIR") or "/tmp", tempfile.gettempdir(), "/tmp"}:
        if Path(base).is_dir():
            found += [str(path) for path in Path(base).iterdir() if f"duovolt-{pid}-" in path.name]
    return found


def running(*arguments: str | Path, seconds: float = START_SECONDS) -> Iterator[Server]:
    """A server that is ready within `seconds`, for a fixture of any scope."""
    server = Server([str(argument) for argument in arguments], {})
    try:
        yield server.wait_ready(seconds)
    finally:
        server.kill()


@pytest.fixture
def start_server() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*arguments: str | Path, ready: bool = True, **environment: str) -> Server:
        server = Server([str(argument) for argument in arguments], environment)
        servers.append(server)
        return server.wait_ready() if ready else server

    yield start
    for server in servers:
        server.kill()
