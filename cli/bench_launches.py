"""`duovolt bench launches SRC`: every launch of a round alone, at its real shape, on this card."""

import argparse
import itertools
from pathlib import Path

from ..checkpoint.directory import require_report_place
from ..checkpoint.errors import InputError
from ..checkpoint.stage import disk_errors
from ..model.partition import MAX_RANKS

EXAMPLE = """examples:
  duovolt bench launches qwen3.8-27b --drafts 3 --json launches.json
  duovolt bench launches qwen3.8-27b --tp 1 2 --drafts 0 3 --contexts 8192 131072 --json launches.json
  duovolt predict qwen3.8-27b --card h200 --launches launches.json --drafts 3 --context 32768

The launches are those of `duovolt ledger`. Weights, caches and states are random, and many times the second-level cache;
times are of captured graphs, a node's cost included. Attention is measured at each context; a forecast takes a line between."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("source", nargs="+", metavar="SRC", help="directories, config.json or known names")
    parser.add_argument("--recipe", metavar="R", help="as for ledger")
    parser.add_argument("--tp", type=int, nargs="+", default=[1], metavar="N", help="numbers of ranks (default: 1)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3], metavar="K", help="default: 3")
    parser.add_argument("--lanes", type=int, nargs="+", default=[1], metavar="L", help="default: 1")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768, 131072], metavar="N")
    parser.add_argument("--kv", choices=("int8", "fp16"), default="int8", help="default: int8")
    parser.add_argument("--draft-head", type=int, metavar="ROWS", help="as for ledger")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the times go")


def run(args: argparse.Namespace) -> int:
    from ..perf.kernels import the_device
    from ..perf.launch_file import LaunchTime, LaunchTimes, distinct
    from ..perf.launch_measure import measure_launches
    from ..perf.ledger import Launch, Shape, ledger_of
    from ..perf.machine import read_machine
    from ..perf.model_source import sheet_at

    require_report_place(args.json, ())
    if not all(1 <= tp <= MAX_RANKS for tp in args.tp):
        raise InputError(f"--tp is 1 to {MAX_RANKS}.")
    launches: list[Launch] = []
    models: list[str] = []
    for source, tp in itertools.product(args.source, args.tp):
        sheet = sheet_at(source, tp, args.recipe)
        models.append(f"{sheet.label}, {tp} ranks")
        if args.draft_head is not None:
            sheet = sheet.with_draft_head(args.draft_head)
        for shape in itertools.product(args.contexts, args.drafts, args.lanes):
            launches += ledger_of(sheet, Shape(*shape, args.kv)).launches
    device = the_device()

    def tell(one: LaunchTime) -> None:
        if args.quiet:
            return
        figures = (
            f"{one.seconds * 1e6:>9.2f} us {one.nbytes / one.seconds / 1e9:>7,.0f} GB/s" if one.seconds else one.why
        )
        print(f"{one.nbytes / 1e6:>9.3f} MB {figures}  {one.key}", flush=True)

    found = LaunchTimes(read_machine(device), models, measure_launches(distinct(launches), device, tell))
    if args.json is not None:
        with disk_errors(args.json.parent):
            args.json.write_bytes(found.encode())
    return 0
