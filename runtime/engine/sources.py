"""Where a model's float32 weights come from: a rank directory, a converted directory, or a plain checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...checkpoint.directory import Checkpoint
from ...checkpoint.encodings import part_of, plain
from ...checkpoint.encodings.weights import read_weight, weights_of
from ...checkpoint.errors import InputError
from ...checkpoint.manifest import TensorRecord, has_manifest, read_manifest
from ...model.config import ModelConfig
from ...model.inventory import check_closed, inventory
from ...model.partition import Split, split_of
from .digests import check_digests


@dataclass(frozen=True)
class WeightSource:
    """One rank's weights by logical name.

    shapes  logical name -> this rank's shape, vision included
    summed  names cut along their input axis: their products are summed over the ranks
    cut     names cut along their output axis
    read    name -> float32 values
    check   compares every tensor and file with the manifest's digests, where there is one; raises CheckFailed, InputError
    """

    where: str
    config: ModelConfig
    tp_size: int
    tp_rank: int
    shapes: dict[str, tuple[int, ...]]
    summed: frozenset[str]
    cut: frozenset[str]
    read: Callable[[str], np.ndarray]
    check: Callable[[], None] = lambda: None


def open_source(directory: Path) -> WeightSource:
    """The weights of a finished rank or converted directory, or of a plain BF16, FP16 or FP32 checkpoint.

    Raises InputError, from headers and manifest alone, if a tensor is missing, unknown or of a wrong shape.
    """
    if has_manifest(directory):
        return _from_manifest(directory)
    checkpoint = Checkpoint.open(directory)
    if any("conversion_id" in header.metadata for header in checkpoint.headers.values()):
        read_manifest(directory)  # refuses the directory as unfinished
    config = ModelConfig.from_dict(checkpoint.config, str(directory / "config.json"))
    for name, entry in checkpoint.tensors.items():
        if entry.dtype not in ("BF16", "F16", "F32"):
            raise InputError(
                f"{directory}: tensor {name!r} is {entry.dtype}: a quantised checkpoint. Run `duovolt convert` first."
            )
    shapes = {name: entry.shape for name, entry in checkpoint.tensors.items()}
    check_closed(config, shapes, str(directory))

    def read(name: str) -> np.ndarray:
        return plain.to_float32(checkpoint.read(name), checkpoint.tensors[name].dtype)

    return WeightSource(str(directory), config, 1, 0, shapes, frozenset(), frozenset(), read)


def _from_manifest(directory: Path) -> WeightSource:
    manifest = read_manifest(directory)
    checkpoint = Checkpoint.open(directory)
    config = ModelConfig.of_stage(checkpoint.config, manifest, str(directory / "config.json"))
    size, rank = manifest.tp_size or 1, manifest.tp_rank or 0
    axes: dict[str, int | None] = {}
    cuts: dict[str, TensorRecord] = {}
    for weight, parts in weights_of(manifest).items():
        values = parts.get("plain") or parts.get("words")
        if values is None:
            raise InputError(f"{directory}: weight {weight!r} has only {', '.join(parts)}. Make this directory again.")
        cuts[weight] = manifest.tensors[values]
        split = cuts[weight].split
        axes[weight] = None if split is None else split.axis
    # The closed list is that of the whole model: each name's shape here is judged when it is read.
    wanted = check_closed(config, _whole_shapes(config, axes), str(directory))
    shapes = {}
    for name, spec in wanted.items():
        split_here = split_of(spec, config, size)
        _check_cut(cuts[name], split_here, rank, f"{directory}: {name!r}")
        shape = list(spec.shape)
        if split_here.axis is not None:
            shape[split_here.axis] = sum(stop - start for start, stop in split_here.ranges[rank])
        shapes[name] = tuple(shape)
    return WeightSource(
        str(directory),
        config,
        size,
        rank,
        shapes,
        frozenset(name for name, axis in axes.items() if axis == 1),
        frozenset(name for name, axis in axes.items() if axis == 0),
        lambda name: read_weight(checkpoint, manifest, name),
        lambda: check_digests(checkpoint, manifest),
    )


def _check_cut(record: TensorRecord, wanted: Split, rank: int, what: str) -> None:
    """Raises InputError if a rank says of its words that they are another part than the partition table gives it."""
    if record.split is None:
        return
    part, axis = part_of(record.encoding, record.part), wanted.axis
    unit = 1 if part is None or axis is None else part.unit[axis] or 1
    ranges = [] if axis is None else [(start // unit, stop // unit) for start, stop in wanted.ranges[rank]]
    if (record.split.axis, record.split.ranges) != (axis, ranges):
        raise InputError(
            f"{what} is cut along axis {record.split.axis} at {record.split.ranges}, the partition table says axis {axis} "
            f"at {ranges}. Run `duovolt shard` again."
        )


def _whole_shapes(config: ModelConfig, names: dict[str, int | None]) -> dict[str, tuple[int, ...]]:
    known = inventory(config)
    return {name: known[name].shape if name in known else () for name in names}
