"""One pass over a directory's bytes: digests of files and tensors, and values that must not occur."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from ..checkpoint.container import NUMPY_DTYPE, Header, TensorEntry, blocks
from ..checkpoint.digest import file_blocks
from ..checkpoint.errors import DuovoltError
from ..checkpoint.manifest import TensorRecord
from .report import Proof, Report
from .stage import StageView
from .words import canonical_index, hex_word

Advance = Callable[[int], None]

E4M3_NAN = 0x7F  # without the sign
FLOAT_SCALES = ("row_scale", "tensor_scale", "tile_scale", "global_scale")  # stored as F32


def _forbidden(record: TensorRecord, words: np.ndarray) -> np.ndarray:
    """Which words of a block may not be there, as booleans."""
    if record.part == "block_scale" or (record.part == "words" and record.dtype == "F8_E4M3"):
        return (words & 0x7F) == E4M3_NAN
    if record.part in FLOAT_SCALES:
        values = words.view(np.float32)
        return ~(np.isfinite(values) & (values > 0))
    if record.part == "plain" and record.dtype == "BF16":
        return (words & 0x7F80) == 0x7F80
    if record.part == "plain" and record.dtype in ("F16", "F32"):
        return ~np.isfinite(words)
    return np.zeros(0, bool)


def _is_the_sources(record: TensorRecord) -> bool:
    """True if the whole tensor's bytes are the source's, by digest: then what is not finite was not finite there."""
    digest = record.digest if record.split is None else record.split.whole.digest
    return len(record.sources) == 1 and record.sources[0].digest == digest


class _TensorScan:
    """Digest and first forbidden word of one tensor, block by block."""

    def __init__(self, entry: TensorEntry, record: TensorRecord | None) -> None:
        self.entry, self.record = entry, record
        self.digest = xxhash.xxh3_128()
        self.forbidden: tuple[int, str] | None = None
        self._done = 0

    def feed(self, block: memoryview) -> None:
        self.digest.update(block)
        if self.record is None or self.record.dtype != self.entry.dtype:
            return
        words = np.frombuffer(block, NUMPY_DTYPE[self.entry.dtype])
        if self.forbidden is None and (bad := _forbidden(self.record, words)).any():
            at = int(np.argmax(bad))
            self.forbidden = (self._done + at, hex_word(words[at]))
        self._done += len(words)


def _scan_shard(header: Header, view: StageView, advance: Advance) -> tuple[str, list[_TensorScan]]:
    """Digest of the file, and the scans of its tensors, from reading it once from front to back."""
    whole = xxhash.xxh3_128()
    start = min((entry.begin for entry in header.tensors.values()), default=header.size)
    with header.path.open("rb") as handle:
        whole.update(handle.read(start))
    scans = []
    for entry in header.tensors.values():  # in the order of their data
        scan = _TensorScan(entry, view.manifest.tensors.get(entry.name))
        for block in blocks(entry):
            whole.update(block)
            scan.feed(block)
            advance(len(block))
        scans.append(scan)
    return whole.hexdigest(), scans


def _digest_plain_file(path: Path, advance: Advance) -> str:
    whole = xxhash.xxh3_128()
    for block in file_blocks(path):
        whole.update(block)
        advance(len(block))
    return whole.hexdigest()


def prove_bytes(view: StageView, report: Report, advance: Advance) -> None:
    """Every file has its size and digest, every tensor its digest; no NaN scale, no value that the source did not have."""
    files = report.begin(f"{view.label}: bytes of files and tensors")
    sanity = report.begin(f"{view.label}: sane values")
    headers = view.checkpoint.headers if view.checkpoint is not None else {}
    scans: list[_TensorScan] = []
    total = 0
    for name, record in view.manifest.files.items():
        path = view.path / name
        try:
            if not path.is_file():  # a pipe would block the reader for ever
                files.fail("missing, or not a regular file", file=str(path))
                continue
            size = path.stat().st_size
            if name in headers:
                digest, found = _scan_shard(headers[name], view, advance)
                scans += found
            else:
                digest = _digest_plain_file(path, advance)
        except (OSError, DuovoltError) as error:
            files.fail(f"cannot be read ({error})", file=str(path))
            continue
        total += size
        if size != record.size:
            files.fail("size in bytes", file=str(path), found=str(size), expected=str(record.size))
        elif digest != record.digest:
            files.fail("digest", file=str(path), found=digest, expected=record.digest)
    for scan in scans:
        _judge(scan, view, files, sanity)
    files.detail = f"{len(view.manifest.files)} files, {total / 1e6:,.2f} MB"
    if view.checkpoint is None:
        sanity.status, sanity.detail = "skipped", "the headers are not readable"
    else:
        sanity.detail = f"{len(scans)} tensors without a NaN scale, a NaN code or a value that is not finite"


def _judge(scan: _TensorScan, view: StageView, files: Proof, sanity: Proof) -> None:
    name, record = scan.entry.name, scan.record
    view.digests[name] = scan.digest.hexdigest()
    if record is None:
        return
    file = str(scan.entry.path)
    if view.digests[name] != record.digest:
        files.fail("digest", tensor=name, file=file, found=view.digests[name], expected=record.digest)
    if scan.forbidden is None or (record.part == "plain" and _is_the_sources(record)):
        return
    flat, word = scan.forbidden
    wanted = "a finite positive scale" if record.part in FLOAT_SCALES else "a finite value"
    stored_as_said = list(scan.entry.shape) == record.shape
    index = canonical_index(record, flat) if stored_as_said else [flat]
    sanity.fail("not finite", tensor=name, file=file, index=index, found=word, expected=wanted)
