"""The second pass of a conversion: the files, in order, each tensor quantised band by band on a few threads."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import xxhash

from ..checkpoint.container import ITEMSIZE, NUMPY_DTYPE, TensorEntry, blocks
from ..checkpoint.encodings.plain import from_float32, to_float32
from ..checkpoint.errors import CheckFailed
from ..checkpoint.files import file_metadata
from ..checkpoint.layouts import ROWS
from ..checkpoint.stage import StageDirectory
from ..checkpoint.writer import ShardWriter
from .draft_head import gathered
from .plan import ConversionPlan, PlannedPart
from .quantisers import QUANTISERS
from .quantisers.encoders import Encoder
from .quantisers.flushed import Flushed, noted
from .repack import repacked
from .source import Advance, SourceFacts, require_unchanged, row_band

BAND_BYTES = 4 << 20  # source bytes copied or repacked at a time
SPOOL_BYTES = 32 << 20  # block scales of one tensor held in memory while its words are written


class Converter:
    """Writes the files of a conversion, one after another; what became zero is counted in `flushed`."""

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
