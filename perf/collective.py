"""What exchanges between two cards cost: every way in the same run, in captured graphs, at the sizes of the 27B.

A pair of child processes does it, one a card; `measure` asks them and joins what both say. Figures are the slower rank's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ..checkpoint.errors import DuovoltError, EnvironmentFault, InputError
from ..kernels import mailbox as ops
from ..kernels import norm
from ..runtime.parallel.device import DeviceCollective
from ..runtime.parallel.handshake import exchange_bytes
from ..runtime.parallel.links import MailboxDevice, open_mailbox
from ..runtime.parallel.nccl import NcclDevice, version
from ..runtime.parallel.timing import (
    Meet,
    gather_seconds,
    large_seconds,
    reduce_seconds,
    seconds_each,
    skew_seconds,
)
from ..runtime.parallel.trial import try_collective
from ..runtime.parallel.twins import Heard, Twin, be_twin, run_twins
from .machine import facts_of

WAYS = ("ipc", "host", "nccl")
HIDDEN = 5120
TOKENS = (1, 4, 24)  # a token, a round of 1 + 3, the largest: 4 lanes of 6
CANDIDATES = 130  # of a row: 64 values and their ids, the largest logit and the sum of the rest
COLUMNS = 124160  # half of the vocabulary
LARGE = (1 << 20, 4 << 20, 10 << 20, 20 << 20)
LATE = (5e-6, 20e-6)
BUDGET_SECONDS = 5.0
SECONDS = 150.0
MODULE = "duovolt.perf.collective"


@dataclass(frozen=True)
class Row:
    """One message: its name, and microseconds by way; the slower rank's median."""

    message: str
    microseconds: dict[str, float]


@dataclass(frozen=True)
class Report:
    """rows; the cards and versions; and what was not measured, by way."""

    rows: list[Row]
    facts: dict[str, str]
    missing: dict[str, str]


def measure(
    ways: Sequence[str],
    run: Callable[[Sequence[str], float], list[Heard]] | None = None,
    seconds: float = SECONDS,
) -> Report:
    """Every message over every way. `run` starts the children. Raises EnvironmentFault if no way could be measured."""
    start = run or (lambda arguments, limit: run_twins(MODULE, ["0", "1"], arguments, limit))
    heard = start(list(ways), seconds)
    rows: dict[str, dict[str, float]] = {}
    facts: dict[str, str] = {}
    missing: dict[str, str] = {}
    for one in heard:
        for line in one.lines:
            facts |= {key: str(value) for key, value in line.get("facts", {}).items()}
            if "missing" in line:
                missing[str(line["missing"])] = str(line["why"])
            if "message" in line:
                row = rows.setdefault(str(line["message"]), {})
                way, found = str(line["way"]), float(line["microseconds"])
                row[way] = max(row.get(way, found), found)
    for rank, one in enumerate(heard):
        if one.exit_code != 0:
            last = one.errors.splitlines()[-1] if one.errors else "it said nothing"
            why = f"not within {seconds:g} s" if one.exit_code is None else f"exit code {one.exit_code}: {last}"
            missing[f"what rank {rank} did not come to"] = why
    if not rows:
        raise EnvironmentFault("no way was measured: " + "; ".join(f"{way}: {why}" for way, why in missing.items()))
    return Report([Row(message, row) for message, row in rows.items()], facts, missing)


def table(report: Report) -> list[str]:
    """Lines to print: a message a line, a way a column, and NCCL's all-reduce over IPC's time."""
    ways = list(dict.fromkeys(way for row in report.rows for way in row.microseconds))
    lines = [", ".join(f"{key} {value}" for key, value in sorted(report.facts.items()))]
    lines.append(f"{'microseconds':<34}" + "".join(f"{way:>12}" for way in ways) + f"{'nccl / ipc':>12}")
    for row in report.rows:
        cells = "".join(f"{row.microseconds[way]:12.2f}" if way in row.microseconds else f"{'':>12}" for way in ways)
        nccl = min((row.microseconds[way] for way in ("nccl", "all-reduce") if way in row.microseconds), default=None)
        ratio = f"{nccl / row.microseconds['ipc']:11.1f}x" if nccl and row.microseconds.get("ipc") else ""
        lines.append(f"{row.message:<34}{cells}{ratio}")
    lines += [f"{way}: {why}" for way, why in report.missing.items()]
    return lines


def work(twin: Twin) -> None:
    """A child: each way in its turn, tried before it is timed."""
    device = torch.device("cuda", int(twin.device))
    torch.cuda.set_device(device)
    meet = partial(exchange_bytes, twin.mailbox, b"")
    twin.say(facts=facts_of(device))
    for way in twin.arguments:
        try:
            collective = _open(way, twin, device)
        except EnvironmentFault as error:
            twin.say(missing=way, why=str(error))
            continue
        if fault := try_collective(collective, device):
            raise EnvironmentFault(f"{way}: {fault}")
        for message, seconds in _times(way, collective, meet, device):
            twin.say(way=way, message=message, microseconds=seconds * 1e6)
        if way == "nccl":
            twin.say(facts={"NCCL": ".".join(map(str, version()))})
            for tokens in TOKENS:
                twin.say(
                    way="all-reduce", message=sum_name(tokens), microseconds=_all_reduce(meet, device, tokens) * 1e6
                )
        collective.check()
        meet()
        collective.close()


def _open(way: str, twin: Twin, device: torch.device) -> MailboxDevice | NcclDevice:
    if way == "nccl":
        return NcclDevice(twin.mailbox, device, SECONDS)
    if way not in ("ipc", "host"):
        raise InputError(f"way {way!r} is unknown: there are {', '.join(WAYS)}.")
    return open_mailbox("ipc" if way == "ipc" else "host", twin.mailbox, device, BUDGET_SECONDS)


def sum_name(tokens: int) -> str:
    """A reduction as the table calls it."""
    return f"sum {tokens * HIDDEN * 2 >> 10} KB ({tokens} token{'s' * (tokens > 1)})"


def _times(
    way: str, collective: MailboxDevice | NcclDevice, meet: Meet, device: torch.device
) -> list[tuple[str, float]]:
    found = [(sum_name(tokens), reduce_seconds(collective, meet, device, tokens, HIDDEN)) for tokens in TOKENS]
    for late in LATE:
        name = f"  skew of {late * 1e6:.0f} us adds, at 40 KB"
        found.append((name, skew_seconds(collective, meet, device, 4, late, HIDDEN)))
    for fused in (False, True):
        if isinstance(collective, MailboxDevice) or not fused:
            name = f"sum 40 KB, residual, norm{' fused' * fused}"
            found.append((name, _norm_seconds(collective, meet, device, fused)))
    found.append((f"candidates 4 x {CANDIDATES}", gather_seconds(collective, meet, device, 4, CANDIDATES)))
    for rows in (1, 2, 3, 4):
        found.append((f"logits {rows} x {COLUMNS}", gather_seconds(collective, meet, device, rows, COLUMNS)))
    for size in LARGE:
        found.append((f"sum {size >> 20} MB", large_seconds(collective, meet, device, size)))
    return found


def _norm_seconds(collective: DeviceCollective, meet: Meet, device: torch.device, fused: bool) -> float:
    """A sum of 4 tokens with what follows it in a layer, in one kernel or two."""
    part = torch.zeros(4, HIDDEN, device=device).half()
    x, delta = torch.zeros(4, HIDDEN, device=device), torch.empty(4, HIDDEN, device=device)
    weight, out = torch.zeros(HIDDEN, device=device), torch.empty_like(part)
    norm.rms_norm(x, weight, 1e-6, delta=delta.zero_(), out=out)  # loads the kernel

    def plain(index: int) -> None:
        collective.reduce(part, delta)
        norm.rms_norm(x, weight, 1e-6, delta=delta, out=out)

    def one(index: int) -> None:
        assert isinstance(collective, MailboxDevice)
        ops.reduce_norm(collective.link, part, x, weight, 1e-6, out)

    return seconds_each(one if fused else plain, meet, device)


def _all_reduce(meet: Meet, device: torch.device, tokens: int) -> float:
    """NCCL's own all-reduce of fp16, which adds in fp16: what one would use otherwise."""
    part = torch.zeros(tokens, HIDDEN, device=device).half()
    return seconds_each(lambda index: dist.all_reduce(part), meet, device)


def two_cards() -> None:
    """Raise EnvironmentFault unless this process sees two cards."""
    try:
        count = torch.cuda.device_count()
    except (RuntimeError, DuovoltError):
        count = 0
    if count < 2:
        raise EnvironmentFault(f"an exchange takes two cards; this process sees {count}. Look at CUDA_VISIBLE_DEVICES.")


if __name__ == "__main__":
    sys.exit(be_twin(work, SECONDS))
