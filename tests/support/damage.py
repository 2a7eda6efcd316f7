"""Damages a finished directory, with or without making its digests fit again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from duovolt.checkpoint.container import read_header
from duovolt.checkpoint.digest import digest_bytes, digest_file
from duovolt.checkpoint.directory import MANIFEST
from duovolt.checkpoint.manifest import FileRecord, Manifest, read_manifest


def edit_tensor(directory: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Change a tensor's stored bytes (uint8, flat) in place; digests stay as they were."""
    path = directory / read_manifest(directory).tensors[name].file
    entry = read_header(path).tensors[name]
    raw = bytearray(path.read_bytes())
    data = np.frombuffer(raw, np.uint8)[entry.begin : entry.end]
    change(data)
    path.write_bytes(raw)


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the manifest and seal it again with a sound digest."""
    value = msgspec.to_builtins(read_manifest(directory))
    change(value)
    sealed = msgspec.convert(value, Manifest, strict=True).sealed()
    (directory / MANIFEST).write_bytes(sealed.encode())


def refit(directory: Path) -> None:
    """Make every digest of files and tensors fit what lies there: damage that only another stage can see."""
    manifest = read_manifest(directory)
    files = {
        name: FileRecord(size=(directory / name).stat().st_size, digest=digest_file(directory / name))
        for name in manifest.files
    }
    tensors = dict(manifest.tensors)
    for file in sorted({record.file for record in tensors.values()}):
        raw = memoryview((directory / file).read_bytes())
        for name, entry in read_header(directory / file).tensors.items():
            digest = digest_bytes(raw[entry.begin : entry.end])
            tensors[name] = msgspec.structs.replace(tensors[name], digest=digest)
    sealed = msgspec.structs.replace(manifest, files=files, tensors=tensors).sealed()
    (directory / MANIFEST).write_bytes(sealed.encode())
