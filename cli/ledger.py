"""`duovolt ledger SRC`: bytes of a decode round, from headers alone."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from ..checkpoint.errors import InputError
from ..model.partition import MAX_RANKS
from ..perf.gguf_ledger import gguf_ledger
from ..perf.ledger import Ledger, Shape, ledger_of
from ..perf.model_source import sheet_at
from ..perf.shapes import NAMED
from .numbers import whole
from .reads import ALWAYS, Condition, Reads, given

EXAMPLE = f"""examples:
  duovolt ledger converted --tp 2 --drafts 3 --context 8192
  duovolt ledger qwen3.8-27b --recipe v100-fp8 --launches
  duovolt ledger model-Q4_0.gguf --context 32768 --kv fp16

SRC is a source, converted or rank directory, a GGUF file, a config.json, or one of {", ".join(NAMED)}. Counted is what a
kernel reads from the card's memory: each matrix once a launch, the embedding by rows, the head whole, KV up to the position,
the recurrent state read and written. No weight is read. A round with K drafts verifies K + 1 tokens."""


OF_FAMILY = Condition(
    "of the family's checkpoints, which a .gguf is not", lambda args: not str(args.source).endswith(".gguf")
)
READS = Reads(
    {
        ALWAYS: "source drafts context lanes kv launches json",
        OF_FAMILY: "recipe tp",
        OF_FAMILY & given("drafts"): "draft_head",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    add_model(parser)
    parser.add_argument("--launches", action="store_true", help="every kernel in the order of the round")
    parser.add_argument("--json", action="store_true", help="machine-readable, every kernel")


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options that say which model and which round."""
    parser.add_argument("source", metavar="SRC", help="directory, .gguf, config.json or known name")
    parser.add_argument("--recipe", metavar="R", help="count what `convert` would make of a source (a name: v100)")
    parser.add_argument("--tp", type=whole, metavar="N", help="ranks (default: a rank directory's own, else 1)")
    parser.add_argument("--drafts", type=whole, default=0, metavar="K", help="tokens drafted a round (default: 0)")
    parser.add_argument("--context", type=whole, default=0, metavar="N", help="tokens in the cache (default: 0)")
    parser.add_argument("--lanes", type=whole, default=1, metavar="L", help="sequences at once (default: 1)")
    parser.add_argument("--kv", choices=("int8", "fp16"), default="int8", help="form of the KV cache (default: int8)")
    parser.add_argument(
        "--draft-head", type=whole, metavar="ROWS", help="as if there were a draft head of so many rows (0: none)"
    )


def ledger_from(args: argparse.Namespace) -> Ledger:
    """The ledger that the options ask for. Raises InputError."""
    shape = Shape(args.context, args.drafts, args.lanes, args.kv)
    if args.tp is not None and not 1 <= args.tp <= MAX_RANKS:
        raise InputError(f"--tp {args.tp}: expected 1 to {MAX_RANKS}.")
    if args.source.endswith(".gguf"):
        return gguf_ledger(Path(args.source), shape)
    sheet = sheet_at(args.source, args.tp, args.recipe)
    if args.draft_head is not None:
        if not 0 <= args.draft_head <= 1 << 24:
            raise InputError(f"--draft-head {args.draft_head}: expected a number of rows of the vocabulary.")
        sheet = sheet.with_draft_head(args.draft_head)
    return ledger_of(sheet, shape)


def facts(ledger: Ledger) -> dict[str, Any]:
    """Everything as JSON values."""
    return {
        "model": ledger.label,
        "tp": ledger.tp,
        **dataclasses.asdict(ledger.shape),
        "bytes_read": round(ledger.read),
        "bytes_written": ledger.written,
        "families": {name: {"launches": n, "bytes": round(b)} for name, (n, b) in ledger.by_family().items()},
        "launches": [dataclasses.asdict(launch) for launch in ledger.launches],
    }


def describe(ledger: Ledger) -> str:
    """What a ledger is of, in a line."""
    shape = ledger.shape
    rank = f", one rank of {ledger.tp}" if ledger.tp > 1 else ""
    lanes = f", {shape.lanes} lanes" if shape.lanes > 1 else ""
    return f"{ledger.label}{rank}: {shape.drafts} drafts{lanes}, {shape.context:,} tokens deep, {shape.kv} KV"


def _table(ledger: Ledger) -> list[str]:
    parts: dict[str, dict[str, list[float]]] = {}
    for launch in ledger.launches:
        part = "drafts" if launch.part.startswith("draft") else "verify"
        row = parts.setdefault(launch.family, {}).setdefault(part, [0, 0, 0, 0, 0])
        for index, value in enumerate((1, launch.weights, launch.kv, launch.state, launch.written)):
            row[index] += value
    lines = [f"{'':<12}{'':<8}{'launches':>9}{'weights MB':>13}{'KV MB':>11}{'state MB':>11}{'written MB':>12}"]
    for family, by_part in parts.items():
        for part, (count, *sums) in by_part.items():
            columns = "".join(
                f"{value / 1e6:>{width},.2f}" for value, width in zip(sums, (13, 11, 11, 12), strict=True)
            )
            lines.append(f"{family:<12}{part:<8}{count:>9,.0f}{columns}")
    return lines


def run(args: argparse.Namespace) -> int:
    ledger = ledger_from(args)
    if args.json:
        print(json.dumps(facts(ledger), indent=1))
        return 0
    if args.quiet:
        return 0
    print(describe(ledger))
    if args.launches:
        for launch in ledger.launches:
            print(
                f"  {launch.part:<8} {launch.kernel:<18} {launch.read / 1e6:>10,.3f} MB read "
                f"{launch.written / 1e6:>8,.3f} written  {launch.what}"
            )
    print("\n".join(_table(ledger)))
    print(f"a round reads {ledger.read / 1e9:,.3f} GB and writes {ledger.written / 1e9:,.3f} GB on this rank")
    if ledger.tp > 1:
        sent = sum(launch.message for launch in ledger.launches)
        count = sum(launch.family == "collective" for launch in ledger.launches)
        print(f"{count} messages between the ranks, {sent / 1e6:,.2f} MB")
    return 0
