"""`duovolt doctor`."""

import argparse
from pathlib import Path

import msgspec

from ..checkpoint.errors import InputError
from ..perf.doctor.facts import Probes, examine
from ..perf.doctor.judge import exit_code, judge, lines
from ..perf.doctor.probes import MachineProbes
from .numbers import decimal
from .progress import time_bar
from .reads import ALWAYS, Reads

_LONGEST_LOAD = 3600
EXAMPLE = """examples:
  duovolt doctor
  duovolt doctor --folder /data         also the speed of that folder's disk (up to 1 GB is written and removed)
  duovolt doctor --load 120             also all cards hot together for two minutes: throttling shows only then

A line for each thing: good, limited (works, but slower or less), broken, and what to do. Between two cards real stores are
tested in both directions, in a process that is killed if it hangs. Exit code 1 if anything is broken."""


READS = Reads({ALWAYS: "folder load no_links json"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--folder", type=Path, metavar="DIR", help="measure the disk of this folder")
    parser.add_argument("--load", type=decimal, default=0.0, metavar="SECONDS", help="keep all cards at work so long")
    parser.add_argument("--no-links", action="store_true", help="do not test what lies between cards")
    parser.add_argument("--json", action="store_true", help="facts and findings as JSON")


def probes() -> Probes:
    """Of this machine; tests put their own here."""
    return MachineProbes()


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.load <= _LONGEST_LOAD:
        raise InputError(f"--load {args.load:g}: from 0 to {_LONGEST_LOAD} seconds.")
    if args.folder is not None and not args.folder.is_dir():
        raise InputError(f"--folder {args.folder}: not a directory.")
    with time_bar("load", args.load, args.quiet or args.json) as tell:
        facts = examine(probes(), args.folder, not args.no_links, args.load, tell)
    findings = judge(facts)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode({"facts": facts, "findings": findings}), indent=1).decode())
    elif not args.quiet or exit_code(findings):
        print("\n".join(lines([one for one in findings if not args.quiet or one.grade == "broken"])))
    return exit_code(findings)
