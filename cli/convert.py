"""`duovolt convert SRC DST`."""

import argparse
import os
from pathlib import Path
from typing import Any

from ..checkpoint.directory import require_report_place, write_report
from ..checkpoint.errors import InputError
from ..convert.pipeline import ConversionReport, convert
from ..convert.quantisers.encoders import DEVICES
from ..convert.recipe import load_recipe
from ..convert.source import Source
from .numbers import whole
from .progress import byte_bar
from .reads import ALWAYS, Reads

EXAMPLE = """example:
  duovolt convert Qwen3.8-27B converted
  duovolt convert Qwen3.8-27B converted --recipe my-recipe.toml --workers 8
  duovolt convert Qwen3.8-27B-NVFP4 converted --mtp-from Qwen3.8-27B

Weights that the source has in fp8 or nvfp4 keep every word and scale; the recipe is for those that are plain.
An interrupted run is resumed by the same command; the result is byte for byte that of an unbroken one."""


READS = Reads({ALWAYS: "source target recipe mtp_from arithmetic device json workers"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint of the family, plain or quantised")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to write (new or empty)")
    parser.add_argument("--recipe", default="v100", help="built-in recipe or TOML file (default: v100)")
    parser.add_argument(
        "--mtp-from", type=Path, metavar="DIR", help="another source of the same model, for an MTP layer that SRC lacks"
    )
    parser.add_argument(
        "--arithmetic", choices=("auto", "compiled", "numpy"), default="auto",
        help="how values are quantised, the same bytes at another speed (default: auto, compiled if it pays)",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=DEVICES, default="auto",
        help="where values are quantised, the same bytes (default: auto, a CUDA card if there is one and enough to do)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON, tensor by tensor")
    parser.add_argument("--workers", type=whole, default=os.cpu_count() or 1, help="threads (default: the cores)")


def describe(report: ConversionReport) -> str:
    """Three lines: sizes, weights of each part of the model, and what the id stands for."""
    kinds: dict[str, int] = {}
    for record in report.manifest.tensors.values():
        if record.part in ("plain", "words"):
            kinds[record.encoding] = kinds.get(record.encoding, 0) + 1
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    weights = ", ".join(f"{count} {part}" for part, count in report.manifest.provenance["weights"].items()) + " weights"
    state = " (already there, every file re-hashed)" if report.already_done else ""
    resumed = f", {len(report.resumed)} files kept from an interrupted run" if report.resumed else ""
    arithmetic = f", arithmetic {report.arithmetic}" if report.arithmetic else ""
    flushed = "".join(f"{line}\n" for line in flushed_lines(report))
    return (
        f"converted {report.source_bytes / 1e6:,.2f} MB to {report.converted_bytes / 1e6:,.2f} MB "
        f"({report.converted_bytes / max(1, report.source_bytes):.3f}): {counts}{resumed}{state}\n"
        f"{weights}\n{flushed}"
        f"conversion {report.manifest.conversion_id}, recipe {report.manifest.recipe['name']}{arithmetic}"
    )


def flushed_lines(report: ConversionReport) -> list[str]:
    """One line an encoding: how many non-zero values became zero, and in which tensor the most."""
    lines = []
    for encoding in sorted({found.encoding for found in report.flushed.values()}):
        mine = {name: found for name, found in report.flushed.items() if found.encoding == encoding}
        worst = max(mine, key=lambda name: mine[name].share)
        lost, nonzero = (sum(getattr(found, key) for found in mine.values()) for key in ("lost", "nonzero"))
        lines.append(
            f"{encoding}: {lost / max(1, nonzero):.3%} of the non-zero values became zero, at most "
            f"{mine[worst].share:.3%} of a tensor ({worst})"
        )
    return lines


def as_json(report: ConversionReport) -> dict[str, Any]:
    """The report in plain JSON types, every tensor's share of values that became zero among it."""
    flushed = {name: {**vars(found), "share": found.share} for name, found in report.flushed.items()}
    plain = {key: value for key, value in vars(report).items() if key not in ("manifest", "flushed")}
    return plain | {"conversion_id": report.manifest.conversion_id, "flushed": flushed}


def run(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise InputError(f"--workers {args.workers}: at least 1.")
    require_report_place(args.json, (args.source, args.mtp_from, args.target))
    recipe = load_recipe(args.recipe)
    total = 2 * Source.open(args.source, args.mtp_from).nbytes
    with byte_bar("convert", total, args.quiet) as advance:
        report = convert(
            args.source, args.target, recipe, args.workers, advance, args.mtp_from, args.arithmetic, args.device
        )
    if args.json is not None:
        write_report(args.json, as_json(report))
    if not args.quiet:
        for notice in report.notices:
            print(f"notice: {notice}.")
        print(describe(report))
    return 0
