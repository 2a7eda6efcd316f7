"""The plan of a conversion: every tensor's encoding, layout, stored shape and file, from headers and recipe alone."""

from collections.abc import Callable
from dataclasses import dataclass

from ..checkpoint.container import TensorEntry
from ..checkpoint.encodings import PLAIN_ENCODINGS, PLAIN_OF_DTYPE, PartName, encoding_parts, part_name
from ..checkpoint.errors import InputError
from ..checkpoint.files import plan_files
from ..checkpoint.layouts import CANONICAL, stored_form
from ..checkpoint.manifest import SourceRef, TensorRecord
from ..checkpoint.sources.base import SourceWeight
from ..checkpoint.writer import Planned
from ..model.inventory import TensorSpec
from .recipe import Recipe
from .source import Source


@dataclass(frozen=True)
class PlannedPart:
    """One tensor to be stored: which part of which weight, in which layout, made from which source tensor.

    `imported`: the source has this very part, and only its layout (and the width of its scales) changes.
    """

    spec: TensorSpec
    part: PartName
    encoding: str
    layout: str
    canonical_shape: tuple[int, ...]
    stored: Planned
    origin: TensorEntry
    imported: bool = False


@dataclass(frozen=True)
class ConversionPlan:
    """`parts` by stored name; `files` as (name, tensors in storage order)."""

    parts: dict[str, PlannedPart]
    files: list[tuple[str, list[Planned]]]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the converted directory."""
        return sum(part.stored.nbytes for part in self.parts.values())


def tensor_records(
    plan: ConversionPlan, source_digest: Callable[[str], str], stored_digest: Callable[[str], str]
) -> dict[str, TensorRecord]:
    """The manifest's records of a plan, given the digests of source and stored tensors by name."""
    file_of = {tensor.name: name for name, tensors in plan.files for tensor in tensors}
    records = {}
    for name, part in plan.parts.items():
        entry = part.origin
        origin = SourceRef(
            name=entry.name, dtype=entry.dtype, shape=list(entry.shape), digest=source_digest(entry.name)
        )
        records[name] = TensorRecord(
            weight=part.spec.name,
            part=part.part,
            encoding=part.encoding,
            layout=part.layout,
            dtype=part.stored.dtype,
            shape=list(part.stored.shape),
            canonical_shape=list(part.canonical_shape),
            file=file_of[name],
            digest=stored_digest(name),
            sources=[origin],
        )
    return records


def _parts(spec: TensorSpec, weight: SourceWeight, wanted: str | None, layout_family: str) -> list[PlannedPart]:
    """A weight that the source has quantised keeps its encoding; `wanted` is what the recipe makes of a plain one."""
    plain = weight.parts.get("plain")
    if plain is not None and (wanted is None or wanted in PLAIN_ENCODINGS):
        stored = Planned(spec.name, PLAIN_ENCODINGS.get(wanted or "", plain.dtype), spec.shape)
        return [PlannedPart(spec, "plain", PLAIN_OF_DTYPE[stored.dtype], CANONICAL, spec.shape, stored, plain)]
    encoding = weight.encoding if plain is None or wanted is None else wanted
    found = []
    for part in encoding_parts(encoding) or ():
        try:
            shape = part.shape(*spec.shape)
        except InputError as error:
            raise InputError(f"{spec.name}: cannot become {encoding}: {error}. Use a recipe that keeps it.") from None
        layout, stored_shape = stored_form(layout_family, encoding, part.name, shape)
        stored = Planned(part_name(spec.name, part), part.dtype, stored_shape)
        origin = plain or weight.parts[part.name]
        found.append(PlannedPart(spec, part.name, encoding, layout, shape, stored, origin, imported=plain is None))
    return found


def plan_conversion(source: Source, recipe: Recipe) -> ConversionPlan:
    """Raises InputError for a tensor that the recipe cannot encode."""
    encodings = recipe.encodings(source.config)
    groups = [_parts(spec, source.weights[name], encodings[name], recipe.layout) for name, spec in source.specs.items()]
    parts = {part.stored.name: part for group in groups for part in group}
    files = plan_files([[part.stored for part in group] for group in groups], recipe.max_shard_bytes)
    return ConversionPlan(parts, files)
