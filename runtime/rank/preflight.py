"""Before ranks are started on cards: do cards, their code, the model's kernels and the memory fit? Decided once for all.

Runs in a process of its own (`python -m duovolt.runtime.rank.settle`, JSON in and out), so that the proxy neither
imports torch nor holds a context on a card, and a driver that hangs cannot hang it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...checkpoint.errors import EnvironmentFault
from ..parallel.waiting import MOST_A_LOOK

SECONDS = 180.0  # the first start compiles a kernel and wakes the driver
_GRACE_SECONDS = 5.0
_SIGNS = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))


class Wishes(msgspec.Struct, frozen=True):
    """What the server is to do. `devices`: numbers of cards, None: the first ones; `on_cpu`: kernels' torch references.

    `max_context` None: the longest that fits. `plain_weights`: bytes of them to keep for prompts at most, None: as many as fit.
    """

    directories: list[str]
    devices: list[int] | None
    on_cpu: bool
    kv: str
    lanes: int
    drafts: int
    prefill_chunk: int
    max_context: int | None
    plain_weights: int | None = None


class Settled(msgspec.Struct, frozen=True):
    """What was found and decided; the same for every rank. `uuids` and `numbers` of cards in rank order, one card twice if
    both ranks are to try it; `plan`: lines; `kept`: bytes of plain weights that stay for prompts."""

    uuids: list[str]
    numbers: list[int]
    card: str
    max_context: int
    pages: int
    planned: int
    plan: list[str]
    near: list[list[int]] = []
    kept: int = 0

    @property
    def visible(self) -> list[str]:
        """The cards in use, each once: rank r has the one at `place(r)`."""
        return list(dict.fromkeys(self.uuids))

    def place(self, rank: int) -> int:
        return self.visible.index(self.uuids[rank])

    @property
    def shared(self) -> bool:
        """Both ranks are on one card."""
        return len(self.visible) < len(self.uuids)


class Refused(msgspec.Struct, frozen=True):
    """A message and its exit code; `unfit`: the machine or the model, not the wish, so that `auto` may go elsewhere."""

    message: str
    exit_code: int
    unfit: bool


def card_seen() -> bool:
    """True if this machine shows signs of an NVIDIA card; costs nothing."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(sign.exists() for sign in _SIGNS)


def preflight(wishes: Wishes, command: Sequence[str] | None = None) -> Settled | Refused:
    """Decide in a child process. Raises EnvironmentFault if it gives no answer in time."""
    command = command or [sys.executable, "-m", "duovolt.runtime.rank.settle"]
    environment = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    code, output, errors = _run(command, msgspec.json.encode(wishes), environment)
    try:
        answer = json.loads(output.splitlines()[-1])
        if answer["settled"]:
            return msgspec.convert(answer["value"], Settled)
        return msgspec.convert(answer["value"], Refused)
    except (IndexError, KeyError, TypeError, ValueError, msgspec.ValidationError):
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
        raise EnvironmentFault(f"looking at the cards failed with exit code {code}: {last[0]}") from None


def _run(command: Sequence[str], data: bytes | None, environment: dict[str, str]) -> tuple[int, bytes, bytes]:
    """Exit code, output and errors. Seconds count from look to look, as in `runtime/parallel/waiting.py`."""
    pipe, left = subprocess.PIPE, SECONDS
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)
    try:
        while left > 0:
            look = min(left, MOST_A_LOOK)
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = process.communicate(data, look)
                return process.returncode, output, errors
            data, left = None, left - look
    finally:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: no signal reaches it
            process.wait(_GRACE_SECONDS)
    raise EnvironmentFault(
        f"the cards gave no answer within {SECONDS:.0f} s: the driver hangs. See `duovolt doctor` and the kernel's log."
    )
