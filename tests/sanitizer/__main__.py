"""Every kernel by small launches, for compute-sanitizer: `python -m duovolt.tests.sanitizer [PART[@compute_70] ...]`.

A part is a family of operations; behind @ the architecture whose code runs, else that of sm_90. `--tool`: what looks on; what it
makes too slow is left out. `--recorded`: without a card. `--all FOLDER`: everything under every tool (docs/kernels.md), on a
card of compute capability 9.0.
"""

import argparse
from collections import Counter
from pathlib import Path

import torch

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.kernels import build
from duovolt.kernels import module as mod
from duovolt.kernels.tuning import Choice, using

from . import between, caches, campaign, choosing, controls, exchanges, linears, recorder, rounds
from .launching import NATIVE, faults, flush_record, here, launched, names_in, tell, watch

PARTS = {
    "exchange": exchanges.exchanges,
    "round": rounds.rounds,
    "elementwise": between.elementwise,
    "linear8": linears.linear_8,
    "ways": linears.linear_ways,
    "more": linears.linear_more,
    "wide": linears.wide_linear,
    "plain": linears.dequantising,
    "attention": caches.attending,
    "delta": caches.delta_rule,
    "lists": choosing.sample_lists,
    "passes": choosing.sample_passes,
    "drafts": choosing.sample_drafts,
    "logs": choosing.logprobs_and_candidates,
    "neighbours": between.neighbours,
}
CONTROLS = {
    "control-init": controls.control_init,
    "control-race": controls.control_race,
    "control-mem": controls.control_mem,
}


def never(seen: Counter[tuple[str, str, str]], arch: str) -> tuple[list[str], int]:
    """Kernels of an architecture's builds that were not launched; how many there are."""
    every = [(source, name) for source in build.sources() for name in names_in(source, arch)]
    return [name for source, name in every if not seen[source, name, arch]], len(every)


def coverage(files: list[Path]) -> None:
    """What the records of several processes launched together."""
    seen: Counter[tuple[str, str, str]] = Counter()
    for file in files:
        for line in file.read_text().splitlines():
            words = line.split()
            if len(words) != 4 or not words[3].isdecimal():
                raise SystemExit(
                    f"{file}: {line[:80]!r} is no line of a record (source, kernel, architecture, launches)."
                )
            seen[words[0], words[1], words[2]] += int(words[3])
    tell_coverage(seen)


def tell_coverage(seen: Counter[tuple[str, str, str]]) -> None:
    for arch in (NATIVE, mod.PORTABLE):
        try:
            missed, total = never(seen, arch)
        except EnvironmentFault as fault:
            print(f"{arch}: its kernels' names are not known here: {fault}")
            continue
        launches = sum(count for (source, _, own), count in seen.items() if own == arch and source != "control.cu")
        print(
            f"{arch}: {total - len(missed)} of {total} kernels in {launches} launches; never: {' '.join(missed) or 'none'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m duovolt.tests.sanitizer", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART[@ARCH]", help=", ".join([*PARTS, *CONTROLS]))
    parser.add_argument("--tool", choices=("init", "mem", "race", "plain"), default="plain")
    parser.add_argument("--record", type=Path, help="a file that gains a line for each kernel launched")
    parser.add_argument("--recorded", action="store_true", help="no card: check and write down what would be launched")
    parser.add_argument("--coverage", type=Path, nargs="+", metavar="RECORD", help="sum up records")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="every part under every tool, logs into this folder")
    wanted = parser.parse_args()
    for one in wanted.parts:
        part, at, arch = one.partition("@")
        if part not in (CONTROLS if not at and part in CONTROLS else PARTS) or (at and arch != mod.PORTABLE):
            parser.error(
                f"there is no part {one}: {', '.join([*PARTS, *CONTROLS])}, a part's PTX as PART@{mod.PORTABLE}"
            )
    try:
        return _run(wanted)
    except OSError as fault:
        parser.error(f"{fault.filename}: {fault.strerror}")


def _run(wanted: argparse.Namespace) -> int:
    if wanted.coverage:
        coverage(wanted.coverage)
        return 0
    if wanted.all:
        return campaign.run(wanted.all)
    here.tool, here.record, here.recorded = wanted.tool, wanted.record, wanted.recorded
    if wanted.recorded:
        recorder.pretend()
    else:
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device: --recorded shows without one what would be launched.")
        watch()
        here.device = torch.device("cuda", 0)
        torch.zeros(1, device=here.device)
        torch.cuda.synchronize()
    tell("begun", here.tool, *wanted.parts)
    for one in wanted.parts or [*PARTS, *(f"{part}@{mod.PORTABLE}" for part in PARTS)]:
        part, _, arch = one.partition("@")
        if part in CONTROLS:
            CONTROLS[part]()
            flush_record()
            continue
        with mod.forced_arch(arch or NATIVE), using(Choice()):
            tell("part", part, arch or NATIVE)
            PARTS[part](not arch)
    if here.recorded:
        tell_coverage(launched)
    tell("through,", len(faults), "faults", *faults)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
