"""What the first reading of a source gave, kept beside an interrupted conversion, so that resuming does not read it again.

The conversion id follows from the digests of all source tensors; on a slow disk that reading is half of the work.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from ..checkpoint.container import read_header, read_tensor
from ..checkpoint.digest import digest_json
from ..checkpoint.directory import Checkpoint
from ..checkpoint.errors import DuovoltError
from ..checkpoint.manifest import FileRecord, has_manifest, read_manifest
from ..checkpoint.stage import FACTS, JOURNAL, NO_JSON, AtomicFile
from ..checkpoint.writer import Planned, ShardWriter
from .source import TIED, Source, SourceFacts, TensorFacts


def fingerprint(directories: list[Path], what: str) -> str:
    """Names the content of some directories, and `what` is made of it, without reading all of it.

    A manifest's digest stands for its directory; for the files of a source stand size and time of the last change.
    """
    found: list[Any] = [what]
    for directory in directories:
        if has_manifest(directory):
            found.append(read_manifest(directory).digest)
            continue
        checkpoint = Checkpoint.open(directory)
        for name in sorted([*checkpoint.headers, *checkpoint.side_files]):
            status = (directory / name).stat()
            found.append([name, status.st_size, status.st_mtime_ns])
    return digest_json(found)


def source_fingerprint(source: Source) -> str:
    """The `fingerprint` of the one or two directories that a conversion reads."""
    second = [] if source.second is None else [source.second.path]
    return fingerprint([source.checkpoint.path, *second], "facts")


class _Told(msgspec.Struct, forbid_unknown_fields=True):
    """The part of the facts that is no array: (digest, values that are not zero) by tensor, and the source's shards."""

    source: str
    tensors: dict[str, tuple[str, int]]
    files: dict[str, FileRecord]


def _digest(told: bytes, arrays: list[np.ndarray]) -> str:
    state = xxhash.xxh3_128(told)
    for array in arrays:
        state.update(np.ascontiguousarray(array).data)
    return state.hexdigest()


def save_facts(target: Path, facts: SourceFacts, made_from: str) -> None:
    """Keep the facts in a hidden file of an unfinished directory; whoever finishes it takes the file away."""
    tensors = {name: (fact.digest, fact.nonzero) for name, fact in facts.tensors.items()}
    told = msgspec.json.encode(_Told(made_from, tensors, facts.files))
    arrays = {name: np.ascontiguousarray(fact.row_amax, np.float32) for name, fact in facts.tensors.items()}
    planned = [Planned(name, "F32", array.shape) for name, array in arrays.items()]
    with AtomicFile(target / FACTS) as handle:
        writer = ShardWriter(handle, planned, {"told": told.decode(), "digest": _digest(told, list(arrays.values()))})
        for array in arrays.values():
            writer.write(array)
        writer.close()


def load_facts(target: Path, source: Source, made_from: str) -> SourceFacts | None:
    """The facts that an interrupted run kept, if they are whole and of this very source; else None."""
    path = target / FACTS
    if not (target / JOURNAL).is_file() or not path.is_file():
        return None
    try:
        header = read_header(path)
        raw = header.metadata.get("told", "").encode()
        told = msgspec.json.decode(raw, type=_Told)
        arrays = {name: read_tensor(header.tensors[name]) for name in told.tensors}
    except (DuovoltError, OSError, KeyError, *NO_JSON):
        return None
    wanted = _amax_shapes(source)
    if told.source != made_from or {name: array.shape for name, array in arrays.items()} != wanted:
        return None
    if any(array.dtype != np.float32 for array in arrays.values()):
        return None
    if header.metadata.get("digest") != _digest(raw, list(arrays.values())):
        return None
    tensors = {name: TensorFacts(digest, arrays[name], nonzero) for name, (digest, nonzero) in told.tensors.items()}
    return SourceFacts(tensors, told.files)


def _amax_shapes(source: Source) -> dict[str, tuple[int]]:
    """How many largest magnitudes are kept of each source tensor: one a row of a plain matrix, else one."""
    parts = source.parts
    found = {}
    for name, entry in source.entries.items():
        plain = parts.get(name) == "plain" or source.dropped.get(name) == TIED
        found[name] = (entry.shape[0] if plain and len(entry.shape) == 2 and entry.nbytes else 1,)
    return found
