"""What `bench pipeline --full` runs: a whole model through every stage once, with time, memory and the ledger of bytes."""

import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.container import ITEMSIZE
from ..checkpoint.manifest import read_manifest
from ..model.config import ModelConfig
from ..model.inventory import inventory
from .processes import files_below, require_new, run_duovolt, size_of
from .stages import RELEASE

AXES = {None: "replicated", 0: "column parallel", 1: "row parallel"}


@dataclass(frozen=True)
class Step:
    """One command. `nbytes`: of its input, and for `synth` of its output."""

    what: str
    nbytes: int
    seconds: float
    cpu_seconds: float
    peak_anonymous: int


@dataclass(frozen=True)
class FullSize:
    """Bytes on disk of source, converted directory and ranks; `ledger[rank]` maps how a tensor is split to its bytes.

    `replicated` maps roles to the bytes that every rank holds of them.
    """

    sizes: dict[str, int]
    steps: list[Step]
    ledger: list[dict[str, int]]
    replicated: dict[str, int]


def _ledger(rank: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of a rank by how its tensors are split, and of the replicated ones by role."""
    manifest, specs = read_manifest(rank), inventory(ModelConfig.read(rank))
    split, roles = dict.fromkeys(AXES.values(), 0), dict[str, int]()
    for record in manifest.tensors.values():
        axis = record.split.axis if record.split is not None else None
        nbytes = math.prod(record.shape) * ITEMSIZE[record.dtype]
        split[AXES[axis]] += nbytes
        if axis is None:
            role = re.sub(r"\d+", "*", specs[record.weight].role)
            roles[role] = roles.get(role, 0) + nbytes
    return split, dict(sorted(roles.items(), key=lambda item: -item[1]))


def run_full_size(
    work: Path, config: str, layers: int | None, tp: int, workers: int, tell: Callable[[Step], None]
) -> FullSize:
    """Make a quantised source of `config` (a name or config.json), convert, split and verify it under `work`.

    `work` is a new directory and removed again; `tell` gets each step as it ends. Raises InputError if `work` exists,
    and what a stage ends with.
    """
    require_new(work)
    source, converted, ranks = work / "source", work / "converted", work / "ranks"
    steps: list[Step] = []

    def step(what: str, nbytes: Callable[[], int], *arguments: object) -> None:
        found = run_duovolt(*arguments, "--quiet")
        steps.append(Step(what, nbytes(), found.seconds, found.cpu_seconds, found.peak_anonymous))
        tell(steps[-1])

    def size(*directories: Path) -> Callable[[], int]:
        return lambda: size_of(files_below(*directories))

    try:
        work.mkdir(parents=True)
        depth = () if layers is None else ("--layers", layers)
        step(
            "synth",
            size(source),
            "synth",
            source,
            "--config",
            config,
            "--release",
            RELEASE,
            *depth,
            "--workers",
            workers,
        )
        step("convert", size(source), "convert", source, converted, "--workers", workers)
        step("shard", size(converted), "shard", converted, ranks, "--tp", tp)
        given = ("--converted", converted, "--ranks", ranks)
        step("verify, ranks", size(converted, ranks), "verify", *given)
        step("verify, all", size(source, converted, ranks), "verify", "--source", source, *given)
        places = {"source": source, "converted": converted, "ranks": ranks}
        sizes = {name: size_of(files_below(place)) for name, place in places.items()}
        ledgers = [_ledger(ranks / f"rank-{rank}-of-{tp}") for rank in range(tp)]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return FullSize(sizes, steps, [split for split, _ in ledgers], ledgers[0][1])


def machine() -> str:
    """Cores and memory, for the head of a table."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{os.cpu_count()} cores, {pages / 1e9:.0f} GB of memory"
