"""`convert`: a source checkpoint to a converted directory, streaming.

Pass 1 reads the source for its facts; pass 2 reads it again band by band, quantises on a few threads, and writes the
files in order. Memory is bounded by the bands in flight; output bytes do not depend on workers or band sizes.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import xxhash

from .. import __version__
from ..checkpoint.container import NUMPY_DTYPE, TensorEntry, blocks
from ..checkpoint.digest import digest_file, digest_json, json_bytes
from ..checkpoint.directory import Checkpoint
from ..checkpoint.encodings import fp8, nvfp4
from ..checkpoint.encodings.plain import to_float32
from ..checkpoint.errors import InputError
from ..checkpoint.files import file_metadata
from ..checkpoint.layouts import ROWS, layout_named
from ..checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    SourceRecord,
    has_manifest,
    read_manifest,
)
from ..checkpoint.sources import HF_QUANT_CONFIG
from ..checkpoint.stage import StageDirectory, disk_errors, recheck_finished, require_space
from ..checkpoint.writer import ShardWriter
from ..model.config import FAMILY
from .plan import ConversionPlan, PlannedPart, plan_conversion, tensor_records
from .recipe import Recipe
from .repack import repacked
from .source import MTP, Advance, Source, SourceFacts, require_unchanged, row_band, scan

BAND_BYTES = 4 << 20  # source bytes quantised at a time by one thread; float32 temporaries are a few times larger
SPOOL_BYTES = 32 << 20  # block scales of one tensor held in memory while its words are written


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did: the manifest, sizes in bytes, files that an interrupted run had already finished."""

    manifest: Manifest
    source_bytes: int
    converted_bytes: int
    resumed: list[str]
    already_done: bool
    notices: list[str]


def conversion_id(source: Source, recipe: Recipe, facts: SourceFacts, side: dict[str, str]) -> str:
    """Digest of exactly what decides the output bytes: input bytes, recipe, format version."""
    tensors = {
        name: [entry.dtype, list(entry.shape), facts.tensors[name].digest] for name, entry in source.entries.items()
    }
    return digest_json(
        {
            "format_version": FORMAT_VERSION,
            "family": FAMILY,
            "recipe": recipe.resolved(),
            "tensors": tensors,
            "side_files": side,
        }
    )


def _require_apart(source: Path, target: Path) -> None:
    inside, outside = source.resolve(), target.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise InputError(
            f"{target}: lies in, or holds, the source {source}. Choose another place; sources stay untouched."
        )


def _scale(part: PlannedPart, facts: SourceFacts) -> np.ndarray:
    row_amax = facts.tensors[part.origin.name].row_amax
    if part.encoding == "nvfp4":
        return np.array(nvfp4.multiplier(float(row_amax.max(initial=0))), np.float32)
    return fp8.row_scales(row_amax)


def _laid_out(words: np.ndarray, layout: str) -> np.ndarray:
    tile = layout_named(layout)
    return words if tile is None else tile.apply(words)


def _quantise(
    weight: np.ndarray, scale: np.ndarray, words: PlannedPart, block_scale: PlannedPart | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Stored bytes (layout applied) of a band of whole tile rows: words, and block scales where the encoding has them."""
    if block_scale is None:
        return _laid_out(fp8.encode_rows(weight, scale), words.layout), None
    codes, scales = nvfp4.encode(weight, np.float32(scale))
    return _laid_out(codes, words.layout), _laid_out(scales, block_scale.layout)


class _Converter:
    def __init__(
        self, source: Source, plan: ConversionPlan, facts: SourceFacts, workers: int, advance: Advance
    ) -> None:
        self.source, self.plan, self.facts, self.advance = source, plan, facts, advance
        self.workers = workers
        self.block_scales = {p.spec.name: p for p in plan.parts.values() if p.part == "block_scale"}

    def write_file(self, stage: StageDirectory, name: str, pool: ThreadPoolExecutor, identity: str) -> dict[str, str]:
        """Write one file of the plan; the digests of its tensors."""
        tensors = dict(self.plan.files)[name]
        with stage.create(name) as handle, SpooledTemporaryFile(SPOOL_BYTES, dir=str(stage.path)) as spool:
            writer = ShardWriter(handle, tensors, file_metadata(identity))
            for tensor in tensors:
                part = self.plan.parts[tensor.name]
                if part.part == "plain":
                    self._copy(writer, part)
                elif part.imported:
                    self._repack(writer, part, pool)
                elif part.part in ("row_scale", "global_scale"):
                    writer.write(_scale(part, self.facts))
                elif part.part == "words":
                    spool.seek(0)
                    spool.truncate()
                    self._words(writer, part, pool, spool)
                else:
                    spool.seek(0)
                    while block := spool.read(SPOOL_BYTES):
                        writer.write(block)
            record = writer.close()
        stage.finished(name, record, {"digests": writer.digests})
        return writer.digests

    def _blocks(self, entry: TensorEntry, block_bytes: int) -> Iterator[memoryview]:
        digest = xxhash.xxh3_128()
        for block in blocks(entry, block_bytes):
            digest.update(block)
            self.advance(len(block))
            yield block
        require_unchanged(entry, self.facts.tensors[entry.name].digest, digest.hexdigest())

    def _copy(self, writer: ShardWriter, part: PlannedPart) -> None:
        for block in self._blocks(part.origin, BAND_BYTES):
            writer.write(block)

    def _repack(self, writer: ShardWriter, part: PlannedPart, pool: ThreadPoolExecutor) -> None:
        pending: deque[Future[np.ndarray]] = deque()
        for block in self._blocks(part.origin, row_band(part.origin, BAND_BYTES, ROWS)):
            pending.append(pool.submit(repacked, part, bytes(block)))
            if len(pending) > self.workers + 1:
                writer.write(pending.popleft().result())
        while pending:
            writer.write(pending.popleft().result())

    def _words(self, writer: ShardWriter, part: PlannedPart, pool: ThreadPoolExecutor, spool: Any) -> None:
        entry = part.origin
        columns = entry.shape[1]
        scale = _scale(part, self.facts)
        block_scale = self.block_scales.get(part.spec.name)
        pending: deque[Future[tuple[np.ndarray, np.ndarray | None]]] = deque()

        def take() -> None:
            words, scales = pending.popleft().result()
            writer.write(words)
            if scales is not None:
                spool.write(np.ascontiguousarray(scales).data)

        def work(raw: bytes, first: int) -> tuple[np.ndarray, np.ndarray | None]:
            weight = to_float32(np.frombuffer(raw, NUMPY_DTYPE[entry.dtype]).reshape(-1, columns), entry.dtype)
            mine = scale[first : first + len(weight)] if block_scale is None else scale
            return _quantise(weight, mine, part, block_scale)

        first = 0
        for block in self._blocks(entry, row_band(entry, BAND_BYTES, ROWS)):
            pending.append(pool.submit(work, bytes(block), first))
            first += len(block) // (entry.nbytes // entry.shape[0])
            if len(pending) > self.workers + 1:
                take()
        while pending:
            take()


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
) -> ConversionReport:
    """Convert `source_path` into `target`. `advance` is called with source bytes as they are read (twice over).

    `mtp_from`: another source of the same model, for the MTP layer that this one lacks.

    Raises InputError for bad input, CheckFailed if the source changes underneath, EnvironmentFault for a full disk.
    """
    source = Source.open(source_path, mtp_from)
    for place in filter(None, (source_path, mtp_from)):
        _require_apart(place, target)
    plan = plan_conversion(source, recipe)
    if not target.exists():
        require_space(target, plan.nbytes)
    facts = scan(source, workers, advance)
    identity = conversion_id(source, recipe, facts, _side_files(source))
    if (done := _already_done(target, identity, source)) is not None:
        return done
    with StageDirectory(target, f"conversion {identity}") as stage, ThreadPoolExecutor(workers) as pool:
        converter = _Converter(source, plan, facts, workers, advance)
        digests: dict[str, str] = {}
        with disk_errors(target):
            for name, tensors in plan.files:
                note = stage.resume(name)
                if note is not None and set(note.get("digests", ())) == {tensor.name for tensor in tensors}:
                    digests |= note["digests"]
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
        return ConversionReport(stage.seal(manifest), source.nbytes, plan.nbytes, stage.resumed, False, source.notices)
