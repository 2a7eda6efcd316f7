"""`convert`: a source checkpoint to a converted directory, streaming.

Pass 1 reads the source for its facts; pass 2 reads it again band by band, quantises on a few threads, and writes the
files in order. Memory is bounded by the bands in flight; output bytes do not depend on workers or band sizes.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import xxhash

from .. import __version__
from ..checkpoint.container import ITEMSIZE, NUMPY_DTYPE, TensorEntry, blocks
from ..checkpoint.digest import digest_file, digest_json, json_bytes
from ..checkpoint.directory import Checkpoint
from ..checkpoint.encodings.plain import LARGEST, from_float32, to_float32
from ..checkpoint.errors import CheckFailed, InputError
from ..checkpoint.files import file_metadata
from ..checkpoint.layouts import ROWS
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
from ..checkpoint.writer import ShardWriter, noted_digests
from ..model.config import FAMILY
from .draft_head import DraftHead, gathered
from .facts import load_facts, save_facts, source_fingerprint
from .plan import ConversionPlan, PlannedPart, plan_conversion, tensor_records
from .quantisers import QUANTISERS, Quantiser
from .quantisers.encoders import Encoder, choose_encoder
from .quantisers.flushed import Flushed, noted
from .recipe import Recipe
from .repack import repacked
from .source import MTP, Advance, Source, SourceFacts, require_unchanged, row_band, scan

BAND_BYTES = 4 << 20  # source bytes copied or repacked at a time
SPOOL_BYTES = 32 << 20  # block scales of one tensor held in memory while its words are written


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
        for block in blocks(entry, BAND_BYTES):
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


class _Converter:
    def __init__(
        self,
        plan: ConversionPlan,
        facts: SourceFacts,
        encoder: Encoder,
        global_scales: dict[str, np.float32],
        workers: int,
        advance: Advance,
        max_flushed_share: float,
    ) -> None:
        self.max_flushed_share = max_flushed_share
        self.plan, self.facts, self.advance = plan, facts, advance
        self.encoder, self.global_scales, self.workers = encoder, global_scales, workers
        self.in_flight = min(workers + 1, encoder.most_at_once or workers + 1)
        self.flushed: dict[str, Flushed] = {}
        self.block_scales = {p.spec.name: p for p in plan.parts.values() if p.part == "block_scale"}

    def write_file(self, stage: StageDirectory, name: str, pool: ThreadPoolExecutor, identity: str) -> dict[str, str]:
        """Write one file of the plan; the digests of its tensors."""
        tensors = dict(self.plan.files)[name]

        def flushed() -> dict[str, Any]:
            return {"flushed": {t.name: asdict(self.flushed[t.name]) for t in tensors if t.name in self.flushed}}

        def mark(written: int, digest: str) -> None:
            stage.mark(name, written, digest, flushed())

        for earlier in stage.marks(name):
            self.flushed |= noted(earlier.note)
        with (
            stage.create(name, kept=True) as handle,
            SpooledTemporaryFile(SPOOL_BYTES, dir=str(stage.path)) as spool,
        ):
            writer = ShardWriter(handle, tensors, file_metadata(identity), marks=stage.marks(name), mark=mark)
            spooled = ""  # the weight whose block scales are in the spool
            for tensor in tensors:
                part = self.plan.parts[tensor.name]
                if writer.is_resumed and writer.keep(tensor.name):
                    self.advance(part.origin.nbytes if part.part in ("plain", "words") or part.imported else 0)
                elif self.plan.draft is not None and part.origin is self.plan.draft.origin:
                    writer.write(self.plan.draft.ids)
                elif part.part == "plain":
                    self._copy(writer, part)
                elif part.imported:
                    self._repack(writer, part, pool)
                elif part.part in ("row_scale", "global_scale"):
                    writer.write(self._scale(part))
                elif part.part == "words":
                    self._words(writer.write, part, pool, spool)
                    spooled = part.spec.name
                else:
                    if spooled != part.spec.name:  # the words were kept, their scales were not
                        words = next(
                            p for p in self.plan.parts.values() if p.part == "words" and p.spec.name == part.spec.name
                        )
                        self._words(lambda words: None, words, pool, spool)
                    spool.seek(0)
                    while block := spool.read(SPOOL_BYTES):
                        writer.write(block)
            record = writer.close()
        stage.finished(name, record, {"digests": writer.digests} | flushed())
        return writer.digests

    def _blocks(self, entry: TensorEntry, block_bytes: int) -> Iterator[memoryview]:
        digest = xxhash.xxh3_128()
        for block in blocks(entry, block_bytes):
            digest.update(block)
            self.advance(len(block))
            yield block
        require_unchanged(entry, self.facts.tensors[entry.name].digest, digest.hexdigest())

    def _bands(self, part: PlannedPart, band_bytes: int) -> Iterator[np.ndarray]:
        """The source's words that a part is made of, [rows, words], in bands of whole tile rows."""
        entry = part.origin
        whole = (
            np.frombuffer(block, NUMPY_DTYPE[entry.dtype]).reshape(-1, entry.nbytes // ITEMSIZE[entry.dtype] // rows)
            for rows in (entry.shape[0],)
            for block in self._blocks(entry, row_band(entry, band_bytes, ROWS))
        )
        return whole if part.gather is None else gathered(whole, part.gather)

    def _copy(self, writer: ShardWriter, part: PlannedPart) -> None:
        dtype = part.origin.dtype
        for block in self._blocks(part.origin, BAND_BYTES) if part.gather is None else self._bands(part, BAND_BYTES):
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
        quantiser = QUANTISERS[self.encoder.quantiser]
        amax = self.facts.tensors[part.origin.name].row_amax
        return quantiser.row_scales(amax if part.gather is None else amax[part.gather], part.origin.dtype)

    def _repack(self, writer: ShardWriter, part: PlannedPart, pool: ThreadPoolExecutor) -> None:
        pending: deque[Future[np.ndarray]] = deque()
        whole = self._blocks(part.origin, row_band(part.origin, BAND_BYTES, ROWS))
        for block in whole if part.gather is None else (b.tobytes() for b in self._bands(part, BAND_BYTES)):
            pending.append(pool.submit(repacked, part, bytes(block)))
            if len(pending) > self.workers + 1:
                writer.write(pending.popleft().result())
        while pending:
            writer.write(pending.popleft().result())

    def _words(
        self, write: Callable[[np.ndarray], None], part: PlannedPart, pool: ThreadPoolExecutor, spool: Any
    ) -> None:
        """Give the words of a part to `write`, and put their block scales into `spool`."""
        spool.seek(0)
        spool.truncate()
        entry = part.origin
        scale = self._scale(part)
        block_scale = self.block_scales.get(part.spec.name)
        pending: deque[Future[tuple[np.ndarray, np.ndarray | None, int]]] = deque()
        nonzero = 0

        def take() -> None:
            nonlocal nonzero
            words, scales, count = pending.popleft().result()
            nonzero += count
            write(words)
            if scales is not None:
                spool.write(np.ascontiguousarray(scales).data)

        def work(rows: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray | None, int]:
            scales: np.ndarray | None = None
            if block_scale is None:
                words = self.encoder.fp8(rows, entry.dtype, scale[first : first + len(rows)], part.layout)
            else:
                words, scales = self.encoder.nvfp4(
                    rows, entry.dtype, np.float32(scale), part.layout, block_scale.layout
                )
            return words, scales, self.encoder.nonzero(words, part.encoding)

        first = 0
        for band in self._bands(part, self.encoder.band_bytes):
            rows = band.copy()
            pending.append(pool.submit(work, rows, first))
            first += len(rows)
            if len(pending) > self.in_flight:
                take()
        while pending:
            take()
        if part.gather is None:  # a draft head's rows are counted in the head
            there = self.facts.tensors[entry.name].nonzero
            self.flushed[part.spec.name] = Flushed(part.encoding, there, there - nonzero)
            self._require_kept(part)

    def _require_kept(self, part: PlannedPart) -> None:
        """Raises CheckFailed if too many values became zero: the encoding does not suit the tensor."""
        found = self.flushed[part.spec.name]
        if found.share > self.max_flushed_share:
            raise CheckFailed(
                f"{part.origin.path}: tensor {part.origin.name!r}: {found.lost:,} of {found.nonzero:,} non-zero values "
                f"({found.share:.1%}) became zero in {part.encoding}; the recipe's max_flushed_share is "
                f"{self.max_flushed_share:.0%}. Give the tensor another encoding (a rule that names it, `keep`), or raise "
                "the limit; then remove the unfinished directory and convert again."
            )


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
        converter = _Converter(plan, facts, encoder, global_scales, workers, advance, recipe.max_flushed_share)
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
