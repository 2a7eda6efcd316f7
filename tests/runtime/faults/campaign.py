"""The whole campaign: every fault in every phase, counted.

`python -m duovolt.tests.runtime.faults.campaign --backend scripted --backend reference` prints the table of
docs/reliability.md; `--only REGEX` keeps the trials whose "fault, victim, phase" has it, `--repeat N` makes each N times,
`--jobs N` runs so many side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .leaving import WAYS, client_leaves
from .memory import can_unshare, full_at_restart, full_at_start
from .mixed import mixed_requests
from .ordered import door_opens, starts_badly, starts_oddly
from .strangers import second_rank_process, second_server
from .trials import (
    RESTARTING,
    SERVING,
    STARTING,
    Trial,
    everything_dies,
    everything_pauses,
    proxy_dies,
    proxy_pauses,
    rank_dies,
    rank_dies_again,
    rank_dies_at_first,
    rank_pauses,
)
from .world import World, real_world, scripted_world

_FAILURE = "TP2 LOCKSTEP FAILURE"
_SILENT = "no answer from rank|no lockstep record"
_STEPS, _CARD_STEPS = (2, 41), (4001, 20002)  # exchanges of an answer; on cards some hundreds come before it


def trials(backend: str, size: int = 2, *, cards: bool = False) -> Iterator[Trial]:
    """Every trial of a backend with `size` ranks. The scripted one has no phase in which a prompt is read, or ranks load
    again: it takes no time for them. `cards`: exchanges are those of cards."""
    scripted = backend == "scripted"
    serving = [phase for phase in SERVING if phase != "prefill" or not scripted]
    restarting = [phase for phase in RESTARTING if phase != "reload" or not scripted]
    for victim in range(size):
        name = f"rank {victim}"
        for fault, number in (("SIGKILL", signal.SIGKILL), ("SIGSTOP", signal.SIGSTOP)):
            for phase in STARTING:
                yield Trial(fault, name, phase, rank_dies_at_first(victim, number, phase))
            for phase in restarting:
                yield Trial(fault, name, phase, rank_dies_again(victim, number, phase))
            for phase in serving:
                yield Trial(fault, name, phase, rank_dies(victim, number, phase))
        for phase in (*STARTING, *restarting, *serving):
            yield Trial("SIGSTOP for 1 s", name, phase, rank_pauses(victim, phase))
    for phase in (*STARTING, *restarting, *serving):
        yield Trial("SIGKILL", "proxy", phase, proxy_dies(phase))
        yield Trial("SIGSTOP for 6 s", "proxy", phase, proxy_pauses(phase))
        yield Trial("SIGSTOP for 6 s", "all", phase, everything_pauses(phase))
    yield Trial("SIGKILL, five times", "all", "any", everything_dies)
    for victim in range(size):
        yield from _doors(victim, size, _CARD_STEPS if cards else _STEPS)
        if cards and size == 2:
            yield from _doors_while_loading(victim)
    yield Trial("a second process", f"rank {size - 1}", "start", second_rank_process)
    yield Trial("a second server", "all", "decode", second_server)
    for phase in ("queue", *(("prefill",) if not scripted else ()), "decode"):
        for way in WAYS:
            label = {"stream": "leaves a stream", "whole": "leaves a whole answer", "abort": "aborts"}[way]
            yield Trial(label, "client", phase, client_leaves(phase, way))
    if can_unshare():
        yield Trial("/dev/shm full", "all", "start", full_at_start)
        yield Trial("/dev/shm full", "all", "restart", full_at_restart)
    most = 24 if scripted else 12
    yield Trial("300 requests, clients leave", "all", "all", lambda world: _mixed(world, most))
    if not scripted:
        more = ("--prefix-cache", "off")  # every page must come back
        yield Trial("300 requests, clients leave", "all", "no cache", lambda world: _mixed(world, most, more))


def _mixed(world: World, most_tokens: int, more: Sequence[str] = ()) -> None:
    print(f"    {mixed_requests(world, most_tokens=most_tokens, more=more)}")


def _doors_while_loading(victim: int) -> Iterator[Trial]:
    """Cards exchange before they serve, when rounds are run to load kernels: the start ends, with a message."""
    for kind, label in (("drop", "lost"), ("stale", "stale")):
        run = starts_badly("DUOVOLT_MAILBOX_FAULT", f"{victim}:41:{kind}", "no answer from rank")
        yield Trial(f"mailbox word {label}", f"rank {victim}", "load", run)


def _doors(victim: int, size: int, steps: Sequence[int]) -> Iterator[Trial]:
    name = f"rank {victim}"

    def trial(fault: str, phase: str, run: Callable[[World], None]) -> Trial:
        return Trial(fault, name, phase, run)

    for kind in ("hash", "position", "count") if size == 2 else ():
        for at in (0, 1, 7):
            run = door_opens("DUOVOLT_LOCKSTEP_FAULT", f"{victim}:{at}:{kind}", words=_FAILURE, survives=False,
                             most_tokens=1 + 4 * (at + 1))  # fmt: skip
            yield trial(f"wrong {kind} in record", f"round {at}", run)
    for step in steps if size == 2 else ():
        for kind in ("drop", "stale", "6000"):
            run = door_opens("DUOVOLT_MAILBOX_FAULT", f"{victim}:{step}:{kind}", words=_SILENT, survives=False)
            label = {"drop": "lost", "stale": "stale"}.get(kind, "6 s late")
            yield trial(f"mailbox word {label}", f"step {step}", run)
        for kind in ("300", "wrap"):
            run = door_opens("DUOVOLT_MAILBOX_FAULT", f"{victim}:{step}:{kind}", words="", survives=True)
            yield trial("mailbox word 0.3 s late" if kind == "300" else "mailbox counter wraps", f"step {step}", run)
    for stage, phase in enumerate(("hello", "ready")):
        yield trial("starts 2 s late", phase, starts_oddly(f"{victim}:{stage}:2000", None))
        yield trial("never starts", phase, starts_oddly(f"{victim}:{stage}:never", "has done nothing for"))
        yield trial("starts twice", phase, starts_oddly(f"{victim}:{stage}:twice", "has started twice"))


def run_trials(
    world: World,
    chosen: list[Trial],
    report: list[dict[str, object]],
    jobs: int = 1,
    seconds: float = math.inf,
    told: Callable[[], None] = lambda: None,
) -> None:
    """Each trial's outcome is added to `report` and printed as it comes, then `told` is called; none begins after `seconds`."""
    end, lock = time.monotonic() + seconds, threading.Lock()

    def run(trial: Trial) -> None:
        if time.monotonic() > end:
            return
        start, error = time.monotonic(), ""
        try:
            trial.run(world)
        except Exception as caught:
            error = "".join(traceback.format_exception(caught))
        seconds = time.monotonic() - start
        print(f"{'ok    ' if not error else 'FAILED'} {world.backend:9} {trial.fault:28} {trial.victim:7} {trial.phase:8} "
              f"{seconds:5.1f} s", flush=True)  # fmt: skip
        if error:
            print(error, flush=True)
        with lock:
            report.append({"backend": world.backend, "fault": trial.fault, "victim": trial.victim, "phase": trial.phase,
                           "seconds": round(seconds, 2), "error": error})  # fmt: skip
            told()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, chosen))


def table(report: list[dict[str, object]]) -> str:
    """Faults by rows: where they struck, how many were tried and survived, the longest and the median time of a trial."""
    rows: dict[tuple[object, object], list[dict[str, object]]] = {}
    for entry in report:
        rows.setdefault((entry["fault"], str(entry["victim"]).replace(" 0", "").replace(" 1", "")), []).append(entry)
    lines = ["| fault | victim | phases | tried | survived |", "|---|---|---|---|---|"]
    for (fault, victim), entries in rows.items():
        phases = ", ".join(dict.fromkeys(str(entry["phase"]) for entry in entries))
        survived = sum(not entry["error"] for entry in entries)
        who = "either rank" if victim == "rank" else victim
        lines.append(f"| {fault} | {who} | {phases} | {len(entries)} | {survived} |")
    total, good = len(report), sum(not entry["error"] for entry in report)
    lines.append(f"| all | | | {total} | {good} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=("scripted", "reference", "cuda"))
    parser.add_argument("--only", default="", metavar="REGEX", help="trials whose fault, victim and phase have this")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more options of duovolt serve, in one word")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--dir", type=Path, help="ranks to serve in place of the fixture's; cuda needs such")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="trials side by side, each with a server of its own")
    parser.add_argument(
        "--part", default="0/1", metavar="I/N", help="every Nth trial from the Ith on (default: 0/1, all)"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no trial after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    parser.add_argument(
        "--add", type=Path, action="append", default=[], help="count the outcomes of an earlier --json too"
    )
    args = parser.parse_args()
    random.seed(args.seed)
    report: list[dict[str, object]] = [entry for file in args.add for entry in json.loads(file.read_bytes())]

    def keep() -> None:
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))

    for backend in args.backend or ["scripted", "reference"]:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            if backend == "scripted":
                world = scripted_world(Path(folder), size=args.ranks)
            else:
                world = real_world(Path(folder), backend, args.serve.split(), args.ranks, args.dir)
            every = trials(backend, args.ranks, cards=backend == "cuda" and "cpu" not in args.serve)
            chosen = [t for t in every if re.search(args.only, f"{t.fault}, {t.victim}, {t.phase}")]
            first, step = map(int, args.part.split("/"))
            run_trials(world, (chosen * args.repeat)[first::step], report, args.jobs, args.seconds, keep)
    print(table(report))
    keep()
    return 1 if any(entry["error"] for entry in report) else 0


if __name__ == "__main__":
    sys.exit(main())
