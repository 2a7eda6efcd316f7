"""`shard`: a converted directory to `rank-R-of-N` directories, streaming.

Every converted tensor is read once, checked against its digest on the way, and cut for all ranks at the same time; the
ranks' parts are alike in size, so that one plan of files serves them all. A rank's bytes are the same whether it is
written alone or with the others.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from ..checkpoint.directory import INDEX, MANIFEST, Checkpoint
from ..checkpoint.errors import CheckFailed, InputError
from ..checkpoint.files import file_metadata, plan_files
from ..checkpoint.manifest import Manifest, SplitRecord, TensorRecord, Whole, has_manifest, read_manifest
from ..checkpoint.reopen import Sound, reopen
from ..checkpoint.stage import StageDirectory, disk_errors, recheck_finished, require_space
from ..checkpoint.writer import Planned, ShardWriter, noted_digests
from ..model.config import ModelConfig
from ..model.partition import MAX_RANKS
from .grid import READERS, BandReader, Grid
from .plan import RankPart, check_headers, plan_rank
from .rooms import Rooms

Advance = Callable[[int], None]

HEADER_ALLOWANCE = 1024  # bytes a tensor in header, index and manifest together, for the disk preflight


@dataclass(frozen=True)
class RankReport:
    """One rank directory: tensor bytes, those of them that every rank holds, files kept from an interrupted run."""

    path: Path
    rank: int
    nbytes: int
    replicated_bytes: int
    resumed: list[str]
    already_done: bool


@dataclass(frozen=True)
class ShardReport:
    """What `shard` did. `canonical` names parts that lost their tile layout because a cut falls inside a tile."""

    conversion_id: str
    tp_size: int
    ranks: list[RankReport]
    canonical: list[str]


def _max_shard_bytes(manifest: Manifest) -> int:
    found = manifest.recipe.get("max_shard_bytes")
    if type(found) is not int or found < 1:
        raise InputError(f"{MANIFEST}: the recipe's max_shard_bytes is {found!r}, expected a positive whole number.")
    return found


class _Rank:
    """One rank being written: its parts by stored name, its stage, the digests of its tensors."""

    def __init__(self, path: Path, tp: int, rank: int, groups: list[list[RankPart]], manifest: Manifest) -> None:
        self.path, self.rank = path, rank
        self.parts = {part.name: part for group in groups for part in group}
        self.metadata = file_metadata(manifest.conversion_id, tp, rank)
        self.files = plan_files([[part.stored for part in group] for group in groups], _max_shard_bytes(manifest))
        self.stage = StageDirectory(path, f"conversion {manifest.conversion_id}, rank {rank} of {tp}")
        self.digests: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        return sum(part.stored.nbytes for part in self.parts.values())

    def resume(self, name: str, tensors: list[Planned]) -> bool:
        """True if an earlier run finished this file of shards and it still hashes the same."""
        digests = noted_digests(self.stage.resume(name), tensors)
        if digests is None:
            return False
        self.digests |= digests
        return True


@dataclass
class _Taker:
    """A rank's file being written, in a thread of its own. `failed`: what every later piece reports too."""

    parts: dict[str, RankPart]
    writer: ShardWriter
    thread: ThreadPoolExecutor
    failed: Exception | None = None

    def submit(self, name: str, grid: Grid, first: int, band: np.ndarray) -> Future[None]:
        """Have the rank's pieces of a band written: cells of `grid` from its row `first` on."""
        return self.thread.submit(self._write, self.parts[name], grid, first, band)

    def _write(self, part: RankPart, grid: Grid, first: int, band: np.ndarray) -> None:
        if self.failed is not None:
            raise self.failed
        if part.repeat > 1:
            band = np.repeat(band, part.repeat, axis=part.axis)
            first = first * part.repeat if part.axis == 0 else first
        try:
            for piece in grid.cut(band, first, part.axis, part.ranges):
                self.writer.write(piece)
        except Exception as error:
            self.failed = error
            raise


class _Splitter:
    def __init__(self, checkpoint: Checkpoint, manifest: Manifest, tp: int, advance: Advance) -> None:
        self.checkpoint, self.manifest, self.tp, self.advance = checkpoint, manifest, tp, advance

    def cut(
        self, name: str, takers: list[_Taker], rooms: Rooms, readers: ThreadPoolExecutor, digesting: ThreadPoolExecutor
    ) -> None:
        """Stream one converted tensor to every writer. Raises CheckFailed if it is not what its digest says."""
        entry, record = self.checkpoint.tensors[name], self.manifest.tensors[name]
        if any(taker.writer.is_resumed for taker in takers):
            rooms.drain()  # what is kept comes after what was written before it
            takers = [taker for taker in takers if not taker.writer.keep(name)]
            if not takers:
                self.advance(entry.nbytes)
                return
        digest = xxhash.xxh3_128()
        reader = BandReader(entry, record.layout, tuple(record.canonical_shape), rooms, readers)
        whole = [taker for taker in takers if taker.parts[name].layout == record.layout]
        undone = [taker for taker in takers if taker.parts[name].layout != record.layout]
        digested: Future[None] | None = None
        for band in reader:
            digested = digesting.submit(digest.update, band.raw.data)
            band.room.hold([digested])
            band.room.hold(taker.submit(name, reader.grid, band.first, band.cells) for taker in whole)
            if undone:
                at, cells = reader.canonical(band)
                band.room.hold(taker.submit(name, reader.canonical_grid, at, cells) for taker in undone)
            self.advance(band.cells.nbytes)
        if digested is not None:
            digested.result()  # the last one ends last
        if digest.hexdigest() != record.digest:
            raise CheckFailed(
                f"{entry.path}: tensor {name!r} has digest {digest.hexdigest()}, the manifest says {record.digest}: the "
                "converted directory is damaged. Convert again; no file made from it was kept."
            )

    def write_file(self, name: str, tensors: list[Planned], ranks: list[_Rank]) -> None:
        """Write one file of the plan in each of `ranks`: threads that only read keep the disk at work, one checks what was
        read, and one a rank cuts, digests and writes."""
        with ExitStack() as open_files:
            writers = [
                ShardWriter(
                    open_files.enter_context(rank.stage.create(name, kept=True)),
                    dict(rank.files)[name],
                    rank.metadata,
                    marks=rank.stage.marks(name),
                    mark=partial(rank.stage.mark, name),
                )
                for rank in ranks
            ]
            with ExitStack() as threads:  # ends before the files are closed, whatever happens
                takers = [
                    _Taker(rank.parts, writer, threads.enter_context(ThreadPoolExecutor(1)))
                    for rank, writer in zip(ranks, writers, strict=True)
                ]
                digesting = threads.enter_context(ThreadPoolExecutor(1))
                readers = threads.enter_context(ThreadPoolExecutor(READERS))
                rooms = Rooms()
                for tensor in tensors:
                    self.cut(tensor.name, takers, rooms, readers, digesting)
                rooms.drain()
            records = [writer.close() for writer in writers]
        for rank, writer, record in zip(ranks, writers, records, strict=True):
            rank.stage.finished(name, record, {"digests": writer.digests})
            rank.digests |= writer.digests

    def seal(self, rank: _Rank) -> None:
        """Index, side files, then the manifest."""
        file_of = {tensor.name: name for name, tensors in rank.files for tensor in tensors}
        if rank.stage.resume(INDEX) is None:
            rank.stage.put_index(file_of, rank.nbytes)
        for name in side_files(self.manifest):
            rank.stage.copy(self.checkpoint.path / name, self.manifest.files[name])
        tensors = {name: self._record(part, file_of[name], rank.digests[name]) for name, part in rank.parts.items()}
        rank.stage.seal(
            Manifest(
                format_version=self.manifest.format_version,
                stage="rank",
                family=self.manifest.family,
                conversion_id=self.manifest.conversion_id,
                recipe=self.manifest.recipe,
                tp_size=self.tp,
                tp_rank=rank.rank,
                tensors=tensors,
                files=dict(sorted(rank.stage.files.items())),
                source=self.manifest.source,
                provenance=self.manifest.provenance,
            )
        )

    def _record(self, part: RankPart, file: str, digest: str) -> TensorRecord:
        whole = part.whole
        return TensorRecord(
            weight=whole.weight,
            part=whole.part,
            encoding=whole.encoding,
            layout=part.layout,
            dtype=whole.dtype,
            shape=list(part.stored.shape),
            canonical_shape=list(part.canonical_shape),
            file=file,
            digest=digest,
            sources=whole.sources,
            split=SplitRecord(
                axis=part.axis,
                ranges=list(part.ranges),
                whole=Whole(shape=whole.shape, layout=whole.layout, digest=whole.digest),
            ),
        )


def side_files(manifest: Manifest) -> list[str]:
    """Names of the files that hold neither tensors nor the index."""
    shards = {record.file for record in manifest.tensors.values()}
    return sorted(manifest.files.keys() - shards - {INDEX})


def _require_apart(converted: Path, targets: list[Path]) -> None:
    source = converted.resolve()
    for target in targets:
        place = target.resolve()
        if place == source or source in place.parents or place in source.parents:
            raise InputError(f"{target}: lies in, or holds, the converted directory {converted}. Choose another place.")


def _already_done(rank: _Rank, tp: int, conversion_id: str) -> bool:
    """True if the directory is this very rank, finished, and every file still hashes the same."""
    if not has_manifest(rank.path):
        return False
    there = read_manifest(rank.path)
    if (there.stage, there.conversion_id, there.tp_size, there.tp_rank) != ("rank", conversion_id, tp, rank.rank):
        who = "a converted directory" if there.stage != "rank" else f"rank {there.tp_rank} of {there.tp_size}"
        raise InputError(
            f"{rank.path}: already holds {who} of conversion {there.conversion_id}; this run would make rank "
            f"{rank.rank} of {tp} of {conversion_id}. Remove it or choose another directory."
        )
    recheck_finished(rank.path, there)
    return True


def _bytes_to_write(rank: _Rank, manifest: Manifest) -> int:
    """Bytes still to be written: data, and an allowance for headers, less the files that are there already."""
    there = sum(p.stat().st_size for p in rank.path.iterdir() if p.is_file()) if rank.path.is_dir() else 0
    side = sum(manifest.files[name].size for name in side_files(manifest))
    return max(0, rank.nbytes + side + HEADER_ALLOWANCE * len(rank.parts) - there)


def _open_converted(path: Path) -> tuple[Checkpoint, Manifest]:
    manifest = read_manifest(path)
    if manifest.stage != "converted":
        raise InputError(
            f"{path}: holds rank {manifest.tp_rank} of {manifest.tp_size}, already split. Give the converted directory."
        )
    checkpoint = Checkpoint.open(path)
    check_headers(checkpoint, manifest)
    return checkpoint, manifest


def shard(
    converted: Path,
    dst: Path,
    tp: int,
    rank: int | None = None,
    advance: Advance | None = None,
    keep: Mapping[int, Sound] | None = None,
) -> ShardReport:
    """Write `dst`/rank-R-of-`tp` for every R, or for `rank` alone. `advance` is called with converted bytes read.

    `keep`: repair the finished ranks that are its keys: what is sound of them is kept, the rest is written again. Raises
    InputError for a model that cannot be split so or a target that is taken, CheckFailed for a damaged converted
    directory, EnvironmentFault for a full disk.
    """
    if not 1 <= tp <= MAX_RANKS:
        raise InputError(f"--tp {tp}: expected 1 to {MAX_RANKS} ranks.")
    if rank is not None and not 0 <= rank < tp:
        raise InputError(f"--rank {rank}: with --tp {tp} ranks are 0 to {tp - 1}.")
    checkpoint, manifest = _open_converted(converted)
    config = ModelConfig.of_stage(checkpoint.config, manifest, str(converted / "config.json"))
    wanted = range(tp) if rank is None else [rank]
    plans = {r: plan_rank(manifest, config, tp, r, str(converted / MANIFEST)) for r in wanted}
    ranks = [_Rank(dst / f"rank-{r}-of-{tp}", tp, r, groups, manifest) for r, groups in plans.items()]
    _require_apart(converted, [r.path for r in ranks])
    with disk_errors(dst):
        for r in ranks:
            if keep is not None and r.rank in keep:
                reopen(r.path, r.stage.identity, manifest.conversion_id, keep[r.rank])
        done = {r.rank for r in ranks if _already_done(r, tp, manifest.conversion_id)}
        missing = [r for r in ranks if r.rank not in done]
        require_space(dst, sum(_bytes_to_write(r, manifest) for r in missing))
        _write(_Splitter(checkpoint, manifest, tp, advance or (lambda count: None)), missing)
    return ShardReport(
        conversion_id=manifest.conversion_id,
        tp_size=tp,
        ranks=[_describe(r, r.rank in done) for r in ranks],
        canonical=sorted({p.name for r in ranks for p in r.parts.values() if p.layout != p.whole.layout}),
    )


def _write(splitter: _Splitter, ranks: list[_Rank]) -> None:
    if not ranks:
        return
    with ExitStack() as stages:
        for rank in ranks:
            stages.enter_context(rank.stage)
        for name, tensors in ranks[0].files:
            left = [rank for rank in ranks if not rank.resume(name, dict(rank.files)[name])]
            if left:
                splitter.write_file(name, tensors, left)
            else:
                splitter.advance(sum(splitter.checkpoint.tensors[tensor.name].nbytes for tensor in tensors))
        for rank in ranks:
            splitter.seal(rank)


def _describe(rank: _Rank, done: bool) -> RankReport:
    replicated = sum(part.stored.nbytes for part in rank.parts.values() if part.axis is None)
    return RankReport(rank.path, rank.rank, rank.nbytes, replicated, rank.stage.resumed, done)
