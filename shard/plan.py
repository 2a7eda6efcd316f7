"""What each rank gets of each stored tensor, decided from manifest and headers alone.

Logical ranges come from the family's partition table; each stored part follows its weight through the number of logical
elements that one stored element covers. A cut inside such an element is refused; nothing is ever padded.
"""

from dataclasses import dataclass

from ..checkpoint.directory import Checkpoint
from ..checkpoint.encodings import encoding_parts, part_name, part_of, tile_ranges
from ..checkpoint.errors import CheckFailed, InputError
from ..checkpoint.files import file_metadata
from ..checkpoint.layouts import CANONICAL, stored_shape
from ..checkpoint.manifest import Manifest, TensorRecord
from ..checkpoint.writer import Planned
from ..model.config import ModelConfig
from ..model.inventory import TensorSpec, inventory
from ..model.partition import Split, split_of
from .grid import Ranges, grid_of


@dataclass(frozen=True)
class RankPart:
    """One rank's part of the stored tensor `whole`.

    `ranges` count elements of the canonical whole along `axis`, and stand side by side in the part; axis None: the part
    is the whole. `layout` is the whole's where every cut lies on a tile edge, else canonical. `repeat`: tile scales whose
    tiles are cut are first repeated so often along the axis, and `ranges` count the repeated ones.
    """

    name: str
    whole: TensorRecord
    axis: int | None
    ranges: Ranges
    layout: str
    canonical_shape: tuple[int, ...]
    repeat: int = 1

    @property
    def stored(self) -> Planned:
        """Name, dtype and shape in the rank's file."""
        shape = stored_shape(self.layout, self.whole.dtype, self.canonical_shape)
        return Planned(self.name, self.whole.dtype, shape)


def stored_names(spec: TensorSpec, manifest: Manifest, where: str) -> list[str]:
    """The tensors that store a weight, in the order of its encoding. Raises CheckFailed if one is absent or misshapen."""
    first = manifest.tensors.get(spec.name)
    if first is None:
        raise CheckFailed(f"{where}: tensor {spec.name!r} of the family is missing. Convert again.")
    parts = encoding_parts(first.encoding)
    if parts is None:
        expected = {spec.name: ("plain", first.dtype, spec.shape)}
    else:
        expected = {part_name(spec.name, p): (p.name, p.dtype, p.shape(*spec.shape)) for p in parts}
    for name, (part, dtype, shape) in expected.items():
        record = manifest.tensors.get(name)
        if record is None or record.weight != spec.name or record.encoding != first.encoding:
            raise CheckFailed(
                f"{where}: {spec.name!r} is {first.encoding}, but its part {name!r} is missing or another's."
            )
        found = (record.part, record.dtype, tuple(record.canonical_shape))
        if found != (part, dtype, shape) or tuple(record.shape) != stored_shape(record.layout, dtype, shape):
            raise CheckFailed(
                f"{where}: tensor {name!r} is {record.part} {record.dtype} {record.canonical_shape}, stored as "
                f"{record.shape} in {record.layout}; the family and its encoding say {part} {dtype} {list(shape)}."
            )
    return list(expected)


def check_headers(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Compare every header with the manifest, before any data is read. Raises CheckFailed listing what differs."""
    wrong = [
        f"{file}: __metadata__ is not that of conversion {manifest.conversion_id}"
        for file, header in checkpoint.headers.items()
        if header.metadata != file_metadata(manifest.conversion_id)
    ]
    for name in manifest.tensors.keys() | checkpoint.tensors.keys():
        record, entry = manifest.tensors.get(name), checkpoint.tensors.get(name)
        said = "absent" if record is None else f"{record.dtype} {record.shape} in {record.file}"
        found = "absent" if entry is None else f"{entry.dtype} {list(entry.shape)} in {entry.path.name}"
        if said != found:
            wrong.append(f"{name}: manifest {said}, file {found}")
    if wrong:
        listed = "; ".join(sorted(wrong)[:4]) + ("; ..." if len(wrong) > 4 else "")
        raise CheckFailed(f"{checkpoint.path}: {len(wrong)} headers differ from the manifest: {listed}. Convert again.")


def _stored_ranges(name: str, ranges: Ranges, unit: int) -> Ranges:
    """Logical ranges in stored elements of `unit` logical ones. Raises InputError for a cut inside one."""
    for edge in (edge for pair in ranges for edge in pair):
        if edge % unit:
            raise InputError(
                f"{name}: a cut at column or row {edge} falls inside a group of {unit} "
                f"({edge} = {edge // unit} x {unit} + {edge % unit}). Choose another --tp, or a recipe that keeps this tensor."
            )
    return tuple((start // unit, stop // unit) for start, stop in ranges)


def _part(name: str, record: TensorRecord, spec: TensorSpec, split: Split, rank: int) -> RankPart:
    shape = tuple(record.canonical_shape)
    whole = RankPart(name, record, None, (), record.layout, shape)
    if split.axis is None:
        return whole
    part = part_of(record.encoding, record.part)
    unit = 1 if part is None else part.unit[split.axis]
    if unit is None:
        return whole
    axis = split.axis if part is None else sum(extent is not None for extent in part.unit[: split.axis])
    repeat = 1
    if part is not None and part.ragged:
        fine, counted = tile_ranges(unit, spec.shape[split.axis], split.ranges[rank])
        ranges, repeat = tuple(counted), unit // fine
    else:
        ranges = _stored_ranges(name, split.ranges[rank], unit)
    extent = sum(stop - start for start, stop in ranges)
    mine = (*shape[:axis], extent, *shape[axis + 1 :])
    on_edges = grid_of(record.layout, record.dtype, shape).on_edges(axis, ranges)
    return RankPart(name, record, axis, ranges, record.layout if on_edges else CANONICAL, mine, repeat)


def plan_rank(manifest: Manifest, config: ModelConfig, tp: int, rank: int, where: str) -> list[list[RankPart]]:
    """Every part that `rank` of `tp` stores, grouped by weight, in the order of the model.

    Raises InputError with the numbers for a model that cannot be split so, CheckFailed for a manifest that does not hold
    exactly the family's tensors.
    """
    specs = inventory(config)
    groups = [
        [
            _part(name, manifest.tensors[name], spec, split_of(spec, config, tp), rank)
            for name in stored_names(spec, manifest, where)
        ]
        for spec in specs.values()
    ]
    if extra := manifest.tensors.keys() - {part.name for group in groups for part in group}:
        raise CheckFailed(
            f"{where}: {len(extra)} tensors are not the family's: {', '.join(sorted(extra)[:4])}. Convert again."
        )
    return groups
