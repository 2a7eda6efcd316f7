"""`duovolt convert SRC DST`."""

import argparse
import os
from pathlib import Path

from ..checkpoint.errors import InputError
from ..convert.pipeline import ConversionReport, convert
from ..convert.recipe import load_recipe
from ..convert.source import Source
from .progress import byte_bar

EXAMPLE = """example:
  duovolt convert Qwen3.8-27B converted
  duovolt convert Qwen3.8-27B converted --recipe my-recipe.toml --workers 8

An interrupted run is resumed by the same command; the result is byte for byte that of an unbroken one."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("source", type=Path, metavar="SRC", help="a BF16, F16 or F32 checkpoint of the family")
    parser.add_argument("target", type=Path, metavar="DST", help="directory to write (new or empty)")
    parser.add_argument("--recipe", default="v100", help="built-in recipe or TOML file (default: v100)")
    parser.add_argument(
        "--arithmetic", choices=("auto", "compiled", "numpy"), default="auto",
        help="how values are quantised, the same bytes at another speed (default: auto, compiled if it pays)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads (default: the cores)")


def describe(report: ConversionReport) -> str:
    """Two lines: sizes, and what the id stands for."""
    kinds: dict[str, int] = {}
    for record in report.manifest.tensors.values():
        if record.part in ("plain", "words"):
            kinds[record.encoding] = kinds.get(record.encoding, 0) + 1
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    state = " (already there, every file re-hashed)" if report.already_done else ""
    resumed = f", {len(report.resumed)} files kept from an interrupted run" if report.resumed else ""
    arithmetic = f", arithmetic {report.arithmetic}" if report.arithmetic else ""
    return (
        f"converted {report.source_bytes / 1e6:,.2f} MB to {report.converted_bytes / 1e6:,.2f} MB "
        f"({report.converted_bytes / max(1, report.source_bytes):.3f}): {counts}{resumed}{state}\n"
        f"conversion {report.manifest.conversion_id}, recipe {report.manifest.recipe['name']}{arithmetic}"
    )


def run(args: argparse.Namespace) -> int:
    if args.workers < 1:
        raise InputError(f"--workers {args.workers}: at least 1.")
    recipe = load_recipe(args.recipe)
    total = 2 * sum(entry.nbytes for entry in Source.open(args.source).checkpoint.tensors.values())
    with byte_bar("convert", total, args.quiet) as advance:
        report = convert(args.source, args.target, recipe, args.workers, advance, args.arithmetic)
    if not args.quiet:
        print(describe(report))
    return 0
