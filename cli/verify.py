"""`duovolt verify`."""

import argparse
import json
import sys
from pathlib import Path

from ..checkpoint.errors import InputError
from ..verify.proofs import verify, work_bytes
from ..verify.report import Proof, Report, describe_errors
from .progress import byte_bar

EXAMPLE = """example:
  duovolt verify --source Qwen3.8-27B --converted converted --ranks ranks
  duovolt verify --ranks ranks --json report.json

Each directory given adds its proofs. Exit code 0: all hold; 1: one failed, with the tensor, the file, the index and
both values."""

LISTED = 5
WORDS = {"proved": "proved ", "failed": "FAILED ", "skipped": "skipped"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--source", type=Path, metavar="SRC", help="the checkpoint that was converted")
    parser.add_argument("--mtp-from", type=Path, metavar="DIR", help="the second source that `convert` was given")
    parser.add_argument("--converted", type=Path, metavar="CONV", help="what `duovolt convert` wrote")
    parser.add_argument(
        "--ranks", type=Path, metavar="DIR", help="the folder that `duovolt shard` wrote, or one rank in it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every proof and the whole error table")


def lines_of(proof: Proof) -> list[str]:
    """One line for the proof, one for each of the first failures."""
    detail = f"{proof.failure_count} failures" if proof.status == "failed" else proof.detail
    lines = [f"{WORDS[proof.status]} {proof.name}: {detail}"]
    lines += [f"    {failure}" for failure in proof.failures[:LISTED]]
    if proof.failure_count > LISTED:
        lines.append(f"    and {proof.failure_count - LISTED} more")
    return lines


def summary(report: Report) -> str:
    """How many proofs hold."""
    ran = [proof for proof in report.proofs if proof.status != "skipped"]
    skipped = f", {len(report.proofs) - len(ran)} skipped" if len(ran) < len(report.proofs) else ""
    return f"{len(ran) - len(report.failed)} of {len(ran)} proofs hold{skipped}"


def run(args: argparse.Namespace) -> int:
    if args.json is not None and not args.json.parent.is_dir():
        raise InputError(f"--json {args.json}: there is no directory {args.json.parent}.")
    total = work_bytes(args.source, args.converted, args.ranks)
    with byte_bar("verify", total, args.quiet) as advance:
        report = verify(args.source, args.converted, args.ranks, advance, args.mtp_from)
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    for proof in report.proofs:
        if proof.status == "failed":
            print("\n".join(lines_of(proof)), file=sys.stderr if args.quiet else sys.stdout)
        elif not args.quiet:
            print("\n".join(lines_of(proof)))
    if not args.quiet:
        for line in [
            *describe_errors(report.errors),
            *(f"not proved: {note}" for note in report.notes),
            summary(report),
        ]:
            print(line)
    if not report.ok:
        names = ", ".join(proof.name for proof in report.failed)
        print(f"duovolt: {summary(report)}; failed: {names}.", file=sys.stderr)
    return 0 if report.ok else 1
