"""`duovolt shard CONVERTED DST --tp N`."""

import argparse
from pathlib import Path

from ..checkpoint.directory import Checkpoint, require_report_place, write_report
from ..checkpoint.manifest import read_manifest
from ..shard.split import ShardReport, shard
from .numbers import whole
from .progress import byte_bar
from .reads import ALWAYS, Reads

EXAMPLE = """example:
  duovolt shard converted ranks --tp 2
  duovolt shard converted ranks --tp 2 --rank 1    the second rank alone, byte for byte the same

An interrupted run is resumed by the same command."""


READS = Reads({ALWAYS: "converted target tp rank json"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("converted", type=Path, metavar="CONVERTED", help="what `duovolt convert` wrote")
    parser.add_argument("target", type=Path, metavar="DST", help="folder for the rank-R-of-N directories")
    parser.add_argument("--tp", type=whole, required=True, metavar="N", help="number of ranks (cards)")
    parser.add_argument("--rank", type=whole, metavar="R", help="write this rank alone (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")


def peak_memory() -> int:
    """Bytes this process has had in memory at most. `getrusage` would count the parent's memory from before exec."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def describe(report: ShardReport) -> str:
    """One line a rank, one for what lost its tiles, one for identity and memory."""
    lines = []
    for rank in report.ranks:
        state = " (already there, every file re-hashed)" if rank.already_done else ""
        kept = f", {len(rank.resumed)} files kept from an interrupted run" if rank.resumed else ""
        lines.append(
            f"{rank.path.name}: {rank.nbytes / 1e6:,.2f} MB, {rank.replicated_bytes / 1e6:,.2f} of it "
            f"on every rank{kept}{state}"
        )
    if report.canonical:
        lines.append(
            f"{len(report.canonical)} tensors are stored row by row, because a cut falls inside a tile: "
            f"{', '.join(report.canonical[:3])}{', ...' if len(report.canonical) > 3 else ''}"
        )
    lines.append(f"conversion {report.conversion_id}, peak memory {peak_memory() / 1e6:,.0f} MB")
    return "\n".join(lines)


def as_json(report: ShardReport) -> dict[str, object]:
    """The report in plain JSON types."""
    ranks = [{**vars(rank), "path": str(rank.path)} for rank in report.ranks]
    return {**vars(report), "ranks": ranks}


def run(args: argparse.Namespace) -> int:
    require_report_place(args.json, (args.converted, args.target))
    read_manifest(args.converted)  # so that "unfinished" comes before any complaint about what is unfinished
    total = sum(entry.nbytes for entry in Checkpoint.open(args.converted).tensors.values())
    with byte_bar("shard", total, args.quiet) as advance:
        report = shard(args.converted, args.target, args.tp, args.rank, advance)
    if args.json is not None:
        write_report(args.json, as_json(report))
    if not args.quiet:
        print(describe(report))
    return 0
