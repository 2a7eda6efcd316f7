"""`duovolt bench curve`."""

import argparse
from pathlib import Path

from ..checkpoint.directory import require_report_place
from ..checkpoint.errors import InputError
from ..kernels.build import options
from ..perf.curve import Curve, read_curve
from ..perf.curve_measure import KERNELS, LEAST_CACHES, Wanted, measure_curve
from ..perf.curve_report import draw, table
from ..perf.kernels import the_device
from .numbers import whole
from .reads import ALWAYS, Reads, without

EXAMPLE = f"""examples:
  duovolt bench curve
  duovolt bench curve --json > card.json     what `duovolt predict` reads
  duovolt bench curve --read card.json --svg card.svg
  duovolt bench curve --kernels read fp8 --steps 4 --plain

Read bandwidth against bytes a kernel, 0.5 MB to 1 GB, of a kernel that only reads and of the decode linears in each
encoding; then row length at equal bytes, and 1 to 8 tokens. Everything is cold and in captured graphs. A size gets no
number, and the reason instead, if the pool is under {LEAST_CACHES} times the L2 cache, if more comes out than the memory
can give, or if the card waited for the host."""


READS = Reads({ALWAYS: "read svg json", without("read"): "kernels steps repeats plain pool_mb arch"})


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS), help="which, of all")
    parser.add_argument("--steps", type=whole, default=2, metavar="N", help="sizes an octave, 1 to 8 (default 2)")
    parser.add_argument("--repeats", type=whole, default=15, metavar="N", help="timings of each, 3 to 200 (default 15)")
    parser.add_argument("--plain", action="store_true", help="neither row length nor tokens are varied")
    parser.add_argument(
        "--pool-mb", type=whole, metavar="MB", help="size of the pool (default: 40 times the L2 cache, 2.1 GB)"
    )
    parser.add_argument("--arch", metavar="ARCH", help="compute_70: what a V100's code comes from, on a newer card")
    parser.add_argument("--read", type=Path, metavar="FILE", help="show a curve measured before")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it, with matplotlib")
    parser.add_argument("--json", action="store_true", help="print the curve as `predict` reads it")


def run(args: argparse.Namespace) -> int:
    if not 1 <= args.steps <= 8 or not 3 <= args.repeats <= 200:
        raise InputError("--steps is from 1 to 8, --repeats from 3 to 200.")
    if args.pool_mb is not None and args.pool_mb < 1:
        raise InputError("--pool-mb is at least 1.")
    require_report_place(args.svg, (), "--svg")
    if args.arch is not None:
        options(args.arch)
    curve = _measured(args) if args.read is None else read_curve(args.read)
    if args.svg is not None:
        draw(curve, args.svg)
    if args.json:
        print(curve.encode().decode(), end="")
    elif not args.quiet:
        print("\n".join(table(curve)))
    return 0 if any(series.points for series in curve.series) else 1


def _measured(args: argparse.Namespace) -> Curve:
    pool = None if args.pool_mb is None else args.pool_mb * 1_000_000
    wanted = Wanted(tuple(args.kernels), args.steps, not args.plain, args.repeats, pool, args.arch)
    quiet = args.json or args.quiet
    return measure_curve(the_device(), wanted, (lambda text: None) if quiet else (lambda text: print(text, flush=True)))
