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
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from .campaign import table
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
    start, used, read = 0, first_is_used, first_is_used
    for strike in strikes:
        full = start + max(1, strike.starts) > _MOST_STARTS or (start > 0 and strike.who == "mixed")
        late = used if strike.door is not None and not strike.in_start else read and strike.where == "prefill"
        if late or (part and (full or part[-1][1].ends_server)):
            yield part
            part, start, used, read = [], 0, False, False
        part.append((start + strike.in_start, strike))
        start, used = start + strike.starts, strike.starts == 0
        read = used and (read or strike.where == "prefill")
    if part:
        yield part


def doors(part: Sequence[tuple[int, Strike]]) -> dict[str, str]:
    """The variables that order the faults of a server, one for each start of its ranks."""
    ordered: dict[str, dict[int, str]] = {}
    for start, strike in part:
        if strike.door is not None:
            name, value = strike.door
            ordered.setdefault(name, {})[start] = value
    return {name: ",".join(at.get(start, "") for start in range(max(at) + 1)) for name, at in ordered.items()}


class Report:
    """Outcomes as the campaign writes them, kept in a file as they come."""

    def __init__(self, backend: str, file: Path | None) -> None:
        self.entries: list[dict[str, object]] = []
        self._backend, self._file, self._begin = backend, file, time.monotonic()

    def tell(self, what: str) -> None:
        print(f"{time.monotonic() - self._begin:6.1f} s  {what}", flush=True)

    def add(self, strike: Strike, seconds: float, error: str) -> None:
        self.tell(f"{'FAILED' if error else 'ok'}: {strike}, {seconds:.1f} s{error and chr(10)}{error}")
        self.entries.append({"backend": self._backend, **strike.row, "seconds": round(seconds, 2), "error": error})
        if self._file is not None:
            self._file.write_text(json.dumps(self.entries, indent=1))


def strike_all(world: World, strikes: Sequence[Strike], report: Report, seconds: float) -> None:
    """Until all are done, or one more would not be within `seconds` if it took as long as the longest so far.

    A strike that is not survived ends its server; what was to befall that one is left out.
    """
    end, longest = time.monotonic() + seconds, {False: 0.0, True: 0.0}  # of a strike, of a start
    for part in servers(strikes, first_is_used=not world.plain.done()):
        begin = time.monotonic()
        if begin + longest[True] + longest[False] > end:
            return
        with running(world, lanes=4, **doors(part)) as server:
            server.wait_ready()
            report.tell(next(line for line in server.lines if "ready on" in line))
            if not world.plain.done():
                if keep_pace(world, server):
                    report.tell(f"slow: answers of {world.long} tokens, a prompt of {len(world.long_prompt)}")
                ask_plainly(world, server)
                report.tell("the plain answers")
            longest[True] = max(longest[True], time.monotonic() - begin)
            for _, strike in part:
                begin = time.monotonic()
                if begin + longest[False] > end:
                    return
                error = ""
                try:
                    befall(world, server, strike)
                except Exception as caught:
                    error = "".join(traceback.format_exception(caught)) + server.log
                longest[False] = max(longest[False], time.monotonic() - begin)
                report.add(strike, time.monotonic() - begin, error)
                if error:
                    break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="ranks to serve in place of the fixture's; cuda needs such")
    parser.add_argument("--backend", default="cuda", choices=("scripted", "reference", "cuda"))
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more options of duovolt serve, in one word")
    parser.add_argument("--fault", action="append", default=[], metavar="FORM", help=FORM)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that may not end by then")
    parser.add_argument("--json", type=Path, help="write the outcomes there, for the campaign's --add")
    parser.add_argument("--list", action="store_true", help="print what would befall which server, and end")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended whatever ends this
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
        strike_all(world, strikes, report, args.seconds)
    print(table(report.entries))
    left = len(strikes) - len(report.entries)
    report.tell(f"{left} of {len(strikes)} were left out" if left else "all of them")
    return 1 if any(entry["error"] for entry in report.entries) else 0


if __name__ == "__main__":
    sys.exit(main())
