"""Decoding one logical weight of a converted or rank directory to float32, whatever its encoding and layout."""

from collections.abc import Mapping

import numpy as np

from .. import layouts
from ..directory import Checkpoint
from ..errors import CheckFailed, InputError
from ..manifest import Manifest, TensorRecord
from . import fp8, nvfp4, plain


def weights_of(manifest: Manifest) -> dict[str, dict[str, str]]:
    """logical weight -> part name -> stored tensor name."""
    found: dict[str, dict[str, str]] = {}
    for name, record in manifest.tensors.items():
        parts = found.setdefault(record.weight, {})
        if record.part in parts:
            raise InputError(f"weight {record.weight!r} has its {record.part} twice: {parts[record.part]} and {name}.")
        parts[record.part] = name
    return found


def canonical(checkpoint: Checkpoint, name: str, record: TensorRecord) -> np.ndarray:
    """A stored tensor with its layout undone: raw words, canonical shape."""
    entry = checkpoint.tensors.get(name)
    if entry is None or entry.dtype != record.dtype or list(entry.shape) != record.shape:
        stored = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise CheckFailed(
            f"{checkpoint.path}: tensor {name!r} is {stored}; the manifest says {record.dtype} {record.shape}."
        )
    return layouts.to_canonical(checkpoint.read(name), record.layout, tuple(record.canonical_shape))


def decode_parts(weight: str, encoding: str, parts: Mapping[str, tuple[str, np.ndarray]]) -> np.ndarray:
    """float32 values from canonical parts, each given as (stored dtype, words).

    Raises InputError if a part is missing or the encoding unknown.
    """
    try:
        if encoding in ("bf16", "fp16", "fp32"):
            dtype, words = parts["plain"]
            return plain.to_float32(words, dtype)
        if encoding == "fp8_e4m3":
            return fp8.decode_rows(parts["words"][1], parts["row_scale"][1])
        if encoding == "nvfp4":
            scale = np.float32(parts["global_scale"][1].reshape(-1)[0])
            factor = nvfp4.factors(parts["block_scale"][1], multiplier=scale)
            return nvfp4.decode(parts["words"][1], factor)
    except KeyError as missing:
        raise InputError(f"weight {weight!r} ({encoding}) lacks its {missing.args[0]}.") from None
    raise InputError(f"weight {weight!r} has the unknown encoding {encoding!r}.")


def read_weight(checkpoint: Checkpoint, manifest: Manifest, weight: str) -> np.ndarray:
    """float32 values of one logical weight, in its own shape.

    Raises InputError for a weight that the manifest does not hold or cannot be decoded.
    """
    names = weights_of(manifest).get(weight)
    if names is None:
        raise InputError(f"{checkpoint.path}: no weight {weight!r}.")
    records = {part: manifest.tensors[name] for part, name in names.items()}
    encodings = {record.encoding for record in records.values()}
    if len(encodings) != 1:
        raise InputError(f"{checkpoint.path}: the parts of {weight!r} disagree on the encoding: {sorted(encodings)}.")
    parts = {part: (record.dtype, canonical(checkpoint, names[part], record)) for part, record in records.items()}
    return decode_parts(weight, encodings.pop(), parts)
