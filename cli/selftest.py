"""`duovolt selftest`."""

import argparse
import os
from pathlib import Path

from ..checkpoint.errors import InputError
from ..perf.doctor.probes import MachineProbes
from ..perf.selftest import read_report, selftest
from ..perf.selftest_report import report_lines
from .reads import ALWAYS, Reads, without

DEFAULT = Path("duovolt-selftest.json")
EXAMPLE = """examples:
  duovolt selftest                       a few minutes; writes duovolt-selftest.json
  duovolt selftest --quick               right answers only
  duovolt selftest --read FILE           a report, yours or one that was sent, beside the prediction for its card

Known answers of every kernel family, with the card's build and with what a V100's code comes from; the choices that suit
the card; its bandwidth; four layers of the 27B. Without a card: torch's answers on this CPU, and what could not be done.
The report holds no content, no names of hosts or users, no paths, serial numbers or addresses: it can be sent.
Exit code 1 if an answer is wrong."""


READS = Reads({ALWAYS: "read json", without("read"): "out quick"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--out", type=Path, default=DEFAULT, metavar="FILE", help=f"the report (default: {DEFAULT})")
    parser.add_argument("--quick", action="store_true", help="neither choices, bandwidth nor slice")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show a report")
    parser.add_argument("--json", action="store_true", help="print the report's content")


def run(args: argparse.Namespace) -> int:
    if args.read is not None:
        report = read_report(args.read)
    else:
        if args.out.is_dir() or not os.access(args.out.absolute().parent, os.W_OK):  # before minutes of work
            raise InputError(f"--out {args.out}: name a file in a folder that can be written.")
        quiet = args.quiet or args.json
        report = selftest(MachineProbes(), (lambda text: None) if quiet else _tell, args.quick)
        args.out.write_bytes(report.encode())
    if args.json:
        print(report.encode().decode(), end="")
    elif not args.quiet:
        print("\n".join(report_lines(report)))
        if args.read is None:
            print(
                f"\nwritten to {args.out}; it holds what is printed above, and nothing that names you or this machine."
            )
    return int(bool(report.wrong))


def _tell(text: str) -> None:
    print(f"... {text}", flush=True)
