"""The conversion id and what else the manifest says of its source, computed anew from the source."""

from typing import Any

from ..checkpoint.container import blocks
from ..checkpoint.digest import digest_blocks, digest_file, digest_json
from ..checkpoint.directory import Checkpoint
from ..checkpoint.download_record import read_record
from ..checkpoint.manifest import DRAFT_HEAD, Manifest, TensorRecord
from ..model.inventory import DRAFT_IDS
from .report import Proof, Report

DECIDES_NOTHING = "max_flushed_share"  # a limit that stops a conversion, and changes no byte of one that went through


def prove_identity(source: Checkpoint, manifest: Manifest, counts: dict[str, int], report: Report) -> None:
    """The id is the digest of format, family, recipe, source tensors and side files (docs/checkpoint.md, `conversion_id`).

    So the recipe in the manifest is the one that was used, whatever was edited and signed anew. `counts`: weights of
    each part of the model. That the tensors' digests are the source's is another proof.
    """
    proof = report.begin("source -> converted: conversion id")
    _check_shards(source, manifest, proof)
    _check_provenance(source, manifest, counts, proof)
    named = {name: r for name, r in manifest.tensors.items() if r.weight not in (DRAFT_HEAD, DRAFT_IDS)}
    tensors = {ref.name: [ref.dtype, ref.shape, ref.digest] for r in named.values() for ref in r.sources}
    for name in manifest.source.dropped:
        if (entry := source.tensors.get(name)) is not None:
            tensors[name] = [entry.dtype, list(entry.shape), digest_blocks(blocks(entry))]
    parts: dict[str, Any] = {
        "format_version": manifest.format_version,
        "family": manifest.family,
        "recipe": {key: value for key, value in manifest.recipe.items() if key != DECIDES_NOTHING},
        "tensors": tensors,
        "side_files": {name: digest_file(source.path / name) for name in source.side_files},
    }
    if (ids := manifest.tensors.get(DRAFT_IDS)) is not None:
        parts["draft_head"] = _whole_digest(ids)
    found = digest_json(parts)
    if found != manifest.conversion_id:
        proof.fail("is not that of this source, these side files and this recipe", found=manifest.conversion_id,
                   expected=found)  # fmt: skip
    proof.detail = f"{found}, recipe {manifest.recipe.get('name')}, from {len(tensors)} tensors"


def _whole_digest(record: TensorRecord) -> str:
    return record.digest if record.split is None else record.split.whole.digest


def _check_shards(source: Checkpoint, manifest: Manifest, proof: Proof) -> None:
    """The manifest lists the source's shards, by name and size."""
    here = {name: header.size for name, header in source.headers.items()}
    said = {name: record.size for name, record in manifest.source.files.items()}
    for name in sorted(here.keys() | said.keys()):
        if here.get(name) != said.get(name):
            proof.fail(f"shard {name}: size in bytes", file=str(source.path / name), found=str(here.get(name)),
                       expected=str(said.get(name)))  # fmt: skip


def _check_provenance(source: Checkpoint, manifest: Manifest, counts: dict[str, int], proof: Proof) -> None:
    """Repository and commit are those of the download, where both are known; the weights of each part are counted."""
    record = read_record(source.path)
    wanted: dict[str, Any] = {"weights": counts}
    if record is not None and "commit" in manifest.provenance:
        wanted |= {"repo": record.repo, "commit": record.commit}
    for key, value in wanted.items():
        if (found := manifest.provenance.get(key)) != value:
            proof.fail(f"provenance: {key}", found=str(found), expected=str(value))
