"""What `bench pipeline --stages` measures: shard and verify beside cp, cat and one pass of xxh3 over the same bytes.

Both sides of a ratio run next to one another within a round; the median of the rounds' ratios is reported.
"""

import shutil
import statistics
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from .processes import Measured, copy_files, drop_cache, files_below, flush, require_new, run_duovolt, size_of, timed
from .specimen import write_source

BLOCK = 1 << 20  # bytes a read of the plain pass: the best of 64 KB to 8 MB on the machine of docs/benchmarks/stages.md
RELEASE = "nvfp4-ct"  # quantised already, so that the converted checkpoint is as large as the source


@dataclass(frozen=True)
class StageRace:
    """Medians. Seconds of ours and of the peer, and the peer's seconds by ours, round by round.

    `nbytes` are those that the peer moves: written for cp, read for the others.
    """

    what: str
    nbytes: int
    ours: float
    peer: str
    theirs: float
    ratio: float


@dataclass(frozen=True)
class StageRaces:
    """`converted_bytes` and `ranks_bytes` on disk; peaks are bytes of anonymous memory over all rounds."""

    converted_bytes: int
    ranks_bytes: int
    shard_peak: int
    verify_peak: int
    races: list[StageRace]


@dataclass
class _Round:
    """Seconds of one round, by what was run."""

    seconds: dict[str, float]
    shard_peak: int
    verify_peak: int


def _cat(paths: Sequence[Path]) -> None:
    with Path("/dev/null").open("wb") as nowhere:
        subprocess.run(["cat", *map(str, paths)], check=True, stdout=nowhere)


def _hash_files(paths: Sequence[Path]) -> None:
    buffer = bytearray(BLOCK)
    for path in paths:
        digest = xxhash.xxh3_128()
        with path.open("rb", buffering=0) as handle:
            while count := handle.readinto(buffer):
                digest.update(memoryview(buffer)[:count])


def _hash_on_two_threads(paths: Sequence[Path]) -> None:
    """The files in turn on two threads, the largest first."""
    order = sorted(paths, key=lambda path: -path.stat().st_size)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda path: _hash_files([path]), order))


def _make_converted(work: Path, nbytes: int, workers: int) -> Path:
    """A converted checkpoint of about `nbytes` with the 27B's matrices, in `work`; its source is removed again."""
    write_source(work / "source", nbytes, release=RELEASE)
    run_duovolt("convert", work / "source", work / "converted", "--workers", workers, "--quiet")
    shutil.rmtree(work / "source")
    return work / "converted"


def _round(converted: Path, ranks: Path, tp: int, apart: Path | None) -> _Round:
    seconds: dict[str, float] = {}

    def shard(target: Path = ranks) -> Measured:
        shutil.rmtree(target, ignore_errors=True)
        flush(files_below(converted))
        return run_duovolt("shard", converted, target, "--tp", tp, "--quiet")

    def verify() -> Measured:
        return run_duovolt("verify", "--converted", converted, "--ranks", ranks, "--quiet")

    _cat(files_below(converted))
    warm_shard = shard()
    seconds["shard"] = warm_shard.seconds
    copy = ranks.with_name("copy")
    seconds["cp"] = timed(lambda: copy_files(ranks, copy))
    shutil.rmtree(copy)

    both = files_below(converted, ranks)
    _cat(both)
    seconds["xxh3"] = timed(lambda: _hash_files(both))
    warm_verify = verify()
    seconds["verify"] = warm_verify.seconds
    seconds["xxh3, two threads"] = timed(lambda: _hash_on_two_threads(both))

    drop_cache(both)
    seconds["cat of both"] = timed(lambda: _cat(both))
    drop_cache(both)
    cold_verify = verify()
    seconds["verify, cold"] = cold_verify.seconds

    sources = files_below(converted)
    drop_cache(both)
    seconds["cat"] = timed(lambda: _cat(sources))
    drop_cache(both)
    cold_shard = shard()
    seconds["shard, cold"] = cold_shard.seconds
    if apart is not None:
        drop_cache(both)
        seconds["cat, again"] = timed(lambda: _cat(sources))
        drop_cache(both)
        try:
            seconds["shard, cold, written apart"] = shard(apart).seconds
        finally:
            shutil.rmtree(apart, ignore_errors=True)
    drop_cache(sources)
    seconds["cp, cold"] = timed(lambda: copy_files(converted, copy))
    shutil.rmtree(copy)
    return _Round(
        seconds,
        max(warm_shard.peak_anonymous, cold_shard.peak_anonymous),
        max(warm_verify.peak_anonymous, cold_verify.peak_anonymous),
    )


def race_stages(
    work: Path,
    nbytes: int,
    rounds: int,
    workers: int,
    tp: int,
    tell: Callable[[dict[str, float]], None],
    apart: Path | None = None,
) -> StageRaces:
    """Split and verify a synthetic converted checkpoint of about `nbytes` under `work`, a new directory, removed again.

    `tell` gets the seconds of each round as it ends, by what was run. `apart`: a new directory on another disk or in
    memory, for a split whose reading is not in the way of its writing; removed again.
    Raises InputError if `work` or `apart` exists, EnvironmentFault if the disk is too small.
    """
    require_new(work, apart)
    try:
        converted, ranks = _make_converted(work, nbytes, workers), work / "ranks"
        found = []
        for _ in range(rounds):
            found.append(_round(converted, ranks, tp, apart))
            tell(found[-1].seconds)
        whole, parts = size_of(files_below(converted)), size_of(files_below(ranks))
    finally:
        shutil.rmtree(work, ignore_errors=True)

    def race(what: str, nbytes: int, peer: str, name: str) -> StageRace:
        pairs = [(r.seconds[what], r.seconds[peer]) for r in found]
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        return StageRace(what, nbytes, ours, name, theirs, statistics.median(b / a for a, b in pairs))

    elsewhere = []
    if apart is not None:
        elsewhere = [race("shard, cold, written apart", whole, "cat, again", "cat of the converted files, cold")]
    return StageRaces(
        whole,
        parts,
        max(r.shard_peak for r in found),
        max(r.verify_peak for r in found),
        [
            race("shard", parts, "cp", "cp and fsync of the ranks"),
            race("verify", whole + parts, "xxh3", "one xxh3 pass, one thread"),
            race("verify", whole + parts, "xxh3, two threads", "the same on two threads"),
            race("verify, cold", whole + parts, "cat of both", "cat of the same files, cold"),
            race("shard, cold", whole, "cat", "cat of the converted files, cold"),
            race("cp, cold", whole, "cat", "the same"),
            *elsewhere,
        ],
    )
