"""`duovolt bench pipeline`."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.errors import InputError
from ..model.partition import MAX_RANKS
from ..perf.errors import ErrorRow, error_table
from ..perf.fullsize import FullSize, Step, machine, run_full_size
from ..perf.pipeline import Conversion, Race, race_conversion, race_quantisers
from ..perf.processes import require_new
from ..perf.stages import StageRaces, race_stages
from .numbers import decimal, whole
from .reads import ALWAYS, Condition, Reads, given, without

EXAMPLE = """examples:
  duovolt bench pipeline
  duovolt bench pipeline --work /big/disk/bench --gigabytes 4
  duovolt bench pipeline --work /big/disk/bench --gigabytes 4 --stages --apart /dev/shm/bench
  duovolt bench pipeline --work /big/disk/bench --full
  duovolt bench pipeline --quantisers

--stages needs about five times --gigabytes of disk; --full about 75 GB for the 27B, or a few with --layers 4.
The peers are optional: `pip install --no-deps nvidia-modelopt compressed-tensors llmcompressor`, and what these lack."""


_RACES = without("stages", "full", "quantisers")
_SIZED = Condition("with --stages, or --work alone", lambda args: args.stages or (_RACES.holds(args) and args.work))
READS = Reads(
    {
        ALWAYS: "stages full quantisers json",
        without("quantisers"): "workers work",
        without("quantisers", "full"): "rounds",
        _RACES: "rows columns arithmetic",
        _RACES & given("work"): "recipe",
        _SIZED: "gigabytes apart tp",
        given("full"): "config layers tp",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--rows", type=whole, default=5120, metavar="N", help="of the matrix (default: 5120)")
    parser.add_argument("--columns", type=whole, default=17408, metavar="N", help="of the matrix (default: 17408)")
    parser.add_argument("--rounds", type=whole, default=3, metavar="N", help="of which the median counts (default: 3)")
    parser.add_argument("--workers", type=whole, default=os.cpu_count() or 1, help="threads (default: the cores)")
    parser.add_argument("--arithmetic", choices=("auto", "compiled", "numpy"), default="auto", help="as for convert")
    parser.add_argument("--work", type=Path, metavar="DIR", help="also run the stages in this new directory")
    parser.add_argument(
        "--apart",
        type=Path,
        metavar="DIR",
        help="for --stages: a new directory on another disk or in memory, to split to",
    )
    parser.add_argument(
        "--gigabytes", type=decimal, default=4, metavar="N", help="size of that checkpoint (default: 4)"
    )
    parser.add_argument("--recipe", default="v100", help="built-in recipe or TOML file (default: v100)")
    parser.add_argument("--tp", type=whole, default=2, metavar="N", help="ranks, for --stages and --full (default: 2)")
    parser.add_argument(
        "--config", default="qwen3.8-27b", metavar="NAME|FILE", help="for --full (default: qwen3.8-27b)"
    )
    parser.add_argument("--layers", type=whole, metavar="N", help="for --full: only the first N layers")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--stages", action="store_true", help="only shard and verify, beside cp, cat and xxh3")
    only.add_argument("--full", action="store_true", help="only one run of a whole model through all stages")
    only.add_argument("--quantisers", action="store_true", help="only the error table of the nvfp4 quantisers")
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


def stage_lines(found: StageRaces) -> list[str]:
    """Sizes, one row a race, and the peaks of memory."""
    sizes = f"converted {found.converted_bytes / 1e9:.2f} GB, ranks {found.ranks_bytes / 1e9:.2f} GB"
    rows = [
        f"{race.what:<27} {race.ours:7.2f} s  {race.nbytes / race.ours / 1e9:5.2f} GB/s   "
        f"{race.peer} {race.theirs:.2f} s: {race.ratio:.2f} of its speed"
        for race in found.races
    ]
    memory = f"shard {found.shard_peak / 1e6:.0f} MB, verify {found.verify_peak / 1e6:.0f} MB"
    return [sizes, *rows, f"anonymous memory up to: {memory}"]


def step_line(step: Step) -> str:
    """One row of --full."""
    return (
        f"{step.what:<13} {step.nbytes / 1e9:7.2f} GB  {step.seconds:7.1f} s  {step.nbytes / step.seconds / 1e9:5.2f} GB/s  "
        f"{step.cpu_seconds:7.1f} s of CPU  anonymous memory up to {step.peak_anonymous / 1e6:.0f} MB"
    )


def ledger_lines(found: FullSize) -> list[str]:
    """Sizes on disk, a row a rank, and the largest of what every rank holds."""
    sizes = ", ".join(f"{name} {nbytes / 1e9:.3f} GB" for name, nbytes in found.sizes.items())
    ranks = [
        f"rank {rank}: " + ", ".join(f"{how} {nbytes / 1e9:.3f} GB" for how, nbytes in split.items())
        for rank, split in enumerate(found.ledger)
    ]
    held = ", ".join(f"{role} {nbytes / 1e6:.1f} MB" for role, nbytes in list(found.replicated.items())[:6])
    return [sizes, *ranks, f"on every rank, the largest: {held}"]


def _tell(args: argparse.Namespace, facts: object, lines: list[str]) -> None:
    if args.json:
        print(json.dumps(facts, indent=1))
    elif not args.quiet:
        print("\n".join(lines))


def _run_full(args: argparse.Namespace) -> int:
    shown = sys.stderr if args.json else sys.stdout

    def tell(text: str) -> None:
        if not args.quiet:
            print(text, file=shown, flush=True)

    tell(f"{args.config}, {args.workers} threads, {machine()}")
    found = run_full_size(
        args.work, args.config, args.layers, args.tp, args.workers,
        lambda step: tell(step_line(step)),
    )  # fmt: skip
    _tell(args, dataclasses.asdict(found), ledger_lines(found))
    return 0


def _teller(args: argparse.Namespace) -> Callable[[dict[str, float]], None]:
    def tell(seconds: dict[str, float]) -> None:
        spent = ", ".join(f"{what} {spent:.2f} s" for what, spent in seconds.items())
        if not args.quiet:
            print(f"round: {spent}", file=sys.stderr, flush=True)

    return tell


def _run_stages(args: argparse.Namespace) -> int:
    found = race_stages(
        args.work, int(args.gigabytes * 1e9), args.rounds, args.workers, args.tp, _teller(args), args.apart
    )
    _tell(args, dataclasses.asdict(found), stage_lines(found))
    return 0


def run(args: argparse.Namespace) -> int:
    if min(args.rounds, args.workers) < 1 or not 0 < args.gigabytes < 1e5:
        raise InputError("--rounds and --workers are at least 1, --gigabytes positive.")
    if not 1 <= args.tp <= MAX_RANKS:
        raise InputError(f"--tp {args.tp}: expected 1 to {MAX_RANKS}.")
    if (args.stages or args.full) and args.work is None:
        raise InputError("--stages and --full write gigabytes: name a new directory for them with --work.")
    require_new(args.work, args.apart)
    if args.stages or args.full:
        return _run_stages(args) if args.stages else _run_full(args)
    if args.quantisers:
        table = error_table()
        rows = [dataclasses.asdict(row) for row in table]
        _tell(args, rows, error_lines(table))
        return 0
    silent = args.json or args.quiet
    arithmetic, races = race_quantisers(args.rows, args.columns, args.rounds, args.workers, args.arithmetic)
    if not silent:
        print(f"{args.rows} x {args.columns} BF16, {args.workers} threads, median of {args.rounds}, {arithmetic}")
        print("\n".join(map(race_line, races)), flush=True)
    found, stages = None, None
    if args.work is not None:
        nbytes = int(args.gigabytes * 1e9)
        found = race_conversion(args.work, nbytes, args.rounds, args.workers, args.recipe)
        if not silent:
            print(conversion_line(found), flush=True)
        stages = race_stages(args.work, nbytes, args.rounds, args.workers, args.tp, _teller(args), args.apart)
        if not silent:
            print("\n".join(stage_lines(stages)))
    if args.json:
        measured = {"arithmetic": arithmetic, "races": [dataclasses.asdict(race) for race in races]}
        more = {"convert": found and dataclasses.asdict(found), "stages": stages and dataclasses.asdict(stages)}
        print(json.dumps(measured | more, indent=1))
    return 0
