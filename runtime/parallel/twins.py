"""Two child processes that try something together: one a card, over a CPU mailbox of their own, bounded in time.

What they find they say line by line, so that a child that hangs or dies has still said what came before.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...checkpoint.errors import DuovoltError, EnvironmentFault
from .mailbox import Mailbox
from .owner import owner_is_dead
from .region import Region, region_bytes
from .shared import SharedFile, sweep_dead
from .unwinding import unwound_by_signals
from .waiting import MOST_A_LOOK

TRUSTED, DISTRUSTED, TOGETHER = "trusted", "distrusted", "together"  # switches of the probe
_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 5.0
_ALONE_SECONDS = 15.0  # a twin may go on alone
_KEPT = 2000  # characters of a child's last words


@dataclass(frozen=True)
class Heard:
    """What one child said, and how it ended: exit code (None: it was stopped for time) and its last words on stderr."""

    lines: list[dict[str, Any]]
    exit_code: int | None
    errors: str


def run_twins(
    module: str,
    devices: Sequence[str],
    arguments: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[Heard]:
    """Run `python -m MODULE SHARED RANK DEVICE ARGUMENTS...` for rank 0 and 1, at most `seconds`; then both are dead.

    `environment`: variables beside the present ones. SIGTERM meanwhile raises SystemExit, once nothing is left of them.
    Raises EnvironmentFault if the shared memory cannot be had.
    """
    with unwound_by_signals():
        return _run(module, devices, arguments, seconds, environment or {})


def _run(
    module: str, devices: Sequence[str], arguments: Sequence[str], seconds: float, environment: Mapping[str, str]
) -> list[Heard]:
    shared = SharedFile.create(region_bytes())
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank, device in enumerate(devices):
            command = [sys.executable, "-m", module, shared.name, str(rank), device, *arguments]
            children.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=os.environ | environment,
                )
            )
        said, ended = _listen(children, seconds)
    finally:
        shared.unlink()
        for child in children:
            child.kill()
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: no signal reaches it
                child.wait(_GRACE_SECONDS)
        sweep_dead()  # what a killed child had made for itself and its twin
    return [
        Heard(_lines(output), child.returncode if done else None, errors.decode(errors="replace")[-_KEPT:].strip())
        for child, (output, errors), done in zip(children, said, ended, strict=True)
    ]


def _listen(children: list[subprocess.Popen[bytes]], left: float) -> tuple[list[tuple[bytes, bytes]], list[bool]]:
    """Both outputs of every child until all are closed or `left` seconds are up, counted from look to look (`waiting.py`);
    whether each child has ended by itself."""
    buffers: dict[int, bytearray] = {}
    with selectors.DefaultSelector() as selector:
        for child in children:
            for pipe in (child.stdout, child.stderr):
                assert pipe is not None
                buffers[pipe.fileno()] = bytearray()
                selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and left > 0:
            began = time.monotonic()
            for key, _ in selector.select(min(left, MOST_A_LOOK)):
                if data := os.read(key.fd, 1 << 16):
                    buffers[key.fd] += data
                else:  # it has ended, or is about to: what is left for the other to do is little, or waits for it
                    selector.unregister(key.fileobj)
                    left = min(left, _ALONE_SECONDS)
            left -= min(time.monotonic() - began, MOST_A_LOOK)
    ended = []
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, min(_GRACE_SECONDS, left)))
        ended.append(child.poll() is not None)
    texts = []
    for child in children:
        assert child.stdout is not None and child.stderr is not None and child.stdin is not None
        texts.append((bytes(buffers[child.stdout.fileno()]), bytes(buffers[child.stderr.fileno()])))
        for pipe in (child.stdin, child.stdout, child.stderr):
            pipe.close()
    return texts, ended


def _lines(output: bytes) -> list[dict[str, Any]]:
    found = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # a library's own words, or half a line
            value = json.loads(line)
            if isinstance(value, dict):
                found.append(value)
    return found


@dataclass(frozen=True)
class Twin:
    """A child's view: its rank, its device ("cpu" or a CUDA index), the mailbox to its twin, and its arguments."""

    rank: int
    device: str
    mailbox: Mailbox
    arguments: list[str]

    def say(self, **facts: Any) -> None:
        print(json.dumps(facts), flush=True)


def be_twin(action: Callable[[Twin], None], timeout_seconds: float) -> int:
    """The main program of a child: its exit code. It dies with its parent."""
    name, rank, device, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if owner_is_dead(name):  # it died before the tie was made
        return EnvironmentFault.exit_code
    region = Region(SharedFile.attach(name).memory)
    try:
        action(Twin(int(rank), device, Mailbox(region, int(rank), timeout_seconds), arguments))
    except DuovoltError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0
