"""One pass over every byte of the given directories: digests of files and tensors, values that must not occur, and the
digests of the whole tensors that the ranks give when joined.

Files are scanned beside one another, and the ranks' files of one name in step, so that each byte is read once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from ..checkpoint.container import NUMPY_DTYPE, Header, TensorEntry, blocks
from ..checkpoint.digest import BLOCK
from ..checkpoint.errors import DuovoltError
from ..checkpoint.manifest import TensorRecord
from ..checkpoint.stream import PIECE, ByteStream
from .lockstep import JoinPlan, join_plan
from .report import Proof, Report
from .stage import StageView, whole_shapes
from .words import canonical_index, hex_word
from .workers import Advance, run_beside

E4M3_NAN = 0x7F  # without the sign
FLOAT_SCALES = ("row_scale", "tensor_scale", "tile_scale", "global_scale")  # stored as F32
LEAST_NOT_FINITE = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}  # as words, without the sign

MEMORY = 256 << 20  # bytes of blocks that all workers may hold together


def _forbidden(record: TensorRecord, words: np.ndarray) -> np.ndarray:
    """Which words of a piece may not be there, as booleans."""
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


def _suspect(record: TensorRecord, words: np.ndarray) -> bool:
    """False only if `_forbidden` would find nothing; of large tensors, from two maxima, which leave nothing behind.

    As integers, words that are not finite are the largest of their sign: the largest signed ones if the sign is clear,
    the largest unsigned ones if it is set.
    """
    if record.part == "block_scale" or (record.part == "words" and record.dtype == "F8_E4M3"):
        least = E4M3_NAN
    elif record.part == "plain" and record.dtype in LEAST_NOT_FINITE:
        least = LEAST_NOT_FINITE[record.dtype]
    else:
        return record.part in FLOAT_SCALES
    size = words.dtype.itemsize
    sign = 1 << (8 * size - 1)
    largest = np.maximum.reduce
    return bool(largest(words.view(f"<i{size}")) >= least or largest(words.view(f"<u{size}")) >= sign + least)


def _is_the_sources(record: TensorRecord) -> bool:
    """True if the whole tensor's bytes are the source's, by digest: then what is not finite was not finite there."""
    digest = record.digest if record.split is None else record.split.whole.digest
    return len(record.sources) == 1 and record.sources[0].digest == digest


class TensorScan:
    """Digest and first forbidden word of one tensor, piece by piece; `searched` False leaves the words unsearched."""

    def __init__(self, entry: TensorEntry, record: TensorRecord | None, searched: bool = True) -> None:
        self.entry, self.record, self.searched = entry, record, searched
        self.digest = xxhash.xxh3_128()
        self.forbidden: tuple[int, str] | None = None
        self._done = 0

    def feed(self, piece: np.ndarray) -> None:
        """The next bytes, a whole number of elements."""
        self.digest.update(piece.data)
        if self.searched:
            self._search(piece)

    def search_again(self) -> None:
        """Read the tensor anew for what was left unsearched. Raises OSError or InputError."""
        self.searched = True
        for block in blocks(self.entry):
            self._search(np.frombuffer(block, np.uint8))

    def _search(self, piece: np.ndarray) -> None:
        if self.record is None or self.record.dtype != self.entry.dtype or not len(piece):
            return
        words = piece.view(NUMPY_DTYPE[self.entry.dtype])
        if self.forbidden is None and _suspect(self.record, words) and (bad := _forbidden(self.record, words)).any():
            at = int(np.argmax(bad))
            self.forbidden = (self._done + at, hex_word(words[at]))
        self._done += len(words)


@dataclass
class FileScan:
    """What was read of one file of a directory, or why it could not be."""

    path: Path
    size: int = 0
    digest: str = ""
    tensors: list[TensorScan] = field(default_factory=list)
    error: str | None = None


@dataclass
class Scan:
    """`files` by directory and file name; `joined` maps tensors to the digest of the whole that the ranks give.

    `sane`: part and dtype of the joined tensors whose bytes are those of a converted one, which was searched.
    """

    files: dict[tuple[Path, str], FileScan] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)
    sane: dict[str, tuple[str, str]] = field(default_factory=dict)

    def prove_sane(self, converted: Path) -> None:
        """Fill `sane` from the scan of a converted directory."""
        for (directory, _), file in self.files.items():
            for scan in file.tensors if directory == converted else ():
                name, record = scan.entry.name, scan.record
                if record is None or record.dtype != scan.entry.dtype or scan.forbidden is not None:
                    continue
                if self.joined.get(name) == scan.digest.hexdigest():
                    self.sane[name] = (record.part, record.dtype)

    def searched(self, scan: TensorScan) -> bool:
        """True if a tensor's words were searched, its own or those of the whole that they are part of."""
        record = scan.record
        return scan.searched or (record is not None and self.sane.get(scan.entry.name) == (record.part, record.dtype))


class _Reader:
    """One file on its way through the scan."""

    def __init__(self, view: StageView, name: str, block_bytes: int, advance: Advance) -> None:
        self.view, self.path, self.advance = view, view.path / name, advance
        self.header: Header | None = view.checkpoint.headers.get(name) if view.checkpoint is not None else None
        self.size = self.path.stat().st_size
        self.stream = ByteStream(self.path, block_bytes)
        self.whole = xxhash.xxh3_128()
        self.tensors: list[TensorScan] = []

    def take(self, count: int) -> np.ndarray:
        piece = self.stream.take(count)
        self.whole.update(piece.data)
        self.advance(count)
        return piece

    def skip(self, count: int) -> None:
        """Bytes that belong to no tensor."""
        while count:
            count -= len(self.take(min(count, PIECE)))

    def start(self, entry: TensorEntry, searched: bool) -> Callable[[int], np.ndarray]:
        """Begin the next tensor; gives what takes and feeds its bytes."""
        scan = TensorScan(entry, self.view.manifest.tensors.get(entry.name), searched)
        self.tensors.append(scan)

        def take(count: int) -> np.ndarray:
            piece = self.take(count)
            scan.feed(piece)
            return piece

        return take

    def result(self) -> FileScan:
        return FileScan(self.path, self.size, self.whole.hexdigest(), self.tensors)


def _entries(view: StageView, name: str) -> dict[str, TensorEntry]:
    """The tensors of a file, in the order of their data; none for a file without a readable header."""
    header = view.checkpoint.headers.get(name) if view.checkpoint is not None else None
    return {} if header is None else header.tensors


def _block_bytes(streams: int) -> int:
    """Bytes a read, where so many files are read in step."""
    return min(BLOCK, MEMORY // 4 // streams)


def _scan_file(
    views: Sequence[StageView], name: str, plans: dict[str, JoinPlan], beside: bool, advance: Advance
) -> Scan:
    """Read the file `name` of all `views` in step. `beside`: what `plans` join is compared with a converted directory.

    Raises OSError or DuovoltError if one of them cannot be read."""
    found = Scan()
    block_bytes = _block_bytes(len(views))
    readers: list[_Reader] = []
    try:
        for view in views:
            readers.append(_Reader(view, name, block_bytes, advance))
        tables = [_entries(view, name) for view in views]
        for reader, table in zip(readers, tables, strict=True):
            reader.skip(min((entry.begin for entry in table.values()), default=reader.size))
        for tensor in tables[0]:
            searched = tensor not in plans or not beside
            takes = [reader.start(table[tensor], searched) for reader, table in zip(readers, tables, strict=True)]
            if tensor in plans:
                if (digest := plans[tensor].digest(takes)) is not None:
                    found.joined[tensor] = digest
                continue
            for take, table in zip(takes, tables, strict=True):
                left = table[tensor].nbytes
                while left:
                    left -= len(take(min(left, PIECE)))
        for reader in readers:
            found.files[reader.view.path, name] = reader.result()
    finally:
        for reader in readers:
            reader.stream.__exit__()
    return found


def _scan(views: Sequence[StageView], name: str, plans: dict[str, JoinPlan], beside: bool, advance: Advance) -> Scan:
    """As `_scan_file`; what cannot be read is noted, and the other ranks' files of that name are read one by one."""
    try:
        for view in views:
            if not (view.path / name).is_file():  # a pipe would block the reader for ever
                raise FileNotFoundError("missing, or not a regular file")
        return _scan_file(views, name, plans, beside, advance)
    except (OSError, DuovoltError) as error:
        if len(views) > 1:
            found = Scan()
            for view in views:
                found.files |= _scan([view], name, {}, False, advance).files
            return found
        path = views[0].path / name
        why = f"cannot be read ({error})" if path.is_file() else str(error)
        return Scan({(views[0].path, name): FileScan(path, error=why)})


def _plans(views: Sequence[StageView], name: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, JoinPlan] | None:
    """How to join the tensors of a file in step; None if the ranks' files do not hold the same tensors in one order."""
    tables = [_entries(view, name) for view in views]
    if not tables[0] or any(list(table) != list(tables[0]) for table in tables[1:]):
        return None
    plans = {}
    for tensor in tables[0]:
        records = [view.manifest.tensors.get(tensor) for view in views]
        known = [record for record in records if record is not None]
        if tensor in shapes and len(known) == len(views):
            plan = join_plan(known, [table[tensor] for table in tables], shapes[tensor])
            if plan is not None:
                plans[tensor] = plan
    return plans


def _tasks(alone: Sequence[StageView], ranks: Sequence[StageView]) -> list[Callable[[Advance], Scan]]:
    """One task a file, or a file's name in all `ranks`; the largest first, so that none is left for last alone."""
    sized: list[tuple[int, Callable[[Advance], Scan]]] = []
    wholes = [view for view in alone if view.manifest.stage == "converted"]

    def add(views: Sequence[StageView], name: str, plans: dict[str, JoinPlan]) -> None:
        size = sum(view.manifest.files[name].size for view in views)
        sized.append((size, partial(_scan, views, name, plans, bool(wholes))))

    shapes = whole_shapes(ranks[0]) if ranks else {}
    for name in dict.fromkeys(name for view in ranks for name in view.manifest.files):
        holders = [view for view in ranks if name in view.manifest.files]
        plans = _plans(ranks, name, shapes) if len(holders) == len(ranks) else None
        if plans is not None:
            add(ranks, name, plans)
            continue
        for view in holders:
            add([view], name, {})
    for view in alone:
        for name in view.manifest.files:
            add([view], name, {})
    return [task for _, task in sorted(sized, key=lambda pair: -pair[0])]


def scan(alone: Sequence[StageView], ranks: Sequence[StageView], advance: Advance) -> Scan:
    """Read every file of every directory once. `ranks`: all ranks of one split, which are joined on the way.

    `advance` is called with bytes read. What cannot be read is noted with its file.
    """
    streams = max(1, len(ranks))
    together = streams * ByteStream.memory(_block_bytes(streams))
    result = Scan()
    for found in run_beside(_tasks(alone, ranks), advance, MEMORY // together):
        result.files |= found.files
        result.joined |= found.joined
    for view in alone:
        if view.manifest.stage == "converted":
            result.prove_sane(view.path)
    return result


@dataclass
class BytesProofs:
    """The two proofs of one directory that a scan serves; begun before it, so that they stand in their place."""

    view: StageView
    files: Proof
    sanity: Proof

    @staticmethod
    def begin(view: StageView, report: Report) -> "BytesProofs":
        """Every file has its size and digest, every tensor its digest; no NaN scale, no value that is not finite."""
        files = report.begin(f"{view.label}: bytes of files and tensors")
        return BytesProofs(view, files, report.begin(f"{view.label}: sane values"))

    def judge(self, scan: Scan) -> None:
        """Compare what was read with the manifest, and fill the view's digests."""
        view, files, sanity = self.view, self.files, self.sanity
        total, count = 0, 0
        found = {name: scan.files[view.path, name] for name in view.manifest.files}
        for name, record in view.manifest.files.items():
            file, path = found[name], str(view.path / name)
            if file.error is not None:
                files.fail(file.error, file=path)
                continue
            total += file.size
            if file.size != record.size:
                files.fail("size in bytes", file=path, found=str(file.size), expected=str(record.size))
            elif file.digest != record.digest:
                files.fail("digest", file=path, found=file.digest, expected=record.digest)
        for file in found.values():
            for tensor in file.tensors:
                if not scan.searched(tensor):
                    self._search(tensor)
                self._judge_tensor(tensor)
                count += 1
        files.detail = f"{len(view.manifest.files)} files, {total / 1e6:,.2f} MB"
        if view.checkpoint is None:
            sanity.status, sanity.detail = "skipped", "the headers are not readable"
        else:
            sanity.detail = f"{count} tensors without a NaN scale, a NaN code or a value that is not finite"

    def _search(self, scan: TensorScan) -> None:
        try:
            scan.search_again()
        except (OSError, DuovoltError) as error:
            self.files.fail(f"cannot be read ({error})", tensor=scan.entry.name, file=str(scan.entry.path))

    def _judge_tensor(self, scan: TensorScan) -> None:
        name, record, view = scan.entry.name, scan.record, self.view
        view.digests[name] = scan.digest.hexdigest()
        if record is None:
            return
        file = str(scan.entry.path)
        if view.digests[name] != record.digest:
            self.files.fail("digest", tensor=name, file=file, found=view.digests[name], expected=record.digest)
        if scan.forbidden is None or (record.part == "plain" and _is_the_sources(record)):
            return
        flat, word = scan.forbidden
        wanted = "a finite positive scale" if record.part in FLOAT_SCALES else "a finite value"
        stored_as_said = list(scan.entry.shape) == record.shape
        index = canonical_index(record, flat) if stored_as_said else [flat]
        self.sanity.fail("not finite", tensor=name, file=file, index=index, found=word, expected=wanted)
