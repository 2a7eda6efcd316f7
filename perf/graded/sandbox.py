"""Run an answer's code and its task's tests in a process of their own. A guard against accidents, not a jail.

Limits are the kernel's (processor time, address space, no new process or thread, no byte into a file), a network
namespace of its own where the system lets us make one, an empty environment and an empty folder; root becomes nobody.
An audit hook refuses files opened for writing, sockets and processes. Code that means harm can get round a hook, and
may read what its user may read: do not run this beside secrets.
"""

import functools
import json
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ...checkpoint.errors import EnvironmentFault

SECONDS = 10
MEMORY_BYTES = 1 << 29
_OUTPUT_BYTES = 1 << 16
_NOBODY = 65534
_PROBE = "import collections, dataclasses, heapq, itertools, math, re, typing"


@dataclass(frozen=True)
class Confinement:
    """`command`: what stands before the interpreter. `user`: who it becomes, None for the one who started it."""

    command: tuple[str, ...]
    user: int | None

    def describe(self) -> str:
        """What holds, in words."""
        network = "a network of its own" if self.command else "sockets refused by the hook alone"
        return network + (", as nobody" if self.user is not None else "")


@dataclass(frozen=True)
class Ran:
    """`why`: empty, or what went wrong in one printable line."""

    passed: bool
    why: str


@functools.cache
def confinement() -> Confinement:
    """The strongest that works here, found by running a program in it. Raises EnvironmentFault if none does."""
    root = os.geteuid() == 0
    unshare = shutil.which("unshare")
    before: list[tuple[str, ...]] = [()] if unshare is None else [(unshare, "-n" if root else "-rn"), ()]
    users: list[int | None] = [_NOBODY, None] if root else [None]
    last = ""
    for user in users:  # the limit on processes needs another user than root: that matters more than the network
        for command in before:
            found = Confinement(command, user)
            ran = _run(_PROBE, "assert math.sqrt(4) == 2", SECONDS, MEMORY_BYTES, found)
            if ran.passed:
                return found
            last = ran.why
    raise EnvironmentFault(f"answers that are code cannot be run here: {last}. Leave them out: --kinds choice needle.")


def run_code(code: str, tests: str, seconds: int = SECONDS, memory_bytes: int = MEMORY_BYTES) -> Ran:
    """Run `code`, then `tests` in the same names. `seconds` bounds processor and wall time."""
    return _run(code, tests, seconds, memory_bytes, confinement())


def _run(code: str, tests: str, seconds: int, memory_bytes: int, where: Confinement) -> Ran:
    nonce = secrets.token_hex(16)
    task = {"code": code, "tests": tests, "nonce": nonce, "seconds": seconds, "memory_bytes": memory_bytes}
    inside = Path(__file__).with_name("inside.py").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="duovolt-answer-") as folder, tempfile.TemporaryFile() as given:
        given.write(json.dumps(task | {"user": where.user}).encode())
        given.seek(0)
        Path(folder).chmod(0o555)
        process = subprocess.Popen(
            [*where.command, sys.executable, "-I", "-S", "-c", inside],
            stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=folder,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}, start_new_session=True,
        )  # fmt: skip
        try:
            output, stopped = _read(process, time.monotonic() + seconds)
        finally:
            _kill(process)
        Path(folder).chmod(0o700)
    return _verdict(output, stopped, process.returncode, nonce, seconds)


def _read(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, str]:
    """(output, why it was stopped)."""
    assert process.stdout is not None
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            if not selector.select(left):
                break
            piece = os.read(process.stdout.fileno(), 1 << 14)
            if not piece:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
                return output, ""
            output += piece
            if len(output) > _OUTPUT_BYTES:
                return output, "it prints without end"
    return output, "time"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The whole group, so that nothing is left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def _verdict(output: bytes, stopped: str, code: int, nonce: str, seconds: int) -> Ran:
    lines = output.decode(errors="replace").rstrip("\n").split("\n")
    if stopped == "time" or code == -signal.SIGXCPU:
        return Ran(False, f"not done after {seconds} s")
    if stopped:
        return Ran(False, stopped)
    if code == 0 and lines[-1] == nonce:
        return Ran(True, "")
    if code < 0:
        return Ran(False, f"ended by signal {-code}")
    said = "".join(c if c.isprintable() else " " for c in lines[-1])[:200]
    return Ran(False, said if code else "ended before its tests")
