"""`duovolt bench pipeline`."""

import argparse
import dataclasses
import json
import os
from pathlib import Path

from ..checkpoint.errors import InputError
from ..perf.errors import ErrorRow, error_table
from ..perf.pipeline import Conversion, Race, race_conversion, race_quantisers

EXAMPLE = """examples:
  duovolt bench pipeline
  duovolt bench pipeline --work /big/disk/bench --gigabytes 4
  duovolt bench pipeline --quantisers

The peers are optional: `pip install --no-deps nvidia-modelopt compressed-tensors llmcompressor`, and what these lack."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--rows", type=int, default=5120, metavar="N", help="of the matrix (default: 5120)")
    parser.add_argument("--columns", type=int, default=17408, metavar="N", help="of the matrix (default: 17408)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of which the median counts (default: 3)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads (default: the cores)")
    parser.add_argument("--arithmetic", choices=("auto", "compiled", "numpy"), default="auto", help="as for convert")
    parser.add_argument("--work", type=Path, metavar="DIR", help="also convert a checkpoint in this new directory")
    parser.add_argument("--gigabytes", type=float, default=4, metavar="N", help="size of that checkpoint (default: 4)")
    parser.add_argument("--recipe", default="v100", help="built-in recipe or TOML file (default: v100)")
    parser.add_argument("--quantisers", action="store_true", help="only the error table of the nvfp4 quantisers")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def race_line(race: Race) -> str:
    """One row: our time, the peer's, the ratio."""
    ours = f"{race.what:<14} {race.ours:8.3f} s  {race.nbytes / race.ours / 1e9:6.2f} GB/s of BF16"
    if race.ratio is not None and race.theirs is not None:
        return f"{ours}   {race.peer} {race.theirs:.3f} s: ratio {race.ratio:.1f}"
    return f"{ours}   {race.peer} not measured: {race.missing}" if race.peer else ours


def conversion_line(found: Conversion) -> str:
    """One row: conversion against cp."""
    return (
        f"convert {found.source_bytes / 1e9:.2f} GB: {found.convert:.2f} s ({found.source_bytes / found.convert / 1e9:.2f} "
        f"GB/s), cp and fsync of the source {found.copy:.2f} s: {found.ratio:.2f} of its speed; "
        f"anonymous memory up to {found.peak_anonymous / 1e6:.0f} MB"
    )


def error_lines(rows: list[ErrorRow]) -> list[str]:
    """The table, relative squared errors, and what the search saves against the best of the others."""
    names = list(rows[0].errors)
    lines = ["squared error / squared weights".ljust(32) + "".join(f"{name:>20}" for name in names) + "   search saves"]
    for row in rows:
        best = min(error for name, error in row.errors.items() if name != "search")
        cells = "".join(f"{row.errors[name]:>20.6f}" for name in names)
        lines.append(f"{row.weights:<32}{cells}   {1 - row.errors['search'] / best:12.1%}")
    return lines


def run(args: argparse.Namespace) -> int:
    if min(args.rounds, args.workers) < 1 or not 0 < args.gigabytes < 1e5:
        raise InputError("--rounds and --workers are at least 1, --gigabytes positive.")
    if args.quantisers:
        table = error_table()
        rows = [dataclasses.asdict(row) for row in table]
        print(json.dumps(rows, indent=1) if args.json else "\n".join(error_lines(table)))
        return 0
    arithmetic, races = race_quantisers(args.rows, args.columns, args.rounds, args.workers, args.arithmetic)
    if not args.json:
        print(f"{args.rows} x {args.columns} BF16, {args.workers} threads, median of {args.rounds}, {arithmetic}")
        print("\n".join(map(race_line, races)), flush=True)
    found = None
    if args.work is not None:
        nbytes = int(args.gigabytes * 1e9)
        found = race_conversion(args.work, nbytes, args.rounds, args.workers, args.recipe)
        if not args.json:
            print(conversion_line(found))
    if args.json:
        measured = {"arithmetic": arithmetic, "races": [dataclasses.asdict(race) for race in races]}
        print(json.dumps(measured | {"convert": found and dataclasses.asdict(found)}, indent=1))
    return 0
