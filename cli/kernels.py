"""`duovolt kernels build | report | tune`."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..checkpoint.errors import InputError
from ..kernels.build import Built, build, sources, write_out
from .reads import ALWAYS, Reads, valued

if TYPE_CHECKING:
    from ..perf.volta_families import FamilyReport
    from ..perf.volta_report import KernelReport

EXAMPLE = """examples:
  duovolt kernels build                                  machine code for a V100, into the cache
  duovolt kernels build --arch compute_70 --out kernels  PTX as plain files, for a machine without the compiler:
                                                         copy the directory there and set DUOVOLT_KERNELS to it
  duovolt kernels report                                 what every kernel costs on a V100, from the machine code
  duovolt kernels tune                                   measure this card, and keep what suits it

`build` and `report` need neither a GPU nor a CUDA toolkit, only: pip install "duovolt[cuda]"; `report` also
nvidia-cuda-nvcc-cu12 (ptxas)."""


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
    from ..perf.volta_report import BANDWIDTH, CLOCK, MULTIPROCESSORS, NEEDED, OFFERED, report

    found: list[KernelReport] = report()
    others: list[FamilyReport] = report_families()
    if args.json:
        facts = [dataclasses.asdict(one) | {"slots_a_byte": one.slots_a_byte, "share": one.share} for one in found]
        facts += [dataclasses.asdict(one) | {name: getattr(one, name) for name in _DERIVED} for one in others]
        print(json.dumps(facts, indent=1))
        return 0
    if args.quiet:
        return 0
    print(
        f"sm_70, {MULTIPROCESSORS} multiprocessors at {CLOCK / 1e9:.2f} GHz, {BANDWIDTH / 1e9:.0f} GB/s: {NEEDED / 1e3:.1f} KB "
        f"in flight a multiprocessor needed,\nissue slots of its quarters offered: {OFFERED:.3f} a byte\n"
    )
    print(f"{'':<26} regs  shared  spilled  blocks  warps  in flight  slots a byte  a KFLOP  share  TFLOP/s")
    rows: list[KernelReport | FamilyReport] = [*found, *others]
    for one in rows:
        print(_row(one))
    return 0


_DERIVED = ("shared_bytes", "blocks", "warps", "in_flight", "slots_a_byte", "slots_a_flop", "share", "tflops")


def _row(one: "KernelReport | FamilyReport") -> str:
    """A kernel's figures; those that it has not are left empty."""
    flops, tflops = getattr(one, "slots_a_flop", None), getattr(one, "tflops", None)
    columns = (
        (one.blocks, 6, "{}"),
        (one.warps, 5, "{}"),
        (one.in_flight / 1e3, 9, "{:.1f} KB"),
        (one.slots_a_byte, 12, "{:.3f}"),
        (flops and flops * 1e3, 7, "{:.2f}"),
        (one.share, 5, "{:.2f}"),
        (tflops, 7, "{:.0f}"),
    )
    texts = ((form.format(value) if value else "").rjust(width) for value, width, form in columns)
    begin = f"{one.name:<26} {one.registers:4}  {one.shared_bytes:6}  {one.spilled_bytes:7}"
    return "  ".join((begin, *texts)).rstrip()


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
