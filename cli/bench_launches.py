"""`duovolt bench launches SRC`: every launch of a round alone, at its real shape, and a few layers in a row."""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.directory import require_report_place
from ..checkpoint.errors import InputError
from ..checkpoint.stage import disk_errors
from ..model.partition import MAX_RANKS
from .numbers import cards, numbers_of, whole
from .reads import ALWAYS, Condition, Reads, without

if TYPE_CHECKING:
    import torch

    from ..perf.launch_file import LaunchTime
    from ..perf.model_source import Described

EXAMPLE = """examples:
  duovolt bench launches qwen3.8-27b --drafts 3 --json launches.json
  duovolt bench launches qwen3.8-27b dense-9b --contexts 8192 131072 --json launches.json
  duovolt bench launches qwen3.8-27b --devices 0,1 --json launches-2.json
  duovolt predict qwen3.8-27b --card h200 --launches launches.json --drafts 3 --context 32768
  duovolt bench launches --card-file launches.json >> card.toml

A round of a few layers of the model runs once, and what the engine called is called again: each operation in a captured
graph of its own, over matrices, caches and states that are many times the second-level cache, a node's cost included; then
each behind the two that stand before it, in turn and begun early (--graphs serial: not), which tells what overlap saves; then
the layers in a row, which tells what a launch costs between others. What takes less in turn than its launches one by one has no
number: some of them did nothing. Weights are random, and the whole round is never run.
Attention is measured at each context; a forecast takes a line between. --devices 0,1 measures the ranks of two, each on its
card, and what they exchange; --tp 2 on one card leaves exchanges out."""


_MEASURING = without("card_file")
_TWO_CARDS = Condition("with two --devices", lambda args: "," in args.devices)
_SUITING = Condition("with one of --devices (two have 2)", lambda args: "," not in args.devices or args.tp == [2])
READS = Reads(
    {
        ALWAYS: "card_file",
        _MEASURING: "source recipe devices twin way drafts lanes contexts kv graphs draft_head json",
        _MEASURING & _TWO_CARDS: "collective",
        _MEASURING & _SUITING: "tp",
    },
    judged="twin",
    contrary={_TWO_CARDS: "tp"},
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("source", nargs="*", metavar="SRC", help="directories, config.json or known names")
    parser.add_argument("--recipe", metavar="R", help="as for ledger")
    parser.add_argument("--tp", type=whole, nargs="+", default=[1], metavar="N", help="numbers of ranks (default: 1)")
    parser.add_argument(
        "--devices",
        type=cards(2),
        default="0",
        metavar="N[,N]",
        help="cards; two measure both ranks (default: 0); cpu: only to try the command, on the kernels' references",
    )
    parser.add_argument("--collective", choices=("auto", "host", "ipc", "nccl"), default="auto", help="as for serve")
    parser.add_argument("--twin", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--drafts", type=whole, nargs="+", default=[3], metavar="K", help="default: 3")
    parser.add_argument("--lanes", type=whole, nargs="+", default=[1], metavar="L", help="default: 1")
    parser.add_argument("--contexts", type=whole, nargs="+", default=[2048, 8192, 32768, 131072], metavar="N")
    parser.add_argument("--kv", choices=("int8", "fp16"), default="int8", help="default: int8")
    parser.add_argument(
        "--graphs",
        choices=("on", "serial"),
        default="on",
        help="serial: leave out what launches save that overlap (default: on)",
    )
    parser.add_argument("--draft-head", type=whole, metavar="ROWS", help="as for ledger")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the times go")
    parser.add_argument(
        "--card-file",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: print what files of --json say for every model, as sections of a card file",
    )


def run(args: argparse.Namespace) -> int:
    if args.card_file is not None:
        from ..perf.launch_card import sections
        from ..perf.launch_file import read_launch_times

        print(sections([read_launch_times(path) for path in args.card_file]), end="")
        return 0
    if not args.source:
        raise InputError("bench launches needs a model: `duovolt bench launches qwen3.8-27b`.")
    require_report_place(args.json, ())
    _check(args)
    for source, tp in itertools.product(args.source, args.tp):
        _model(args, source, tp)
    from ..perf.pair import Partner, twin, way_between, words_of

    if args.twin:
        args.twin = Partner.first(args.twin)
        return _measure(args, 1)
    if "," not in args.devices:
        return _measure(args, 0)
    devices = numbers_of(args.devices)
    args.tp, args.way = [2], way_between(args.collective, devices).argument
    with twin(words_of("launches", args, positional=("source",))) as partner:
        args.twin = partner
        return _measure(args, 0)


def _measure(args: argparse.Namespace, rank: int) -> int:
    """As rank `rank`, where there are two."""
    import torch

    from ..perf.device_timing import node_cost, replay_cost, start_cost
    from ..perf.launch_file import LaunchTimes
    from ..perf.launch_measure import Costs, Found, Subject, Wanted, lone, measure_subject
    from ..perf.launch_pair import Pair
    from ..perf.machine import machine_of

    models = [_model(args, source, tp) for source, tp in itertools.product(args.source, args.tp)]
    device = torch.device("cpu") if args.devices == "cpu" else _card(args, rank)
    is_card, machine = device.type == "cuda", machine_of(device)
    if not args.quiet:
        print(f"{machine.named}; {', '.join(f'{one.label}, {one.tp} ranks' for one in models)}", flush=True)
    if not is_card:
        torch.set_num_threads(1)  # small products: more threads only wait for one another
    found, pair = Found(), Pair(args.twin, rank, args.way, device) if args.twin else None
    with torch.inference_mode():
        node = node_cost(device).seconds if is_card else 0.0
        costs = Costs(start_cost(device, node) if is_card else 0.0)
        for model, drafts, lanes in itertools.product(models, args.drafts, args.lanes):
            wanted = Wanted(args.contexts, drafts, lanes, args.kv, args.graphs == "on")
            link = pair.link if pair is not None else lone(model)
            subject = Subject(model, rank if pair is not None else 0, link, wanted, device)
            measure_subject(subject, found, costs, pair.together if pair is not None else None, _teller(args))
            del subject
            if is_card:
                torch.cuda.empty_cache()
        replay = replay_cost(device) if is_card else 0.0
    launches, edges = found.launches, found.edges
    if pair is not None:
        launches, edges = pair.slower(launches), pair.lesser(edges)
        pair.close()
    if not replay < 1:  # as a file may hold it
        found.refused.append(f"between rounds: {replay:.1f} s, which no driver takes")
        replay = 0.0
    labels = [f"{one.label}, {one.tp} ranks" for one in models]
    times = LaunchTimes(machine, labels, launches, found.chains, replay, edges=edges, refused=found.refused)
    if not args.quiet:
        for line in found.refused:
            print(f"no number: {line}")
        for chain in found.chains:
            print(
                f"{chain.model}, {chain.tp} ranks, {chain.lanes} lanes: {chain.calls} calls in a row "
                f"{chain.seconds * 1e6:.1f} us, alone {chain.alone * 1e6:.1f} us: {chain.gap * 1e6:+.2f} us a call; "
                f"{chain.begin * 1e6:.1f} us where a graph begins"
            )
            if (gap := chain.gap_overlapped) is not None:
                print(
                    f"  overlapping {chain.overlapped * 1e6:.1f} us, edges save {chain.saved * 1e6:.1f} us: "
                    f"{gap * 1e6:+.2f} us a call"
                )
        print(f"node {node * 1e6:.2f} us, graph {costs.start * 1e6:.2f} us, between rounds {replay * 1e6:.2f} us")
    if args.json is not None:
        with disk_errors(args.json.parent):
            args.json.write_bytes(times.encode())
    return 0


def _card(args: argparse.Namespace, rank: int) -> "torch.device":
    import torch

    from ..perf.kernels import the_device

    the_device()
    number = numbers_of(args.devices)[rank]
    if number >= torch.cuda.device_count():
        raise InputError(f"--devices {args.devices}: this machine shows {torch.cuda.device_count()} cards.")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def _teller(args: argparse.Namespace) -> "Callable[[LaunchTime], None]":
    def tell(one: "LaunchTime") -> None:
        if not args.quiet:
            figures = f"{one.seconds * 1e6:>9.2f} us" if one.seconds else one.why
            rate = f"{one.nbytes / 1e6:>9.1f} MB" if one.nbytes else f"{'':>12}"
            print(f"{rate} {figures} (spread {one.spread:.1%})  {one.key}", flush=True)

    return tell


def _model(args: argparse.Namespace, source: str, tp: int) -> "Described":
    from ..perf.model_source import model_at

    model = model_at(source, tp, args.recipe)
    return model if args.draft_head is None else model.with_draft_head(args.draft_head)


def _check(args: argparse.Namespace) -> None:
    if not all(1 <= tp <= MAX_RANKS for tp in args.tp):
        raise InputError(f"--tp is 1 to {MAX_RANKS}.")
    if not all(64 <= context <= 1 << 20 for context in args.contexts):
        raise InputError("--contexts are from 64 to 1048576 tokens.")
    if not all(1 <= lanes <= 4 for lanes in args.lanes) or not all(0 <= drafts <= 5 for drafts in args.drafts):
        raise InputError("--lanes are from 1 to 4, --drafts from 0 to 5.")
