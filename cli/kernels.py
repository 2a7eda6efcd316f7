"""`duovolt kernels build | report | tune`."""

import argparse
import dataclasses
import json
from pathlib import Path

import msgspec

from ..checkpoint.errors import InputError
from ..kernels.build import Built, build, sources, write_out
from .reads import ALWAYS, Reads, valued

EXAMPLE = """examples:
  duovolt kernels build                                  machine code for a V100, into the cache
  duovolt kernels build --arch compute_70 --out kernels  PTX as plain files, for a machine without the compiler:
                                                         copy the directory there and set DUOVOLT_KERNELS to it
  duovolt kernels report                                 what every kernel costs on a V100, from the machine code
  duovolt kernels tune                                   measure this card, and keep what suits it

`build` and `report` need neither a GPU nor a CUDA toolkit, only: pip install "duovolt[cuda]"; `report` also
nvidia-cuda-nvcc-cu12 (ptxas) and, for its loops, the nvdisasm of CUDA 12 or of the triton wheel."""


READS = Reads(
    {
        ALWAYS: "action json",
        valued("action", "build", "report", text="of build and report"): "arch",
        valued("action", "build", text="of build"): "out",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLE
    parser.add_argument("action", choices=("build", "report", "tune"), help="what to do")
    parser.add_argument(
        "--arch",
        metavar="ARCH",
        action="append",
        help="sm_70 (machine code), compute_70 (PTX) or a newer one; may be repeated (default: sm_70); `report` knows sm_70",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the compiled files here")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    return {"build": _build, "report": _report, "tune": _tune}[args.action](args)


def _report(args: argparse.Namespace) -> int:
    """Static cost of every kernel on a V100."""
    if args.arch not in (None, ["sm_70"]):
        raise InputError("`kernels report` judges sm_70 only: for a newer card there is `duovolt bench kernels`.")
    from ..perf.volta_families import report_families
    from ..perf.volta_report import report

    found, others = report(), report_families()
    if args.json:
        facts = [dataclasses.asdict(one) | {"share": one.share} for one in found]
        facts += [dataclasses.asdict(one) | {"share": one.share, "tflops": one.tflops} for one in others]
        print(json.dumps(facts, indent=1))
        return 0
    if args.quiet:
        return 0
    needed = found[0].needed
    print(f"sm_70, 80 multiprocessors at 1.53 GHz, 900 GB/s: {needed / 1e3:.1f} KB in flight a multiprocessor needed")
    print("kernel                regs  shared  spilled  blocks  warps  in flight  cycles a turn  slots a byte  share")
    for one in found:
        loop = (
            "      (no nvdisasm)"
            if one.loop is None
            else f"{one.loop.cycles:13}  {one.slots_a_byte:12.3f}  {one.share:5.2f}"
        )
        print(
            f"{one.name:<20} {one.registers:5}  {one.shared_bytes:6}  {one.spilled_bytes:7}  {one.blocks:6}  {one.warps:5}  "
            f"{one.in_flight / 1e3:6.1f} KB  {loop}"
        )
    print("\nkernel                      regs  spilled  blocks  cycles a unit  share  TFLOP/s")
    for other in others:
        figures = [
            f"{other.blocks:6}" if other.blocks else "",
            f"{other.cycles:13.0f}" if other.cycles else "",
            f"{other.share:5.2f}" if other.share else "",
            f"{other.tflops:7.0f}" if other.tflops else "",
        ]
        columns = "  ".join(text.rjust(width) for text, width in zip(figures, (6, 13, 5, 7), strict=True))
        print(f"{other.name:<26} {other.registers:5}  {other.spilled_bytes:7}  {columns}".rstrip())
    return 0


def _tune(args: argparse.Namespace) -> int:
    """Measure choices on this card and keep the best."""
    import torch

    from ..kernels.tuning import store
    from ..perf.kernels import the_device
    from ..perf.kernels_tune import tune
    from ..perf.prompts_tune import for_prompts

    device = the_device()
    tell = (lambda text: None) if args.quiet or args.json else print
    best = tune(device, tell)
    chosen = for_prompts(best.chosen, device, tell)
    path = store(torch.cuda.get_device_name(device), chosen)
    if args.json:
        print(json.dumps({"choice": msgspec.to_builtins(chosen), "microseconds": best.microseconds, "path": str(path)}))
    elif not args.quiet:
        print(f"kept {msgspec.to_builtins(chosen)} in {path}")
    return 0


def _build(args: argparse.Namespace) -> int:
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
