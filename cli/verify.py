"""`duovolt verify`."""

import argparse
import os
import sys
from pathlib import Path

import msgspec

from ..checkpoint.directory import require_report_place, write_report
from ..checkpoint.errors import DuovoltError, InputError
from ..verify.findings import Places, findings
from ..verify.proofs import verify, work_bytes
from ..verify.report import Proof, Report, describe_errors
from .progress import byte_bar
from .reads import ALWAYS, Reads, given

EXAMPLE = """example:
  duovolt verify --source Qwen3.8-27B --converted converted --ranks ranks
  duovolt verify --ranks ranks --json report.json
  duovolt verify --downloaded Qwen3.8-27B --quarantine     move damaged files aside; `duovolt download` fetches them
  duovolt verify --source Qwen3.8-27B --converted converted --ranks ranks --repair

Each directory given adds its proofs. Exit code 0: all hold; 1: one failed, with the tensor, the file, the index and
both values.

--repair makes what is damaged again from the stage before: ranks from --converted, converted files from --source, a
download from its hub. Files that are proved right are kept; the others appear by rename, whole. What cannot be made
again is refused with the reason, and nothing is ever deleted."""

LISTED = 5
WORDS = {"proved": "proved ", "failed": "FAILED ", "skipped": "skipped"}


READS = Reads(
    {
        ALWAYS: "downloaded source converted ranks repair json",
        given("source"): "mtp_from",
        given("repair"): "quarantine",
        given("downloaded"): "quarantine",
        given("repair") & given("converted"): "recipe",
        given("repair") & given("downloaded"): "endpoint",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--downloaded", type=Path, metavar="DIR", help="what `duovolt download` wrote: compare with the hub's digests"
    )
    parser.add_argument("--source", type=Path, metavar="SRC", help="the checkpoint that was converted")
    parser.add_argument("--mtp-from", type=Path, metavar="DIR", help="the second source that `convert` was given")
    parser.add_argument("--converted", type=Path, metavar="CONV", help="what `duovolt convert` wrote")
    parser.add_argument(
        "--ranks", type=Path, metavar="DIR", help="the folder that `duovolt shard` wrote, or one rank in it"
    )
    parser.add_argument("--repair", action="store_true", help="make damaged files again from the stage before")
    parser.add_argument(
        "--quarantine", action="store_true",
        help="move aside (into .duovolt-bad) bad files of a download, and with --repair whatever is in its way",
    )  # fmt: skip
    parser.add_argument(
        "--recipe",
        help="with --repair of a converted directory whose manifest is lost, or whose recipe has draft_head_tokens: what "
        "it was converted with",
    )
    parser.add_argument("--endpoint", metavar="URL", help="with --repair of a download: the hub or mirror to ask")
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


def _proofs(args: argparse.Namespace) -> Report:
    total = work_bytes(args.source, args.converted, args.ranks, args.downloaded)
    with byte_bar("verify", total, args.quiet) as advance:
        return verify(args.source, args.converted, args.ranks, advance, args.mtp_from, args.downloaded)


def _repaired(args: argparse.Namespace) -> tuple[Report, list[str], DuovoltError | None]:
    """The last report, what was done, and why no more could be done; every repair is followed by all proofs anew."""
    from .repair import Repairs, unrepaired  # the earlier stages, which a plain verification has no use for

    places = Places(args.downloaded, args.converted, args.ranks)
    repairs = Repairs(
        places, args.source, args.mtp_from, args.recipe, args.endpoint, args.quarantine, args.quiet, os.cpu_count() or 1
    )
    if not args.repair:
        report = _proofs(args)
        repairs.move_aside(findings(report, places))
        return report, repairs.done, None
    repairs.finish_interrupted()
    seen: set[frozenset[object]] = set()
    while not (report := _proofs(args)).ok:
        found = findings(report, places)
        try:
            if not found:
                where = "the source" if args.downloaded is None else "the source, though it is what the hub has"
                raise InputError(
                    f"--repair: what failed lies in {where}, and nothing was changed. If `duovolt download` wrote it, "
                    "give it with --downloaded too; else restore it."
                )
            if (state := frozenset(found)) in seen:
                raise unrepaired(found)
            seen.add(state)
            repairs.repair(found)
        except DuovoltError as error:
            return report, repairs.done, error
    return report, repairs.done, None


def run(args: argparse.Namespace) -> int:
    require_report_place(args.json, (args.downloaded, args.source, args.mtp_from, args.converted, args.ranks))
    changing = args.repair or args.quarantine
    report, done, refused = _repaired(args) if changing else (_proofs(args), [], None)
    if args.json is not None:
        write_report(args.json, {**_as_json(report, args), "done": done})
    _print(report, done, args.quiet)
    if refused is not None:
        raise refused
    if not report.ok:
        names = ", ".join(proof.name for proof in report.failed)
        print(f"duovolt: {summary(report)}; failed: {names}.", file=sys.stderr)
    return 0 if report.ok else 1


def _as_json(report: Report, args: argparse.Namespace) -> dict[str, object]:
    found = findings(report, Places(args.downloaded, args.converted, args.ranks))
    return {**report.as_json(), "findings": msgspec.to_builtins(found)}


def _print(report: Report, done: list[str], quiet: bool) -> None:
    for proof in report.proofs:
        if proof.status == "failed":
            print("\n".join(lines_of(proof)), file=sys.stderr if quiet else sys.stdout)
        elif not quiet:
            print("\n".join(lines_of(proof)))
    if quiet:
        return
    notes = [f"not proved: {note}" for note in report.notes]
    print("\n".join([*describe_errors(report.errors), *notes, *done, summary(report)]))
