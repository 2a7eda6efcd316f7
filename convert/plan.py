"""The plan of a conversion: every tensor's encoding, layout, stored shape and file, from headers and recipe alone."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..checkpoint.container import TensorEntry
from ..checkpoint.encodings import (
    PLAIN_ENCODINGS,
    PLAIN_OF_DTYPE,
    PartName,
    encoding_parts,
    part_name,
    part_of,
    tile_of,
    tiled,
)
from ..checkpoint.errors import InputError
from ..checkpoint.files import plan_files
from ..checkpoint.layouts import CANONICAL, stored_form
from ..checkpoint.manifest import DRAFT_HEAD, SourceRef, TensorRecord
from ..checkpoint.sources.base import SourceWeight
from ..checkpoint.writer import Planned
from ..model.inventory import DRAFT_IDS, TensorSpec, head_of, inventory
from .draft_head import DraftHead, choose
from .recipe import Recipe
from .source import Source


@dataclass(frozen=True)
class PlannedPart:
    """One tensor to be stored: which part of which weight, in which layout, made from which source tensor.

    `imported`: the source has this very part, and only its layout (and the width of its scales) changes.
    `gather`: the rows of `origin`, ascending, that the part is made of; None: all of them.
    """

    spec: TensorSpec
    part: PartName
    encoding: str
    layout: str
    canonical_shape: tuple[int, ...]
    stored: Planned
    origin: TensorEntry
    imported: bool = False
    gather: np.ndarray | None = None


@dataclass(frozen=True)
class ConversionPlan:
    """`parts` by stored name; `files` as (name, tensors in storage order)."""

    parts: dict[str, PlannedPart]
    files: list[tuple[str, list[Planned]]]
    draft: DraftHead | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the converted directory."""
        return sum(part.stored.nbytes for part in self.parts.values())


Groups = list[list[PlannedPart]]


def tensor_records(
    plan: ConversionPlan, source_digest: Callable[[str], str], stored_digest: Callable[[str], str]
) -> dict[str, TensorRecord]:
    """The manifest's records of a plan, given the digests of source and stored tensors by name."""
    file_of = {tensor.name: name for name, tensors in plan.files for tensor in tensors}
    records = {}
    for name, part in plan.parts.items():
        entry = part.origin
        ids = plan.draft is not None and entry is plan.draft.origin
        digest = plan.draft.digest if plan.draft is not None and ids else source_digest(entry.name)
        origin = SourceRef(name=entry.name, dtype=entry.dtype, shape=list(entry.shape), digest=digest)
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


def _draft_parts(specs: dict[str, TensorSpec], head: list[PlannedPart], draft: DraftHead, family: str) -> Groups:
    """The draft head: the head's own parts at the chosen rows, so that no word is made twice in two ways.

    A scale of a tile of rows is repeated for each row of it: tiles of one row.
    """
    spec, found = specs[DRAFT_HEAD], []
    for part in head:
        described = part_of(part.encoding, part.part)
        if described is None:
            stored = Planned(spec.name, part.stored.dtype, spec.shape)
            found.append(PlannedPart(spec, "plain", part.encoding, CANONICAL, spec.shape, stored, part.origin,
                                     gather=draft.ids))  # fmt: skip
            continue
        tile, unit = tile_of(part.encoding), described.unit[0]
        encoding = part.encoding if tile is None else tiled(1, tile[1])
        here = part_of(encoding, part.part)
        assert here is not None  # the same parts, whatever the tile
        shape = here.shape(*spec.shape)
        layout, stored_shape = stored_form(family, encoding, part.part, shape)
        stored = Planned(part_name(spec.name, here), here.dtype, stored_shape)
        gather = None if unit is None else draft.ids // unit
        found.append(PlannedPart(spec, part.part, encoding, layout, shape, stored, part.origin, part.imported, gather))
    ids = specs[DRAFT_IDS]
    stored = Planned(ids.name, "I32", ids.shape)
    return [found, [PlannedPart(ids, "plain", "int32", CANONICAL, ids.shape, stored, draft.origin)]]


def plan_conversion(source: Source, recipe: Recipe) -> ConversionPlan:
    """Raises InputError for a tensor that the recipe cannot encode, or a draft head that cannot be chosen."""
    encodings = recipe.encodings(source.config)
    groups = [_parts(spec, source.weights[name], encodings[name], recipe.layout) for name, spec in source.specs.items()]
    if (draft := choose(source, recipe)) is not None:
        head = next(group for group in groups if group[0].spec.name == head_of(source.config))
        specs = inventory(source.config.with_draft_head(recipe.draft_head))
        groups += _draft_parts(specs, head, draft, recipe.layout)
    parts = {part.stored.name: part for group in groups for part in group}
    files = plan_files([[part.stored for part in group] for group in groups], recipe.max_shard_bytes)
    return ConversionPlan(parts, files, draft)
