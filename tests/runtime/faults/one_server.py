"""Some trials on one server after another, for machines on which a server takes long to start: cards.

`python -m duovolt.tests.runtime.faults.one_server --dir RANKS --mixed 300 --fault 1:SIGKILL:decode --fault 0:SIGSTOP:decode`
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from ..conftest import Server
from .invariants import broken_off, left_nothing, logs_agree, refuses_or_serves, serves
from .mixed import mix
from .trials import enter, running, wait_ranks
from .world import World, ask_plainly, real_world


def strike(world: World, server: Server, victim: int, number: signal.Signals, phase: str, starts: int) -> None:
    """A fault of a rank of a server that has started `starts` times: as `rank_dies`, and the server goes on."""
    readers = enter(world, server, phase)
    old = wait_ranks(world, server)
    os.kill(old[victim], number)
    for reader in readers:
        reader.join(20)
        broken_off(world, reader)
    server.wait_log("Ranks start again in", count=starts)
    refuses_or_serves(server)
    server.wait_log("ready on", count=starts + 1)
    serves(world, server)
    left_nothing(server, old)
    logs_agree(world, server.pid, server.metric("completion_tokens_total"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--backend", default="cuda", choices=("reference", "cuda"))
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more options of duovolt serve, in one word")
    parser.add_argument("--mixed", type=int, default=0, metavar="N", help="so many mixed requests first")
    parser.add_argument("--fault", action="append", default=[], metavar="RANK:SIGNAL:PHASE")
    args = parser.parse_args()
    begin = time.monotonic()

    def tell(what: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {what}", flush=True)

    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        world = real_world(Path(folder), args.backend, args.serve.split(), args.ranks, args.dir, asks=False)
        with running(world, lanes=4) as server:
            server.wait_ready()
            tell(next(line for line in server.lines if "ready on" in line))
            ask_plainly(world, server)
            tell("the plain answers")
            if args.mixed:
                tell(f"ok: {args.mixed} mixed requests: {mix(world, server, args.mixed, most_tokens=12)}")
            for starts, fault in enumerate(args.fault, 1):
                victim, name, phase = fault.split(":")
                strike(world, server, int(victim), signal.Signals[name], phase, starts)
                tell(f"ok: {name} of rank {victim} in {phase}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
