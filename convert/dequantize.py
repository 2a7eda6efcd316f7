"""`dequantize`: any directory we read back to a plain Hugging Face checkpoint, in bands.

A quantised weight gets the wanted dtype. A plain tensor keeps its own words in bfloat16 output (nothing to gain by
rounding a float32 `A_log`), and is widened, exactly, in float32 output.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..checkpoint.bands import OURS, CanonicalReader, DecodedWeight, Dialect, band_edges, canonical_rows, decode_band
from ..checkpoint.container import NUMPY_DTYPE, TensorEntry, read_range
from ..checkpoint.directory import Checkpoint
from ..checkpoint.encodings import PLAIN_OF_DTYPE, part_of
from ..checkpoint.encodings.plain import to_bf16, to_float32
from ..checkpoint.encodings.weights import weights_of
from ..checkpoint.files import plan_files
from ..checkpoint.manifest import DRAFT_HEAD, Manifest
from ..checkpoint.sources import SourceForm, dialect_of, producer_of
from ..checkpoint.sources.base import SourceWeight
from ..checkpoint.stage import StageDirectory, disk_errors, require_space
from ..checkpoint.writer import Planned, ShardWriter
from ..model.inventory import DRAFT_IDS

MAX_SHARD_BYTES = 5_000_000_000
DTYPES = {"float32": "F32", "bfloat16": "BF16"}

Rows = Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class PlainTensor:
    """A tensor of the output: stored dtype, shape, and `rows(first, last)` giving its stored words."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Rows

    @property
    def planned(self) -> Planned:
        return Planned(self.name, self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        return self.planned.nbytes


@dataclass(frozen=True)
class ConvertedReader:
    """Canonical rows of a converted directory's stored tensors."""

    checkpoint: Checkpoint
    manifest: Manifest

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        return canonical_rows(self.checkpoint.tensors[name], self.manifest.tensors[name], first, last)


@dataclass(frozen=True)
class SourceReader:
    """Rows of one source weight's parts, named by part, as our own encodings have them."""

    weight: SourceWeight

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        part = part_of(self.weight.encoding, name)
        entry = next(entry for key, entry in self.weight.parts.items() if key == name)
        assert part is not None  # plain tensors are copied, never decoded
        shape = part.shape(self.weight.shape[0], self.weight.shape[1]) or (1,)
        row = entry.nbytes // shape[0]
        words = read_range(entry, first * row, last * row).view(NUMPY_DTYPE[entry.dtype])
        return words.reshape(last - first, *shape[1:])


def source_tensors(form: SourceForm, dtype: str) -> Iterator[PlainTensor]:
    """The tensors of a source, of any architecture, quantised weights decoded.

    Integer and boolean tensors are copied as they are.
    """
    for name, weight in form.weights.items():
        if "plain" in weight.parts:
            yield _copied(name, weight.parts["plain"], dtype)
        else:
            yield _decoded(weight, dtype, dialect_of(form.producer, dtype))


def _copied(name: str, entry: TensorEntry, dtype: str) -> PlainTensor:
    row = entry.nbytes // entry.shape[0] if entry.shape and entry.shape[0] else entry.nbytes

    def words(first: int, last: int) -> np.ndarray:
        return read_range(entry, first * row, last * row).view(NUMPY_DTYPE[entry.dtype])

    if entry.dtype not in PLAIN_OF_DTYPE:
        return PlainTensor(name, entry.dtype, entry.shape, words)
    return _plain(name, entry.dtype, entry.shape, words, dtype)


def _decoded(weight: SourceWeight, dtype: str, dialect: Dialect) -> PlainTensor:
    reader = SourceReader(weight)

    def values(first: int, last: int) -> np.ndarray:
        parts: dict[str, tuple[str, str]] = {part: (part, entry.dtype) for part, entry in weight.parts.items()}
        found = decode_band(weight.name, weight.encoding, parts, reader, first, last, dialect)
        return found if dtype == "F32" else to_bf16(found)

    return PlainTensor(weight.name, dtype, weight.shape, values)


def converted_tensors(manifest: Manifest, reader: CanonicalReader, dtype: str) -> Iterator[PlainTensor]:
    """The logical weights of a converted directory, or of its ranks joined by `reader`.

    A draft head is left out: its rows are the head's, and no other program knows it.
    """
    source = manifest.source
    theirs = dialect_of(producer_of(source.quantization_config, source.hf_quant_config), dtype)
    for weight, names in weights_of(manifest).items():
        if weight in (DRAFT_HEAD, DRAFT_IDS):
            continue
        records = {part: (name, manifest.tensors[name]) for part, name in names.items()}
        # What we quantised ourselves has the scales that we chose, to the last bit.
        imported = len({ref.name for _, record in records.values() for ref in record.sources}) > 1
        decoded = DecodedWeight(weight, records, theirs if imported else OURS)
        if "plain" in names:
            record = manifest.tensors[names["plain"]]

            def words(first: int, last: int, name: str = names["plain"]) -> np.ndarray:
                return reader.rows(name, first, last)

            yield _plain(weight, record.dtype, decoded.shape, words, dtype)
        else:

            def values(first: int, last: int, decoded: DecodedWeight = decoded) -> np.ndarray:
                found = decoded.decode(reader, first, last)
                return found if dtype == "F32" else to_bf16(found)

            yield PlainTensor(weight, dtype, decoded.shape, values)


def _plain(name: str, stored: str, shape: tuple[int, ...], words: Rows, wanted: str) -> PlainTensor:
    if wanted == "BF16":
        return PlainTensor(name, stored, shape, words)
    return PlainTensor(name, "F32", shape, lambda first, last: to_float32(words(first, last), stored))


def write_plain(
    tensors: list[PlainTensor],
    side_files: Mapping[str, Path | bytes],
    target: Path,
    advance: Callable[[int], None],
    made_from: str,
) -> int:
    """Write a plain checkpoint into the new or empty directory `target`, or finish one; the bytes of its tensor data.

    `made_from` is the `fingerprint` of the input. Raises InputError if the directory holds something else,
    EnvironmentFault if the disk is too small.
    """
    planned = {tensor.name: tensor.planned for tensor in tensors}
    total = sum(tensor.nbytes for tensor in planned.values())
    with disk_errors(target):
        there = sum(p.stat().st_size for p in target.iterdir() if p.is_file()) if target.is_dir() else 0
        require_space(target, max(0, total - there))
    by_name = {tensor.name: tensor for tensor in tensors}
    files = plan_files([[tensor] for tensor in planned.values()], MAX_SHARD_BYTES)
    with StageDirectory(target, f"plain checkpoint of {made_from}") as stage, disk_errors(target):
        for file, contents in files:
            if stage.resume(file) is not None:
                advance(sum(item.nbytes for item in contents))
                continue
            with stage.create(file) as handle:
                writer = ShardWriter(handle, contents, {"format": "pt"})
                for item in contents:
                    for band in _bands(by_name[item.name], item.nbytes):
                        writer.write(band)
                        advance(band.nbytes)
                record = writer.close()
            stage.finished(file, record)
        for name, content in side_files.items():
            if isinstance(content, bytes):
                stage.put(name, content)
            else:
                stage.copy(content)
        stage.put_index({item.name: file for file, contents in files for item in contents}, total)
        stage.finish()
    return total


def _bands(tensor: PlainTensor, nbytes: int) -> Iterator[np.ndarray]:
    rows = tensor.shape[0] if tensor.shape else 1
    for first, last in band_edges(rows, nbytes // rows if rows else 0):
        yield tensor.rows(first, last)
