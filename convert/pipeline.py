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
from ..checkpoint.container import NUMPY_DTYPE
from ..checkpoint.digest import digest_file, digest_json
from ..checkpoint.directory import Checkpoint, read_json
from ..checkpoint.encodings.plain import LARGEST, from_float32, to_float32
from ..checkpoint.errors import InputError
from ..checkpoint.files import file_metadata
from ..checkpoint.layouts import ROWS
from ..checkpoint.manifest import (
    FORMAT_VERSION,
    Manifest,
    SourceRecord,
    has_manifest,
    read_manifest,
)
from ..checkpoint.stage import StageDirectory, disk_errors, recheck_finished, require_space
from ..checkpoint.writer import ShardWriter
from ..model.config import FAMILY
from .plan import ConversionPlan, PlannedPart, plan_conversion, tensor_records
from .quantisers import QUANTISERS, Quantiser, compiled
from .quantisers.bands import BandEncoder
from .recipe import Recipe
from .source import Advance, Source, SourceFacts, require_unchanged, row_band, scan

BAND_BYTES = 4 << 20  # source bytes quantised at a time by one thread; float32 temporaries are a few times larger
SPOOL_BYTES = 32 << 20  # block scales of one tensor held in memory while its words are written
HF_QUANT_CONFIG = "hf_quant_config.json"


@dataclass(frozen=True)
class ConversionReport:
    """What `convert` did: the manifest, sizes in bytes, files that an interrupted run had already finished."""

    manifest: Manifest
    source_bytes: int
    converted_bytes: int
    resumed: list[str]
    already_done: bool
    arithmetic: str = ""


def conversion_id(source: Source, recipe: Recipe, facts: SourceFacts, side: dict[str, str]) -> str:
    """Digest of exactly what decides the output bytes: input bytes, recipe, format version."""
    tensors = {
        name: [entry.dtype, list(entry.shape), facts.tensors[name].digest]
        for name, entry in source.checkpoint.tensors.items()
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


def _require_castable(source: Source, plan: ConversionPlan, facts: SourceFacts) -> None:
    """Raises InputError naming tensor, index and value of the first that a narrower dtype cannot hold."""
    for part in plan.parts.values():
        largest = LARGEST[part.stored.dtype] if part.part == "plain" else None
        if largest is None or facts.tensors[part.spec.name].row_amax.max(initial=0) <= largest:
            continue
        entry = source.checkpoint.tensors[part.spec.name]
        done = 0
        for block in source.checkpoint.blocks(entry.name, BAND_BYTES):
            values = to_float32(np.frombuffer(block, NUMPY_DTYPE[entry.dtype]), entry.dtype)
            beyond = np.flatnonzero(np.abs(values) > largest)
            if len(beyond):
                index = [int(n) for n in np.unravel_index(done + beyond[0], entry.shape)]
                raise InputError(
                    f"{entry.path}: tensor {entry.name!r} holds {values[beyond[0]]:.9g} at index {index}, beyond the "
                    f"largest {part.encoding} value {largest:.9g}. Use a recipe that keeps this tensor."
                )
            done += len(values)


def _global_scales(
    source: Source, plan: ConversionPlan, facts: SourceFacts, quantiser: Quantiser
) -> dict[str, np.float32]:
    """weight -> the nvfp4 global scale, from its largest magnitude and those of the partners that share it.

    Raises InputError naming the weight that the quantiser has no scale for.
    """
    found: dict[str, np.float32] = {}
    for part in plan.parts.values():
        if part.part != "global_scale":
            continue
        name, role = part.spec.name, part.spec.role
        partners = [name.replace(role, other) for other in quantiser.partner_roles(role)]
        sharing = [other for other in partners if other in plan.parts and plan.parts[other].encoding == part.encoding]
        amax = max(float(facts.tensors[other].row_amax.max(initial=0)) for other in sharing)
        try:
            found[name] = quantiser.global_scale(amax, source.checkpoint.tensors[name].dtype)
        except InputError as error:
            raise InputError(f"{source.checkpoint.tensors[name].path}: {name}: {error}") from None
    return found


class _Converter:
    def __init__(
        self,
        source: Source,
        plan: ConversionPlan,
        facts: SourceFacts,
        encoder: BandEncoder,
        global_scales: dict[str, np.float32],
        workers: int,
        advance: Advance,
    ) -> None:
        self.source, self.plan, self.facts, self.advance = source, plan, facts, advance
        self.encoder, self.global_scales, self.workers = encoder, global_scales, workers
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
                elif part.part in ("row_scale", "global_scale"):
                    writer.write(self._scale(part))
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

    def _blocks(self, name: str, block_bytes: int) -> Iterator[memoryview]:
        entry = self.source.checkpoint.tensors[name]
        digest = xxhash.xxh3_128()
        for block in self.source.checkpoint.blocks(name, block_bytes):
            digest.update(block)
            self.advance(len(block))
            yield block
        require_unchanged(entry, self.facts.tensors[name].digest, digest.hexdigest())

    def _copy(self, writer: ShardWriter, part: PlannedPart) -> None:
        dtype = self.source.checkpoint.tensors[part.spec.name].dtype
        for block in self._blocks(part.spec.name, BAND_BYTES):
            if dtype == part.stored.dtype:  # never through arithmetic, which might touch a NaN's payload
                writer.write(block)
            else:
                values = to_float32(np.frombuffer(block, NUMPY_DTYPE[dtype]), dtype)
                writer.write(from_float32(values, part.stored.dtype))

    def _scale(self, part: PlannedPart) -> np.ndarray:
        """Row scales float32 [rows], or the global scale float32 []."""
        name = part.spec.name
        if name in self.global_scales:
            return np.array(self.global_scales[name], np.float32)
        dtype = self.source.checkpoint.tensors[name].dtype
        return QUANTISERS[self.encoder.quantiser].row_scales(self.facts.tensors[name].row_amax, dtype)

    def _words(self, writer: ShardWriter, part: PlannedPart, pool: ThreadPoolExecutor, spool: Any) -> None:
        entry = self.source.checkpoint.tensors[part.spec.name]
        columns = entry.shape[1]
        scale = self._scale(part)
        block_scale = self.block_scales.get(part.spec.name)
        pending: deque[Future[tuple[np.ndarray, np.ndarray | None]]] = deque()

        def take() -> None:
            words, scales = pending.popleft().result()
            writer.write(words)
            if scales is not None:
                spool.write(np.ascontiguousarray(scales).data)

        def work(rows: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray | None]:
            if block_scale is None:
                return self.encoder.fp8(rows, entry.dtype, scale[first : first + len(rows)], part.layout), None
            return self.encoder.nvfp4(rows, entry.dtype, np.float32(scale), part.layout, block_scale.layout)

        first = 0
        for block in self._blocks(part.spec.name, row_band(entry, BAND_BYTES, ROWS)):
            rows = np.frombuffer(block, NUMPY_DTYPE[entry.dtype]).reshape(-1, columns).copy()
            pending.append(pool.submit(work, rows, first))
            first += len(rows)
            if len(pending) > self.workers + 1:
                take()
        while pending:
            take()


def _side_files(source: Source) -> dict[str, str]:
    """Digest of every side file, all of which decide output bytes."""
    return {name: digest_file(source.checkpoint.path / name) for name in _copied(source)}


def _copied(source: Source) -> list[str]:
    # A plain source's config.json has no quantisation to strip, and goes over byte for byte like the rest;
    # hf_quant_config.json would lie about the converted weights and is kept inside the manifest instead.
    return [name for name in source.checkpoint.side_files if name != HF_QUANT_CONFIG]


def _source_record(source: Source, facts: SourceFacts) -> SourceRecord:
    hf_path = source.checkpoint.path / HF_QUANT_CONFIG
    return SourceRecord(
        quantization_config=source.quantization_config,
        hf_quant_config=read_json(hf_path) if hf_path.exists() else None,
        files=facts.files,
    )


def _already_done(target: Path, identity: str, source_bytes: int) -> ConversionReport | None:
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
    return ConversionReport(manifest, source_bytes, size, [], True)


def convert(
    source_path: Path, target: Path, recipe: Recipe, workers: int, advance: Advance, arithmetic: str = "auto"
) -> ConversionReport:
    """Convert `source_path` into `target`. `advance` is called with source bytes as they are read (twice over).

    `arithmetic` is `auto`, `compiled` or `numpy`: the same bytes at another speed.
    Raises InputError for bad input, CheckFailed if the source changes underneath, EnvironmentFault for a full disk.
    """
    source = Source.open(source_path)
    _require_apart(source_path, target)
    plan = plan_conversion(source, recipe)
    source_bytes = sum(entry.nbytes for entry in source.checkpoint.tensors.values())
    if not target.exists():
        require_space(target, plan.nbytes)
    quantised = {part.spec.name for part in plan.parts.values() if part.part == "words"}
    loops = compiled.choose(arithmetic, sum(source.checkpoint.tensors[name].nbytes for name in quantised))
    facts = scan(source, workers, advance)
    _require_castable(source, plan, facts)
    global_scales = _global_scales(source, plan, facts, QUANTISERS[recipe.quantiser])
    identity = conversion_id(source, recipe, facts, _side_files(source))
    if (done := _already_done(target, identity, source_bytes)) is not None:
        return done
    with StageDirectory(target, f"conversion {identity}") as stage, ThreadPoolExecutor(workers) as pool:
        encoder = BandEncoder(recipe.quantiser, loops)
        converter = _Converter(source, plan, facts, encoder, global_scales, workers, advance)
        digests: dict[str, str] = {}
        with disk_errors(target):
            for name, tensors in plan.files:
                note = stage.resume(name)
                if note is not None and set(note.get("digests", ())) == {tensor.name for tensor in tensors}:
                    digests |= note["digests"]
                    advance(
                        sum(
                            source.checkpoint.tensors[n].nbytes for n in {plan.parts[t.name].spec.name for t in tensors}
                        )
                    )
                else:
                    digests |= converter.write_file(stage, name, pool, identity)
            for name in _copied(source):
                stage.copy(source.checkpoint.path / name)
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
            tensors=tensor_records(source, plan, lambda name: facts.tensors[name].digest, digests.__getitem__),
            files=dict(sorted(stage.files.items())),
            source=_source_record(source, facts),
            provenance={"tool": f"duovolt {__version__}"} | source.provenance(),
        )
        return ConversionReport(stage.seal(manifest), source_bytes, plan.nbytes, stage.resumed, False, str(loops))
