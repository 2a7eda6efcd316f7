"""`duovolt synth DST --config NAME or FILE`."""

import argparse
import os
import time
from pathlib import Path

from ..checkpoint.errors import InputError
from ..convert.recipe import load_recipe
from ..model.partition import MAX_RANKS
from ..perf.releases import RELEASES
from ..perf.shapes import NAMED, configuration
from ..perf.synth import Specimen, write_source, write_stages
from .numbers import whole
from .progress import byte_bar
from .reads import ALWAYS, Reads, valued

EXAMPLE = f"""examples:
  duovolt synth headers --config qwen3.8-27b --release qwen3.8-fp8 --fill sparse
  duovolt synth source --config qwen3.8-27b --release nvfp4-ct --layers 8
  duovolt synth ranks --config Qwen3.8-27B/config.json --stage ranks --tp 2

releases:
{chr(10).join(f"  {name:<16} {release.summary}" for name, release in RELEASES.items())}

Sparse files have true headers and full size, but holes for data: `inspect` and `plan` read them, `convert` does not.
The same configuration, release and seed give the same bytes on any number of threads."""


READS = Reads(
    {
        ALWAYS: "target config release layers fill stage tp",
        valued("fill", "random"): "seed workers",
        valued("stage", "converted", "ranks"): "recipe",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("target", type=Path, metavar="DST", help="directory to write (new or empty)")
    parser.add_argument("--config", required=True, metavar="NAME|FILE", help=f"{', '.join(NAMED)}, or a config.json")
    parser.add_argument("--release", choices=tuple(RELEASES), default="bf16", help="whose form (default: bf16)")
    parser.add_argument("--layers", type=whole, metavar="N", help="only the first N layers")
    parser.add_argument("--fill", choices=("random", "sparse"), default="random", help="default: random")
    parser.add_argument("--seed", type=whole, default=0, metavar="S", help="of the random words (default: 0)")
    parser.add_argument(
        "--stage", choices=("source", "converted", "ranks"), default="source",
        help="what DST shall hold (default: source); later stages run the real convert and shard",
    )  # fmt: skip
    parser.add_argument("--tp", type=whole, metavar="N", help="number of ranks, for --stage ranks")
    parser.add_argument("--recipe", default="v100", help="for the later stages (default: v100)")
    parser.add_argument("--workers", type=whole, default=os.cpu_count() or 1, help="threads (default: the cores)")


def _check(args: argparse.Namespace) -> None:
    if args.workers < 1 or not 0 <= args.seed < 1 << 64:
        raise InputError("--workers is at least 1, --seed from 0 to 2^64 - 1.")
    if args.fill == "sparse" and args.stage != "source":
        raise InputError("--fill sparse: holes hold no weights to convert; leave out --stage, or fill with random.")
    if (args.stage == "ranks") != (args.tp is not None):
        raise InputError("--stage ranks and --tp N go together: there is no default number of ranks.")
    if args.tp is not None and not 1 <= args.tp <= MAX_RANKS:
        raise InputError(f"--tp {args.tp}: expected 1 to {MAX_RANKS}.")


def run(args: argparse.Namespace) -> int:
    _check(args)
    config = configuration(args.config, args.layers)
    specimen = Specimen(config, args.release, args.seed, args.fill == "sparse")
    files, begin = specimen.files(), time.perf_counter()
    steps = {"source": 1, "converted": 3, "ranks": 4}[args.stage]
    with byte_bar("synth", steps * specimen.nbytes, args.quiet) as advance:
        if args.stage == "source":
            write_source(args.target, specimen, args.workers, advance)
        else:
            write_stages(args.target, specimen, load_recipe(args.recipe), args.tp, args.workers, advance)
    if not args.quiet:
        seconds = time.perf_counter() - begin
        rate = "" if specimen.sparse else f" in {seconds:.1f} s ({specimen.nbytes / seconds / 1e9:.2f} GB/s)"
        filled = "sparse" if specimen.sparse else f"seed {args.seed}"
        print(
            f"{args.target}: {args.stage}, {args.release} of {config['text_config']['num_hidden_layers']} layers, {filled}: "
            f"{specimen.nbytes / 1e6:,.2f} MB of source tensors in {len(files)} files{rate}"
        )
    return 0
