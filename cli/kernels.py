"""`duovolt kernels build`."""

import argparse
import json
from pathlib import Path

from ..kernels.build import Built, build, sources, write_out

EXAMPLE = """examples:
  duovolt kernels build                                  machine code for a V100, into the cache
  duovolt kernels build --arch compute_70 --out kernels  PTX as plain files, for a machine without the compiler:
                                                         copy the directory there and set DUOVOLT_KERNELS to it

Needs neither a GPU nor a CUDA toolkit, only: pip install "duovolt[cuda]\""""


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLE
    parser.add_argument("action", choices=("build",), help="what to do")
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        help="sm_70 (machine code), compute_70 (PTX) or a newer one; may be repeated (default: sm_70)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the compiled files here")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Compile every source for every architecture asked for."""
    facts = []
    for arch in args.arch or ["sm_70"]:
        for source in sources():
            built = build(source, arch)
            path = built.path if args.out is None else write_out(built, args.out)
            facts.append(_facts(built, path))
            if not args.quiet and not args.json:
                print(_line(built, path))
    if args.json:
        print(json.dumps(facts, indent=2))
    return 0


def _facts(built: Built, path: Path) -> dict[str, str | int | float | bool]:
    return {
        "source": built.source,
        "arch": built.arch,
        "bytes": len(built.image),
        "seconds": round(built.seconds, 4),
        "cached": built.cached,
        "path": str(path),
    }


def _line(built: Built, path: Path) -> str:
    origin = "cached" if built.cached else "compiled"
    return f"{built.source}  {built.arch}  {len(built.image):,} bytes  {built.seconds:.2f} s  {origin}  {path}"
