"""`convert`: a source checkpoint to a converted directory, streaming.

Pass 1 reads the source for its facts; pass 2 reads it again band by band, quantises on a few threads, and writes the
files in order. Memory is bounded by the bands in flight; output bytes do not depend on workers or band sizes.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .. import __version__
from ..checkpoint.container import NUMPY_DTYPE, blocks
from ..checkpoint.digest import digest_file, digest_json, json_bytes
from ..checkpoint.directory import Checkpoint
from ..checkpoint.encodings.plain import LARGEST, to_float32
from ..checkpoint.errors import InputError
from ..checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    SourceRecord,
    has_manifest,
    read_manifest,
)
from ..checkpoint.reopen import Sound, reopen
from ..checkpoint.sources import HF_QUANT_CONFIG
from ..checkpoint.stage import StageDirectory, disk_errors, recheck_finished, require_space
from ..checkpoint.writer import noted_digests
from ..model.config import FAMILY
from .converter import Converter
from .draft_head import DraftHead
from .facts import load_facts, save_facts, source_fingerprint
from .plan import ConversionPlan, plan_conversion, tensor_records
from .quantisers import QUANTISERS, Quantiser
from .quantisers.encoders import choose_encoder
from .quantisers.flushed import Flushed, noted
from .recipe import Recipe
from .source import MTP, Advance, Source, SourceFacts, scan

CAST_BYTES = 4 << 20  # source bytes looked at at a time, where values may not fit a cast


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did: the manifest, sizes in bytes, files that an interrupted run had already finished.

    `flushed`: weight -> how many of its values became zero, for what was quantised.
    """

    manifest: Manifest
    source_bytes: int
    converted_bytes: int
    resumed: list[str]
    already_done: bool
    notices: list[str]
    arithmetic: str = ""
    flushed: dict[str, Flushed] = field(default_factory=dict)


def conversion_id(
    source: Source, recipe: Recipe, facts: SourceFacts, side: dict[str, str], draft: DraftHead | None = None
) -> str:
    """Digest of exactly what decides the output bytes: input bytes, recipe, format version, ids of a draft head."""
    tensors = {
        name: [entry.dtype, list(entry.shape), facts.tensors[name].digest] for name, entry in source.entries.items()
    }
    return digest_json(
        {
            "format_version": FORMAT_VERSION,
            "family": FAMILY,
            "recipe": recipe.deciding(),
            "tensors": tensors,
            "side_files": side,
        }
        | ({} if draft is None else {"draft_head": draft.digest})
    )


def _require_apart(source: Path, target: Path) -> None:
    inside, outside = source.resolve(), target.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise InputError(
            f"{target}: lies in, or holds, the source {source}. Choose another place; sources stay untouched."
        )


def _require_castable(plan: ConversionPlan, facts: SourceFacts) -> None:
    """Raises InputError naming tensor, index and value of the first that a narrower dtype cannot hold."""
    for part in plan.parts.values():
        largest = LARGEST.get(part.stored.dtype) if part.part == "plain" else None
        if largest is None or facts.tensors[part.origin.name].row_amax.max(initial=0) <= largest:
            continue
        entry = part.origin
        done = 0
        for block in blocks(entry, CAST_BYTES):
            values = to_float32(np.frombuffer(block, NUMPY_DTYPE[entry.dtype]), entry.dtype)
            beyond = np.flatnonzero(np.abs(values) > largest)
            if len(beyond):
                index = [int(n) for n in np.unravel_index(done + beyond[0], entry.shape)]
                raise InputError(
                    f"{entry.path}: tensor {entry.name!r} holds {values[beyond[0]]:.9g} at index {index}, beyond the "
                    f"largest {part.encoding} value {largest:.9g}. Use a recipe that keeps this tensor."
                )
            done += len(values)


def _global_scales(plan: ConversionPlan, facts: SourceFacts, quantiser: Quantiser) -> dict[str, np.float32]:
    """weight -> the nvfp4 global scale, from its largest magnitude and those of the partners that share it.

    Raises InputError naming the weight that the quantiser has no scale for.
    """
    ours = {part.spec.name: part for part in plan.parts.values() if part.part == "global_scale" and not part.imported}
    found: dict[str, np.float32] = {}
    for name, part in ours.items():
        role = part.spec.role
        partners = [name.replace(role, other) for other in quantiser.partner_roles(role)]
        sharing = [facts.tensors[ours[other].origin.name] for other in partners if other in ours]
        amax = max(float(fact.row_amax.max(initial=0)) for fact in sharing)
        try:
            found[name] = quantiser.global_scale(amax, part.origin.dtype)
        except InputError as error:
            raise InputError(f"{part.origin.path}: {name}: {error}") from None
    return found


def _side_files(source: Source) -> dict[str, str]:
    """Digest of every side file, all of which decide output bytes."""
    return {name: digest_file(source.checkpoint.path / name) for name in source.checkpoint.side_files}


def _copied(source: Source) -> list[str]:
    """Side files that go over byte for byte.

    hf_quant_config.json would lie about the converted weights and is kept inside the manifest instead; config.json is
    written anew where it says something of quantisation, or of an MTP layer that is not there.
    """
    rewritten = "config.json" if source.converted_config() != source.checkpoint.config else None
    return [name for name in source.checkpoint.side_files if name not in (HF_QUANT_CONFIG, rewritten)]


def _source_record(source: Source, facts: SourceFacts) -> SourceRecord:
    return SourceRecord(
        quantization_config=source.form.config,
        hf_quant_config=source.form.hf_config,
        files=facts.files,
        dropped=dict(sorted(source.dropped.items())),
        absent=source.absent,
        second=[MTP] if source.second is not None else [],
    )


def _already_done(target: Path, identity: str, source: Source) -> ConversionReport | None:
    if not has_manifest(target):
        return None
    manifest = read_manifest(target)
    if manifest.conversion_id != identity or manifest.stage != "converted":
        raise InputError(
            f"{target}: already holds {manifest.stage} directory {manifest.conversion_id}; this run would make "
            f"{identity}. Choose another directory."
        )
    recheck_finished(target, manifest)
    size = sum(entry.nbytes for entry in Checkpoint.open(target).tensors.values())
    return ConversionReport(manifest, source.nbytes, size, [], True, source.notices)


def convert(
    source_path: Path,
    target: Path,
    recipe: Recipe,
    workers: int,
    advance: Advance,
    mtp_from: Path | None = None,
    arithmetic: str = "auto",
    device: str = "auto",
    keep: Sound | None = None,
) -> ConversionReport:
    """Convert `source_path` into `target`. `advance` is called with source bytes as they are read (twice over).

    `mtp_from`: another source of the same model, for the MTP layer that this one lacks.
    `arithmetic`: `auto`, `compiled` or `numpy`, and `device`: `auto`, `cpu` or `cuda`, give the same bytes at another
    speed.
    `keep`: repair a finished `target`: what is sound of it is kept, the rest is written again.

    Raises InputError for bad input, CheckFailed if the source changes underneath, EnvironmentFault for a full disk.
    """
    source = Source.open(source_path, mtp_from)
    for place in filter(None, (source_path, mtp_from)):
        _require_apart(place, target)
    plan = plan_conversion(source, recipe)
    with disk_errors(target):
        there = sum(p.stat().st_size for p in target.iterdir() if p.is_file()) if target.is_dir() else 0
        require_space(target, max(0, plan.nbytes - there))
    words = [part for part in plan.parts.values() if part.part == "words" and not part.imported]
    with ThreadPoolExecutor(1) as aside:  # numba takes a second to load, in which the source can be read
        nbytes = sum(part.origin.nbytes for part in words)
        loading = aside.submit(choose_encoder, recipe.quantiser, arithmetic, device, nbytes)
        made_from = source_fingerprint(source)
        kept = load_facts(target, source, made_from)
        facts = kept or scan(source, workers, advance)
    if kept is not None:
        advance(source.nbytes)
    encoder = loading.result()
    _require_castable(plan, facts)
    global_scales = _global_scales(plan, facts, QUANTISERS[recipe.quantiser])
    identity = conversion_id(source, recipe, facts, _side_files(source), plan.draft)
    run_name = f"conversion {identity}"
    if keep is not None:
        reopen(target, run_name, identity, keep, {"recipe": recipe.resolved()})
    if (done := _already_done(target, identity, source)) is not None:
        return done
    with StageDirectory(target, run_name) as stage, ThreadPoolExecutor(workers) as pool:
        converter = Converter(plan, facts, encoder, global_scales, workers, advance, recipe.max_flushed_share)
        digests: dict[str, str] = {}
        with disk_errors(target):
            if kept is None:
                save_facts(target, facts, made_from)
            for name, tensors in plan.files:
                note = stage.resume(name)
                if note is not None and (kept_digests := noted_digests(note, tensors)) is not None:
                    digests |= kept_digests
                    converter.flushed |= noted(note)
                    origins = {part.origin.name: part.origin for part in (plan.parts[t.name] for t in tensors)}
                    advance(sum(entry.nbytes for entry in origins.values()))
                else:
                    digests |= converter.write_file(stage, name, pool, identity)
            for name in _copied(source):
                stage.copy(source.checkpoint.path / name)
            if (config := source.converted_config()) != source.checkpoint.config:
                stage.put("config.json", json_bytes(config))
            weight_map = {tensor.name: name for name, tensors in plan.files for tensor in tensors}
            stage.put_index(weight_map, plan.nbytes)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            stage="converted",
            family=FAMILY,
            conversion_id=identity,
            recipe=recipe.resolved(),
            tp_size=None,
            tp_rank=None,
            tensors=tensor_records(plan, lambda name: facts.tensors[name].digest, digests.__getitem__),
            files=dict(sorted(stage.files.items())),
            source=_source_record(source, facts),
            provenance={"tool": f"duovolt {__version__}"} | source.provenance(),
        )
        sealed = stage.seal(manifest)
        return ConversionReport(
            sealed,
            source.nbytes,
            plan.nbytes,
            stage.resumed,
            False,
            source.notices,
            str(encoder) if words else "",
            dict(sorted(converter.flushed.items())),
        )
