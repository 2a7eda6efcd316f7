"""The source checkpoint: opened, checked against the family from headers alone, then read once for its facts.

The facts (digests, largest magnitudes) decide every scale and the conversion id before a byte of output is written.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from ..checkpoint.container import NUMPY_DTYPE, TensorEntry
from ..checkpoint.digest import BLOCK
from ..checkpoint.directory import DOWNLOAD_RECORD, Checkpoint
from ..checkpoint.encodings import PLAIN_OF_DTYPE
from ..checkpoint.encodings.plain import to_float32
from ..checkpoint.errors import CheckFailed, InputError
from ..checkpoint.manifest import FileRecord, has_manifest
from ..model.config import ModelConfig
from ..model.inventory import TensorSpec, check_closed
from .download_record import read_record

Advance = Callable[[int], None]

# Magnitude bits, and the first magnitude that is not finite, of each dtype seen as an unsigned integer.
MAGNITUDE = {"BF16": (0x7FFF, 0x7F80), "F16": (0x7FFF, 0x7C00), "F32": (0x7FFF_FFFF, 0x7F80_0000)}


@dataclass(frozen=True)
class TensorFacts:
    """What one pass learned: xxh3-128 of the bytes; `row_amax` float32 [rows] for matrices, [1] for the rest."""

    digest: str
    row_amax: np.ndarray


@dataclass(frozen=True)
class Source:
    """A source that passed the checks on its headers."""

    checkpoint: Checkpoint
    config: ModelConfig
    specs: dict[str, TensorSpec]

    @property
    def quantization_config(self) -> dict[str, Any] | None:
        return self.checkpoint.config.get("quantization_config")

    @staticmethod
    def open(path: Path) -> "Source":
        """Raises InputError for another family, an incomplete or already converted or quantised directory."""
        if path.is_dir() and has_manifest(path):
            raise InputError(f"{path}: already converted by duovolt (it has a manifest). Give the source directory.")
        if path.is_dir() and not (path / DOWNLOAD_RECORD).exists() and any(path.glob(".*.part")):
            raise InputError(f"{path}: unfinished download. Run the same `duovolt download` again; it resumes.")
        checkpoint = Checkpoint.open(path)
        config = ModelConfig.from_dict(checkpoint.config, str(path / "config.json"))
        method = checkpoint.config.get("quantization_config")
        if method is not None:
            name = method.get("quant_method") if isinstance(method, dict) else method
            raise InputError(
                f"{path}: already quantised (quantization_config: {name!r}). This version converts BF16, F16 and F32 "
                "sources; take the model's plain release."
            )
        specs = check_closed(config, {name: entry.shape for name, entry in checkpoint.tensors.items()}, str(path))
        for name, entry in checkpoint.tensors.items():
            if entry.dtype not in PLAIN_OF_DTYPE:
                raise InputError(
                    f"{entry.path}: tensor {name!r} is {entry.dtype}, but the configuration declares no quantisation. "
                    "This version converts BF16, F16 and F32 sources."
                )
        return Source(checkpoint, config, specs)

    def provenance(self) -> dict[str, Any]:
        """Repository, revision and commit, as the download recorded them; empty for a directory of unknown origin."""
        record = read_record(self.checkpoint.path)
        return {} if record is None else {"repo": record.repo, "revision": record.revision, "commit": record.commit}


def _non_finite(entry: TensorEntry, flat: int, word: np.ndarray) -> InputError:
    index = [int(n) for n in np.unravel_index(flat, entry.shape)] if entry.shape else []
    value = to_float32(word.view(NUMPY_DTYPE[entry.dtype]), entry.dtype)[0]
    return InputError(
        f"{entry.path}: tensor {entry.name!r} holds {value} at index {index}: the source is damaged or was "
        "never finite. Fetch it again and compare its digest."
    )


def _scan(entry: TensorEntry, blocks: Iterable[memoryview]) -> TensorFacts:
    """Digest and largest magnitudes of one tensor. `blocks` come in whole rows for matrices.

    Magnitudes of floating-point words order as integers, so the maximum needs no conversion and is exact.
    """
    mask, infinite = MAGNITUDE[entry.dtype]
    unsigned: np.dtype[Any] = np.dtype("<u2") if mask == 0x7FFF else np.dtype("<u4")
    columns = entry.shape[1] if len(entry.shape) == 2 else max(1, entry.nbytes // unsigned.itemsize)
    digest = xxhash.xxh3_128()
    tops: list[np.ndarray] = []
    done = 0
    for block in blocks:
        digest.update(block)
        words: np.ndarray = np.frombuffer(block, unsigned) & unsigned.type(mask)
        top = words.reshape(-1, columns).max(axis=1) if len(entry.shape) == 2 else words.max(keepdims=True)
        if top.max(initial=0) >= infinite:
            at = int(np.argmax(words >= infinite))
            raise _non_finite(entry, done + at, np.frombuffer(block, unsigned)[at : at + 1])
        tops.append(top)
        done += len(words)
    top = np.concatenate(tops) if tops else np.zeros(1, unsigned)
    if len(entry.shape) != 2:
        top = top.max(keepdims=True)
    return TensorFacts(digest.hexdigest(), to_float32(top.view(NUMPY_DTYPE[entry.dtype]), entry.dtype))


def row_band(entry: TensorEntry, block_bytes: int = BLOCK, multiple: int = 1) -> int:
    """Bytes of a band of whole rows (a multiple of `multiple` rows) near `block_bytes`; whole words for non-matrices."""
    if len(entry.shape) != 2 or not entry.nbytes:
        return block_bytes
    row = entry.nbytes // entry.shape[0]
    return max(multiple, block_bytes // row // multiple * multiple) * row


def _scan_file(source: Source, file: str, advance: Advance) -> tuple[FileRecord, dict[str, TensorFacts]]:
    header = source.checkpoint.headers[file]
    whole = xxhash.xxh3_128()
    facts: dict[str, TensorFacts] = {}
    data_start = min((entry.begin for entry in header.tensors.values()), default=header.size)
    with header.path.open("rb") as handle:
        whole.update(handle.read(data_start))

    def seen(entry: TensorEntry) -> Iterable[memoryview]:
        for block in source.checkpoint.blocks(entry.name, row_band(entry)):
            whole.update(block)
            advance(len(block))
            yield block

    for entry in header.tensors.values():  # in the order of their data, so that the file's digest comes along
        facts[entry.name] = _scan(entry, seen(entry))
    return FileRecord(size=header.size, digest=whole.hexdigest()), facts


@dataclass(frozen=True)
class SourceFacts:
    """Facts of every tensor, and size and digest of every shard."""

    tensors: dict[str, TensorFacts]
    files: dict[str, FileRecord]


def scan(source: Source, workers: int, advance: Advance) -> SourceFacts:
    """Read the whole source once. Raises InputError naming tensor and index of a value that is not finite."""
    tensors: dict[str, TensorFacts] = {}
    files: dict[str, FileRecord] = {}
    with ThreadPoolExecutor(workers) as pool:
        names = sorted(source.checkpoint.headers)
        for name, (record, facts) in zip(names, pool.map(lambda n: _scan_file(source, n, advance), names), strict=True):
            files[name] = record
            tensors |= facts
    return SourceFacts(tensors, files)


def require_unchanged(entry: TensorEntry, expected: str, digest: str) -> None:
    """Raises CheckFailed if the second pass over a tensor read other bytes than the first."""
    if digest != expected:
        raise CheckFailed(f"{entry.path}: tensor {entry.name!r} changed between two reads. Nothing was finished.")
