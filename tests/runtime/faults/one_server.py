"""Faults on as few servers as it takes, for machines on which a server takes long to start: cards.

`python -m duovolt.tests.runtime.faults.one_server --dir RANKS --seconds 150 --json FILE` takes the faults that matter most
first and goes on while there is time; `--fault FORM` (repeated) names them instead. A server that has been struck a few
times waits ever longer before it starts its ranks again: another one takes its place then, and after a fault that ends it.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from ..conftest import Server, leftovers
from .campaign import table
from .memory import can_unshare, small
from .strikes import FORM, Strike, befall
from .trials import running
from .world import World, ask_plainly, keep_pace, real_world, scripted_world

_MOST_STARTS = 4  # the pauses before them: 1, 2, 4 and 8 s
_CARD_STEP, _CARD_ROUND = 1501, 12  # behind what is exchanged before the answer that is struck, and in its midst
_STEP, _ROUND = 300, 12


def most_valuable(size: int, *, cards: bool, scripted: bool) -> list[Strike]:
    """Every fault, one of each kind first; those that end a server stand where one would be replaced anyway."""
    step, turn = (_CARD_STEP, _CARD_ROUND) if cards else (_STEP, _ROUND)
    if scripted:
        step = turn  # its mailbox makes an exchange a round
    texts = ["mixed:300", "proxy:SIGSTOP:decode", "last:SIGSTOP:decode"]
    if size == 2:
        texts += [f"0:drop:{step}", f"1:hash:{turn}", f"1:wrap:{step}", "proxy:SIGKILL:decode"]
        texts += [f"0:300:{step}", "0:SIGSTOP:prefill", f"1:stale:{step}", f"0:6000:{step}", f"0:position:{turn}"]
        texts += ["1:never:ready", "0:SIGKILL:reload", "proxy:SIGKILL:prefill", f"1:300:{step}"]
    texts += [f"{rank}:SIGKILL:{phase}" for phase in ("decode", "prefill", "queue", "idle") for rank in range(size)]
    texts += [f"{rank}:SIGSTOP:{phase}" for phase in ("queue", "idle", "prefill") for rank in range(size)]
    if size == 2:
        texts += [f"0:wrap:{step}", f"1:drop:{step}", f"0:stale:{step}", f"1:6000:{step}", f"0:hash:{turn}"]
        texts += [f"1:position:{turn}", f"0:count:{turn}", f"1:count:{turn}", "1:SIGSTOP:reload", "0:twice:hello"]
        texts += ["0:never:hello", "1:2000:ready"]
    phases = ("start", "load", "restart", "reload")
    texts += [f"{who}:SIGKILL:{phase}" for phase in phases for who in (*range(size), "proxy")]
    texts += [f"{who}:SIGSTOP:{phase}" for phase in phases for who in (*range(size), "proxy")]
    texts += ["shm:full:restart"] if can_unshare() else []
    texts += [f"all:SIGSTOP:{phase}" for phase in ("decode", "prefill", "queue", "idle")]
    texts += ["proxy:SIGSTOP:prefill", "proxy:SIGSTOP:queue", "proxy:SIGKILL:idle", "proxy:SIGKILL:queue"]
    texts += ["0:SIGKILL:drain", "last:SIGSTOP:drain", "proxy:SIGKILL:drain", "proxy:SIGSTOP:drain"]
    strikes = [Strike.parse(text.replace("last", str(size - 1))) for text in dict.fromkeys(texts)]
    return [one for one in strikes if not (scripted and one.where in ("prefill", "reload"))]


def servers(strikes: Sequence[Strike], *, first_is_used: bool) -> Iterator[list[tuple[int, Strike]]]:
    """For one server after another: what befalls it, each with the number of the ranks' start at which it is ordered.

    A fault at an exchange or a round has to find ranks that have answered nothing long, one in a prompt ranks that have
    not read it. `first_is_used`: those of the first server have done both; it may have nothing else to do.
    """
    part: list[tuple[int, Strike]] = []
    unasked = first_is_used
    start, used, read = 0, unasked, unasked
    for strike in strikes:
        full = start + max(1, strike.starts) > _MOST_STARTS or (start > 0 and strike.who == "mixed")
        if part and (full or strike.before_ready or part[-1][1].ends_server):
            yield part
            unasked = unasked and never_ready(part)
            part, start, used, read = [], 0, unasked, unasked
        late = used if strike.door is not None and not strike.in_start else read and strike.where == "prefill"
        if late and not strike.before_ready:
            yield part
            unasked = False
            part, start, used, read = [], 0, False, False
        part.append((start + strike.in_start, strike))
        start, used = start + strike.starts, strike.starts == 0
        read = used and (read or strike.where == "prefill")
    if part:
        yield part


def never_ready(part: Sequence[tuple[int, Strike]]) -> bool:
    """Whether what befalls a server ends it before it is ready."""
    return any(strike.before_ready and strike.ends_server for _, strike in part)


def doors(part: Sequence[tuple[int, Strike]]) -> dict[str, str]:
    """The variables that order the faults of a server, one for each start of its ranks."""
    ordered: dict[str, dict[int, str]] = {}
    for start, strike in part:
        if strike.door is not None:
            name, value = strike.door
            ordered.setdefault(name, {})[start] = value
    return {name: ",".join(at.get(start, "") for start in range(max(at) + 1)) for name, at in ordered.items()}


class Report:
    """Outcomes as the campaign writes them, kept in a file as they come. `dead`: servers that were killed."""

    def __init__(self, backend: str, file: Path | None) -> None:
        self.entries: list[dict[str, object]] = []
        self.dead: list[int] = []
        self._backend, self._file, self._begin = backend, file, time.monotonic()
        self._lock = threading.Lock()

    def tell(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {what}", flush=True)

    def add(self, strike: Strike, seconds: float, error: str) -> None:
        self.tell(f"{'FAILED' if error else 'ok'}: {strike}, {seconds:.1f} s{error and chr(10)}{error}")
        with self._lock:
            self.entries.append({"backend": self._backend, **strike.row, "seconds": round(seconds, 2), "error": error})
            if self._file is not None:
                self._file.write_text(json.dumps(self.entries, indent=1))


class Striking:
    """Until all are done, or one more would not be within `seconds` if it took as long as the longest so far.

    A strike that is not survived ends its server; what was to befall that one is left out.
    """

    def __init__(self, world: World, report: Report, seconds: float) -> None:
        self._world, self._report, self._end = world, report, time.monotonic() + seconds
        self._servers: list[Server] = []
        self._longest = {False: 0.0, True: 0.0}  # of a strike, of a start

    def run(self, strikes: Sequence[Strike], jobs: int = 1) -> None:
        """`jobs` servers side by side. Raises what the first start does."""
        parts = list(servers(strikes, first_is_used=not self._world.plain.done()))
        asker = next((part for part in parts if not never_ready(part)), None)
        with ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(self._part, part, part is asker) for part in parts]
            try:
                wait(running)
            except BaseException:  # servers are ended whatever ends this
                self._end = 0.0
                for server in self._servers:
                    server.kill()
                raise
        for one in running:
            one.result()

    def _part(self, part: Sequence[tuple[int, Strike]], asks: bool) -> None:
        world, begin = self._world, time.monotonic()
        if begin + self._longest[True] + self._longest[False] > self._end:
            return
        before = small() if any(strike.who == "shm" for _, strike in part) else None
        dead = list(self._report.dead)
        with running(world, lanes=4, before=before, **doors(part)) as server:
            self._servers.append(server)
            get_ready = partial(self._get_ready, server, asks)
            if part and part[0][1].before_ready and not self._befall(server, part[0][1], get_ready):
                return
            if not never_ready(part):
                get_ready()
                assert not any(map(leftovers, dead)), "this start should have removed what killed servers left"
                self._longest[True] = max(self._longest[True], time.monotonic() - begin)
            for _, strike in part:
                if not strike.before_ready and not self._befall(server, strike):
                    return

    def _get_ready(self, server: Server, asks: bool) -> None:
        world, report = self._world, self._report
        try:
            server.wait_ready()
            report.tell(next(line for line in server.lines if "ready on" in line))
            if asks and not world.plain.done():
                if keep_pace(world, server):
                    report.tell(f"slow: answers of {world.long} tokens, a prompt of {len(world.long_prompt)}")
                ask_plainly(world, server)
                report.tell("the plain answers")
        except BaseException as error:
            if asks and not world.plain.done():
                world.plain.set_exception(error)
            raise
        assert world.expected

    def _befall(self, server: Server, strike: Strike, get_ready: Callable[[], None] | None = None) -> bool:
        """Whether it was survived, in time."""
        begin, error = time.monotonic(), ""
        if begin + self._longest[False] > self._end:
            return False
        try:
            befall(self._world, server, strike, get_ready)
        except Exception as caught:
            error = "".join(traceback.format_exception(caught)) + server.log
        if strike.who == "proxy" and strike.ends_server:
            self._report.dead.append(server.pid)
        self._longest[False] = max(self._longest[False], time.monotonic() - begin)
        self._report.add(strike, time.monotonic() - begin, error)
        return not error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="ranks to serve in place of the fixture's; cuda needs such")
    parser.add_argument("--backend", default="cuda", choices=("scripted", "reference", "cuda"))
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more options of duovolt serve, in one word")
    parser.add_argument("--fault", action="append", default=[], metavar="FORM", help=FORM)
    parser.add_argument("--jobs", type=int, default=1, help="servers side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that may not end by then")
    parser.add_argument("--json", type=Path, help="write the outcomes there, for the campaign's --add")
    parser.add_argument("--list", action="store_true", help="print what would befall which server, and end")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cards = args.backend == "cuda" and "cpu" not in args.serve
    try:
        strikes = [Strike.parse(text) for text in args.fault]
        strikes = strikes or most_valuable(args.ranks, cards=cards, scripted=args.backend == "scripted")
        plan = list(servers(strikes, first_is_used=args.backend != "scripted"))
    except ValueError as error:
        parser.error(f"--fault {error}: expected {FORM}")
    if args.list:
        print("\n".join(", ".join(str(strike) for _, strike in part) or "nothing" for part in plan))
        return 0
    report = Report(args.backend, args.json)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        if args.backend == "scripted":
            world = scripted_world(Path(folder), size=args.ranks)
        else:
            world = real_world(Path(folder), args.backend, args.serve.split(), args.ranks, args.dir, asks=False)
        if not any(strike.needs_answers for strike in strikes):
            world.shorten()
        try:
            Striking(world, report, args.seconds).run(strikes, args.jobs)
        except KeyboardInterrupt:
            report.tell("stopped")
    print(table(report.entries))
    left = len(strikes) - len(report.entries)
    report.tell(f"{left} of {len(strikes)} were left out" if left else "all of them")
    return 1 if any(entry["error"] for entry in report.entries) else 0


if __name__ == "__main__":
    sys.exit(main())
