"""`duovolt bench collective`."""

import argparse
import dataclasses
import json

from .reads import ALWAYS, Reads, without

WAYS = ("ipc", "host", "nccl")
LOCKSTEP_SKEWS_US = (0, 50, 500)
EXAMPLE = """examples:
  duovolt bench collective
  duovolt bench collective --ways ipc nccl --json
  duovolt bench collective --alone
  duovolt bench collective --lockstep

Sums and gathers of a decode round between two cards, at the 27B's sizes: through the peer's memory (ipc), through pinned
host memory (host), and NCCL, whose own fp16 all-reduce stands beside. Microseconds from one exchange to the next in a
captured graph, the slower rank's median; each way is tried for right results first. --alone: both sides on one card,
in its own memory and in the host's, where there is no second card. --lockstep: what the record costs
by which ranks agree, between two processes without a card."""


READS = Reads({ALWAYS: "lockstep json", without("lockstep"): "alone", without("lockstep", "alone"): "ways"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="what to measure, in this order")
    parser.add_argument("--alone", action="store_true", help="both sides on one card")
    parser.add_argument("--lockstep", action="store_true", help="only the lockstep record; no card is needed")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(args: argparse.Namespace) -> int:
    if args.lockstep:
        from ..perf import lockstep

        costs = [lockstep.measure_lockstep(skew) for skew in LOCKSTEP_SKEWS_US]
        if args.json:
            print(json.dumps([dataclasses.asdict(cost) for cost in costs], indent=1))
        elif not args.quiet:
            print(lockstep.table(costs))
        return 0
    from ..perf import collective

    if args.alone:
        from ..perf import collective_alone

        report = collective_alone.measure()
    else:
        collective.two_cards()
        report = collective.measure(list(dict.fromkeys(args.ways)))
    if args.json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
    elif not args.quiet:
        print("\n".join(collective.table(report)))
    return 0
