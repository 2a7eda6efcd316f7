"""`duovolt bench kernels`."""

import argparse
import dataclasses
import json
from collections.abc import Iterable

import torch
from msgspec.structs import replace

from ..checkpoint.errors import InputError
from ..kernels.module import arches_for
from ..kernels.tuning import choice, using
from ..perf.kernel_families import FAMILIES, FamilyRow, measure_families
from ..perf.kernels import CASES, Case, Row, loadable, measure, the_device
from ..perf.machine import machine_of
from ..perf.prompt_layers import LayerRow, measure_layers
from ..perf.prompt_linears import MORE, PREFILL, ROUTES, PrefillRow, measure_prefill
from .numbers import whole
from .reads import ALWAYS, Reads, given, without

EXAMPLE = """examples:
  duovolt bench kernels
  duovolt bench kernels --tokens 1 4 --only "gate up" down --ablate
  duovolt bench kernels --tokens 1 4 --rows 32 16 auto --overlap
  duovolt bench kernels --prefill 25 64 256 2048 --route narrow wide beside
  duovolt bench kernels --prefill 2048 4096 --route narrow ahead kept
  duovolt bench kernels --prefill 512 2048 --layers --route narrow ahead
  duovolt bench kernels --family attention delta --overlap

Decode linears (or other families) at the shapes of a rank of two of the 27B, cold and in captured graphs. `share` is the
time of a kernel that only reads as many bytes, measured beside, over the time of ours. The card's own code and, for the
linears, where it can be had, the PTX that a V100's code comes from. With --overlap the plain read's
launches overlap too; the share of one in turn stands beside it."""


_LINEARS = without("family", "prefill")
READS = Reads(
    {
        ALWAYS: "family json",
        without("family"): "prefill",
        _LINEARS: "tokens only ablate rows",
        without("prefill"): "overlap",
        given("prefill"): "route layers",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument(
        "--tokens", type=whole, nargs="+", metavar="T", help=f"1 to 24 each (default: {' '.join(map(str, TOKENS))})"
    )
    parser.add_argument("--only", nargs="+", metavar="CASE", help=f"of: {', '.join(case.name for case in CASES)}")
    parser.add_argument("--ablate", action="store_true", help="also without arithmetic, and without loads")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=list(ROWS),
        metavar="ROWS",
        help="32, 16 or auto, each in turn: rows of an item of nvfp4 and fp8 on sm_80 and newer; slices of K for auto alone "
        "(default: the card's choice)",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="launches overlap as in the engine's graphs, ours and the plain read's (sm_90 and newer)",
    )
    parser.add_argument("--prefill", type=whole, nargs="+", metavar="T", help="only linears of T tokens against cuBLAS")
    parser.add_argument(
        "--route",
        nargs="+",
        choices=ROUTES,
        help="with --prefill, ways to take: the card's own; decode linear and dequantised weights; the wide linear; "
        "dequantising beside the vendor's product; the next linears' beside this one's; weights that stay dequantised "
        "(default: chosen)",
    )
    parser.add_argument(
        "--layers",
        action="store_true",
        help="with --prefill, not each linear but those of a layer, as the engine calls them",
    )
    parser.add_argument(
        "--family",
        nargs="+",
        choices=list(FAMILIES),
        help="only these, as the card's own code: attention, the gated delta rule, what stands between products, sampling, "
        "what an operation adds between its neighbours",
    )
    parser.add_argument("--json", action="store_true", help="machine-readable")


ROWS = {"32": 32, "16": 16, "auto": 0}
TOKENS = (1, 2, 4, 8)


def shares(row: Row | FamilyRow) -> str:
    """Of the plain read: of the one that is launched likewise, and, where launches overlap, of the one in turn."""
    if not row.overlap:
        return f"share {row.ratio:.2f}"
    return f"share {row.ratio:.2f} of an overlapping read ({row.ratio_in_turn:.2f} of one in turn)"


def facts_of(row: Row | FamilyRow) -> dict[str, object]:
    """A row as JSON has it."""
    return dataclasses.asdict(row) | {"share": row.ratio, "share_of_read_in_turn": row.ratio_in_turn}


def line(row: Row, label: str) -> str:
    """One row: time, GB/s, share of the plain read, cuBLAS."""
    cublas = f"  cuBLAS fp16 {row.cublas * 1e6:7.1f} us" if row.cublas else ""
    return (
        f"{row.case:<13} {row.arch:<10} {label:<22} T {row.tokens:<3} {row.nbytes / 1e6:7.1f} MB  {row.seconds * 1e6:8.2f} us  "
        f"{row.nbytes / row.seconds / 1e9:6.0f} GB/s  {shares(row)}{cublas}"
    )


def what(rows: str, left_out: str) -> str:
    """What is special about a measurement."""
    return ", ".join([f"{rows} rows"] * bool(rows) + [f"no {left_out}"] * bool(left_out))


def measured(
    case: Case, args: argparse.Namespace, arches: list[str], device: torch.device
) -> list[tuple[Row, str, str]]:
    """Rows of a case with the rows of an item that were asked for and what was left out; the portable code once only."""
    found = []
    for kind in args.rows or [""]:
        for left_out in ("", "arithmetic", "loads") if args.ablate else ("",):
            tried = choice(device.index or 0)
            if kind:
                tried = replace(tried, rows=ROWS[kind], slices=tried.slices and kind == "auto")
            first = not left_out and kind == (args.rows or [""])[0]
            with using(replace(tried, ablate=left_out)):
                timed = measure(
                    [case], args.tokens or TOKENS, arches if first else arches[:1], device, overlap=args.overlap
                )
            found += [(row, kind, left_out) for row in timed]
    return found


def prefill_line(row: PrefillRow) -> str:
    """One row: time, rate, share of cuBLAS."""
    rate = 2 * row.rows * row.columns * row.tokens / row.seconds / 1e12
    shape = f"{row.encoding:<6} {row.rows:>6} x {row.columns:<6}"
    return (
        f"{shape} T {row.tokens:<5} {row.route:<7} {row.seconds * 1e6:8.1f} us  {rate:5.0f} TFLOP/s  "
        f"cuBLAS fp16 {row.cublas * 1e6:8.1f} us  share {row.ratio:.2f}"
    )


def layer_line(row: LayerRow) -> str:
    """A layer, and its launches in it and by themselves: time, rate, share of cuBLAS."""
    lines = [
        f"layer of {row.layer:<13} T {row.tokens:<5} {row.route:<7} {row.seconds * 1e6:8.1f} us  "
        f"{row.flops / row.seconds / 1e12:5.0f} TFLOP/s  cuBLAS fp16 {row.cublas * 1e6:8.1f} us  share {row.ratio:.2f}"
    ]
    lines += [
        f"  {part.name:<12} in the chain {part.seconds * 1e6:8.1f} us  cuBLAS {part.cublas * 1e6:8.1f} us  share {part.ratio:.2f}"
        f"   alone {part.alone * 1e6:8.1f} us  cuBLAS {part.cublas_alone * 1e6:8.1f} us  share {part.ratio_alone:.2f}"
        for part in row.parts
    ]
    return "\n".join(lines)


def family_line(row: FamilyRow) -> str:
    """One row: time, share of the plain read, rate of products, peer."""
    rate = f"  {row.flops / row.seconds / 1e12:5.0f} TFLOP/s" if row.flops else ""
    peer = f"  {row.peer_name} {row.peer * 1e6:.1f} us" if row.peer else ""
    return (
        f"{row.family:<12} {row.name:<42} {row.nbytes / 1e6:8.2f} MB  {row.seconds * 1e6:9.2f} us  {shares(row)}"
        f"{rate}{peer}"
    )


def run(args: argparse.Namespace) -> int:
    names = [case.name for case in CASES]
    if unknown := [name for name in args.only or [] if name not in names]:
        raise InputError(f"case {unknown[0]!r} is unknown: there are {', '.join(names)}.")
    if not all(1 <= count <= 24 for count in args.tokens or TOKENS) or not all(
        1 <= n <= 1 << 16 for n in args.prefill or []
    ):
        raise InputError("--tokens are from 1 to 24, --prefill from 1 to 65536.")
    device = the_device()
    silent = args.json or args.quiet
    if not silent:
        print(machine_of(device).named, flush=True)
    if args.family:
        families = []
        arch = arches_for(torch.cuda.get_device_capability(device))[0]
        for one in measure_families(args.family, arch, device, overlap=args.overlap):
            families.append(facts_of(one))
            if not silent:
                print(family_line(one), flush=True)
        if args.json:
            print(json.dumps(families, indent=1))
        return 0
    if args.prefill:
        facts = []
        routes = args.route or ["chosen"]
        found: Iterable[PrefillRow | LayerRow] = (
            measure_layers(args.prefill, device, routes)
            if args.layers
            else measure_prefill(args.prefill, device, routes, PREFILL + MORE)
        )
        for prompt in found:
            facts.append(dataclasses.asdict(prompt) | {"share": prompt.ratio})
            if not silent:
                print(layer_line(prompt) if isinstance(prompt, LayerRow) else prefill_line(prompt), flush=True)
        if args.json:
            print(json.dumps(facts, indent=1))
        return 0
    chosen = [case for case in CASES if args.only is None or case.name in args.only]
    arches = loadable(device)
    rows: list[tuple[Row, str, str]] = []
    for case in chosen:
        own = measured(case, args, arches, device)
        rows += own
        if not silent:
            print("\n".join(line(row, what(rows_of, left_out)) for row, rows_of, left_out in own), flush=True)
    if args.json:
        linears = [facts_of(row) | {"rows": rows_of, "without": left_out} for row, rows_of, left_out in rows]
        print(json.dumps(linears, indent=1))
    return 0
