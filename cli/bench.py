"""`duovolt bench WHAT`: one module of this package for each thing to measure, imported when it is asked for."""

import argparse
import importlib

from .parser import Parser

# What -> (module in this package, one line of help).
TASKS = {
    "collective": ("bench_collective", "sums and gathers between two cards: peer memory, host memory, NCCL"),
    "curve": ("bench_curve", "read bandwidth of a GPU against bytes a kernel, cold"),
    "engine": ("bench_engine", "decode rounds and first tokens of a rank, beside the floor of their reads"),
    "kernels": ("bench_kernels", "GPU kernels beside the plain read of the same bytes and beside cuBLAS"),
    "launches": ("bench_launches", "every launch of a model's round alone, at its real shape, for `predict`"),
    "pipeline": ("bench_pipeline", "quantising and whole stages beside peers, cp, cat and xxh3"),
    "serve": ("bench_serve", "a running server over context, material and lanes; what our server costs a token"),
}


def configure(parser: Parser) -> None:
    parser.epilog = "examples:\n  duovolt bench pipeline\n  duovolt bench serve --overhead\n\nEach has its own --help."
    tasks = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, (module, summary) in TASKS.items():
        task = tasks.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        measuring = importlib.import_module(f".{module}", __package__)
        measuring.configure(task)
        task.reads = measuring.READS
        task.add_argument("--quiet", action="store_true", default=argparse.SUPPRESS, help="print errors only")
        task.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks")


def run(args: argparse.Namespace) -> int:
    module = importlib.import_module(f".{TASKS[args.what][0]}", __package__)
    return int(module.run(args))
