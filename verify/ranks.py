"""Proofs about ranks: who they are, that their records are the family's partition, that joined they are the whole."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.digest import digest_json
from ..checkpoint.directory import INDEX
from ..checkpoint.encodings import part_of, tile_ranges
from ..checkpoint.errors import DuovoltError, InputError
from ..checkpoint.manifest import SourceRef, TensorRecord, Whole, has_manifest
from ..model.inventory import inventory
from ..model.partition import MAX_RANKS, Split, split_of
from .join import Joined, Shape
from .report import Proof, Report
from .stage import StageView, open_stage, whole_shapes
from .words import bands_of, first_difference


@dataclass(frozen=True)
class RankSet:
    """The ranks that could be opened. `complete`: each of `size` ranks is there exactly once."""

    views: list[StageView]
    size: int
    complete: bool

    def joined(self, shapes: dict[str, Shape]) -> Joined:
        """Their words, put together."""
        return Joined(self.views, shapes)


def rank_directories(path: Path) -> list[Path]:
    """The directory itself if it is a rank, else every directory below that is named like one or has a manifest.

    Raises InputError if there is none.
    """
    if not path.is_dir():
        raise InputError(f"{path}: not a directory.")
    if has_manifest(path):
        return [path]
    found = [d for d in sorted(path.iterdir()) if d.is_dir() and (d.name.startswith("rank-") or has_manifest(d))]
    if not found:
        raise InputError(f"{path}: no rank-R-of-N directory in it. Give the folder that `duovolt shard` wrote.")
    return found


def open_ranks(path: Path, report: Report) -> RankSet | None:
    """Open every rank below `path` and prove who they are; None if none could be opened."""
    directories = rank_directories(path)
    opened = [open_stage(directory, directory.name, report) for directory in directories]
    views = [view for view in opened if view is not None]
    for view in views:
        if view.manifest.stage != "rank":
            raise InputError(f"{view.path}: a converted directory, given as a rank. Use --converted for it.")
    if not views:
        report.skip("ranks: identity", "no manifest is readable")
        return None
    return _prove_identity(views, alone=directories == [path], unread=len(directories) - len(views), report=report)


def _prove_identity(views: list[StageView], alone: bool, unread: int, report: Report) -> RankSet:
    proof = report.begin("ranks: identity")
    size = views[0].manifest.tp_size or 0
    numbers = [view.manifest.tp_rank for view in views]
    for view in views:
        mine = f"rank-{view.manifest.tp_rank}-of-{view.manifest.tp_size}"
        if view.path.name != mine and not alone:
            proof.fail("the weights are another rank's than the folder's name says", file=str(view.path), found=mine,
                       expected=view.path.name)  # fmt: skip
        if view.manifest.tp_size != size:
            proof.fail("made for another number of ranks", file=str(view.path), found=str(view.manifest.tp_size),
                       expected=str(size))  # fmt: skip
    sensible = 1 <= size <= MAX_RANKS
    if not sensible:
        proof.fail(f"{size} ranks: expected 1 to {MAX_RANKS}", file=str(views[0].path))
    if sensible and not alone:
        for rank in range(size):
            if (count := numbers.count(rank)) != 1:
                proof.fail(f"rank {rank} of {size} is there {count} times, expected once")
    for view in views[1:]:
        _compare_common(views[0], view, proof)
    proof.detail = f"{len(views)} of {size} ranks of conversion {views[0].manifest.conversion_id}"
    complete = sensible and not unread and sorted(map(str, numbers)) == sorted(map(str, range(size)))
    if not complete:
        report.notes.append(
            f"{len(views)} of {size} ranks: not proved are that the ranks together hold every element, and that their "
            "replicated tensors are equal. Give the folder with all ranks for that."
        )
    return RankSet(views, size, complete)


def _common(view: StageView) -> dict[str, Any]:
    """What all ranks of one split must have in common."""
    manifest = view.manifest
    shards = {record.file for record in manifest.tensors.values()}
    return {
        "conversion_id": manifest.conversion_id,
        "family": manifest.family,
        "format_version": manifest.format_version,
        "recipe": manifest.recipe,
        "source": manifest.source,
        "provenance": manifest.provenance,
    } | {f"file {name}": record for name, record in manifest.files.items() if name not in shards and name != INDEX}


def _compare_common(first: StageView, other: StageView, proof: Proof) -> None:
    ours, theirs = _common(first), _common(other)
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            short = [v if isinstance(v, str) else digest_json(v) for v in (theirs.get(key), ours.get(key))]
            proof.fail(f"{key} differs from {first.label}'s", file=str(other.path), found=short[0], expected=short[1])
    for name in sorted(first.manifest.tensors.keys() | other.manifest.tensors.keys()):
        a, b = first.manifest.tensors.get(name), other.manifest.tensors.get(name)
        if a is None or b is None or _whole_of(a) != _whole_of(b):
            proof.fail(
                f"{other.label} and {first.label} do not record the same whole", tensor=name, file=other.file(name)
            )


def _whole_of(record: TensorRecord) -> tuple[Whole, str, str, str, str, list[SourceRef]]:
    """What a rank's record says about the whole tensor, and what a converted record says about itself."""
    whole = Whole(shape=record.shape, layout=record.layout, digest=record.digest)
    if record.split is not None:
        whole = record.split.whole
    return whole, record.weight, record.part, record.encoding, record.dtype, record.sources


def prove_lineage(converted: StageView, ranks: RankSet, report: Report) -> None:
    """The ranks were made from this converted directory, by their manifests' word."""
    proof = report.begin("converted -> ranks: same conversion")
    ours = _common(converted)
    for view in ranks.views:
        theirs = _common(view)
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                proof.fail(f"{key} differs from the converted directory's", file=str(view.path))
        for name in sorted(converted.manifest.tensors.keys() | view.manifest.tensors.keys()):
            whole, part = converted.manifest.tensors.get(name), view.manifest.tensors.get(name)
            if whole is None or part is None:
                proof.fail("only one of converted directory and rank has it", tensor=name, file=str(view.path))
            elif _whole_of(whole) != _whole_of(part):
                proof.fail("the rank's record of the whole is not the converted tensor's", tensor=name, file=view.file(name),
                           found=_whole_of(part)[0].digest, expected=whole.digest)  # fmt: skip
    proof.detail = f"{len(converted.manifest.tensors)} tensors, conversion {converted.manifest.conversion_id}"


def _expected_split(
    record: TensorRecord, split: Split, rank: int, shape: Shape, logical: Shape
) -> tuple[int | None, list[Any], list[int]]:
    """(axis, ranges, canonical shape) that the partition table gives a stored part of a whole of `shape`.

    `logical` is the shape of the weight.
    Raises InputError if a cut would fall inside a stored element.
    """
    if split.axis is None:
        return None, [], list(shape)
    part = part_of(record.encoding, record.part)
    units = (1, 1) if part is None else part.unit
    unit = units[split.axis]
    if unit is None:
        return None, [], list(shape)
    axis = split.axis - units[: split.axis].count(None)
    ranges = split.ranges[rank]
    if part is not None and part.ragged:
        cut = tile_ranges(unit, logical[split.axis], ranges)[1]
    elif any(edge % unit for pair in ranges for edge in pair):
        raise InputError(f"the partition cuts inside a group of {unit}: {ranges}")
    else:
        cut = [(start // unit, stop // unit) for start, stop in ranges]
    return axis, cut, [*shape[:axis], sum(stop - start for start, stop in cut), *shape[axis + 1 :]]


def prove_partition(ranks: RankSet, report: Report) -> None:
    """Every record is what the family's partition table says, computed anew from the configuration."""
    view = next((v for v in ranks.views if v.config is not None), None)
    if view is None or view.config is None:
        report.skip("ranks: partition", "no configuration is readable")
        return
    proof = report.begin("ranks: partition")
    specs = inventory(view.config)
    cut = 0
    for rank in ranks.views:
        shapes = whole_shapes(rank)
        for name, record in rank.manifest.tensors.items():
            spec = specs.get(record.weight)
            if spec is None or name not in shapes or record.split is None:
                continue  # the inventory proof has named it
            try:
                split = split_of(spec, view.config, rank.manifest.tp_size or 0)
                wanted = _expected_split(record, split, rank.manifest.tp_rank or 0, shapes[name], spec.shape)
            except InputError as error:
                proof.fail(str(error), tensor=name, file=rank.file(name))
                continue
            found = (record.split.axis, record.split.ranges, record.canonical_shape)
            cut += found[0] is not None
            if found != wanted:
                proof.fail("axis, ranges and shape are not the partition table's", tensor=name, file=rank.file(name),
                           found=str(found), expected=str(wanted))  # fmt: skip
    proof.detail = f"{cut} parts cut by whole heads and groups, the rest replicated"


def prove_replicas(ranks: RankSet, report: Report) -> None:
    """Tensors that every rank holds whole are the same bytes on all of them."""
    if not ranks.complete or len(ranks.views) < 2:
        report.skip("ranks: replicated tensors", "needs all of two or more ranks")
        return
    proof = report.begin("ranks: replicated tensors")
    first, count = ranks.views[0], 0
    for name, record in first.manifest.tensors.items():
        if record.split is None or record.split.axis is not None:
            continue
        count += 1
        for other in ranks.views[1:]:
            if other.digests.get(name) != first.digests.get(name) or name not in first.digests:
                _name_replica(name, record, first, other, proof)
    proof.detail = f"{count} tensors equal on {len(ranks.views)} ranks"


def _name_replica(name: str, record: TensorRecord, first: StageView, other: StageView, proof: Proof) -> None:
    message = f"{other.label} and {first.label} differ"
    try:
        for low, high in bands_of(tuple(record.canonical_shape), record.dtype):
            differs = first_difference(other.rows(name, low, high), first.rows(name, low, high))
            if differs is not None:
                index = [differs[0][0] + low, *differs[0][1:]]
                proof.fail(
                    message, tensor=name, file=other.file(name), index=index, found=differs[1], expected=differs[2]
                )
                return
    except (DuovoltError, OSError, ValueError) as error:
        message = f"{message} ({error})"
    proof.fail(message, tensor=name, file=other.file(name))
