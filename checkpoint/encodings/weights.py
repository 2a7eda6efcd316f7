"""Decoding one logical weight of a converted or rank directory to float32, whatever its encoding and layout."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from .. import layouts
from ..directory import Checkpoint
from ..errors import CheckFailed, InputError
from ..manifest import Manifest, TensorRecord
from . import INDEX_ENCODINGS, PLAIN_ENCODINGS, encoding_parts, fp8, nvfp4, plain, tile_of, tile_ranges, words_of


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


def decode_parts(
    weight: str,
    encoding: str,
    parts: Mapping[str, tuple[str, np.ndarray]],
    first: int = 0,
    tile: tuple[int, int] | None = None,
) -> np.ndarray:
    """float32 values from canonical parts, each given as (stored dtype, words).

    The parts hold the weight's rows from `first` on; tile scales start with the tile that row `first` lies in. `tile`:
    rows and columns a tile covers, if finer than the encoding's own. Raises InputError if a part is missing or the
    encoding unknown.
    """
    try:
        if encoding in PLAIN_ENCODINGS:
            dtype, words = parts["plain"]
            return plain.to_float32(words, dtype)
        if encoding in INDEX_ENCODINGS:
            return parts["plain"][1].astype(np.float32)  # exact: no vocabulary has 2^24 rows
        words, base = parts["words"][1], words_of(encoding)
        if base == "nvfp4":
            scale = np.float32(_scale(parts, "global_scale").reshape(-1)[0])
            divides = encoding == "nvfp4/divisor"
            blocks = parts["block_scale"][1]
            factor = nvfp4.factors(blocks, divisor=scale) if divides else nvfp4.factors(blocks, multiplier=scale)
            return nvfp4.decode(words, factor)
        if encoding == "fp8_e4m3":
            return fp8.decode_rows(words, _scale(parts, "row_scale"))
        if encoding == "fp8_e4m3/tensor":
            return fp8.decode_rows(words, np.broadcast_to(_scale(parts, "tensor_scale").reshape(-1), len(words)))
        if (own := tile_of(encoding)) is not None:
            rows, columns = tile or own
            scale_rows = _scale(parts, "tile_scale")[(first + np.arange(len(words))) // rows - first // rows]
            return fp8.decode_tiles(words, scale_rows, columns)
    except KeyError as missing:
        raise InputError(f"weight {weight!r} ({encoding}) lacks its {missing.args[0]}.") from None
    raise InputError(f"weight {weight!r} has the unknown encoding {encoding!r}.")


def _scale(parts: Mapping[str, tuple[str, np.ndarray]], part: str) -> np.ndarray:
    dtype, words = parts[part]
    return plain.to_float32(words, dtype)


def tile_here(encoding: str, words: TensorRecord) -> tuple[int, int] | None:
    """Rows and columns that a stored tile scale covers in the directory that `words` is recorded in; None: no tiles.

    In a rank it is finer than the encoding says where a cut falls inside a tile. Raises InputError for a record of a cut
    that makes no sense.
    """
    tile = tile_of(encoding)
    split = words.split
    if tile is None or split is None or split.axis is None:
        return tile
    if split.axis not in (0, 1):
        raise InputError(f"a matrix cannot be cut along axis {split.axis}.")
    shape = stored_extent(split.whole.shape, split.whole.layout)
    refined, _ = tile_ranges(tile[split.axis], shape[split.axis], split.ranges)
    return (refined, tile[1]) if split.axis == 0 else (tile[0], refined)


def stored_extent(shape: list[int], layout: str) -> tuple[int, ...]:
    """Canonical shape of FP8 words that are stored as `shape` in `layout`. Raises InputError where none are."""
    tile = layouts.layout_named(layout)
    if len(shape) != (2 if tile is None else 4):
        raise InputError(f"a matrix cannot be stored as {shape} in {layout}.")
    return tuple(shape) if tile is None else (shape[0] * shape[2], shape[1] * tile.bytes_per_group)


def _check_shapes(
    weight: str, encoding: str, shapes: Mapping[str, tuple[int, ...]], tile: tuple[int, int] | None
) -> None:
    """Raises InputError if a weight's scales are not those of its words. `tile`: as in `decode_parts`."""
    described = {part.name: part for part in encoding_parts(encoding) or ()}
    if not described or "words" not in shapes:
        return
    rows, columns = (n * (unit or 1) for n, unit in zip(shapes["words"], described["words"].unit, strict=True))
    for name, part in described.items():
        wanted = (replace(part, unit=tile) if tile is not None and part.ragged else part).shape(rows, columns)
        if shapes.get(name, wanted) != wanted:
            raise InputError(
                f"weight {weight!r} ({encoding}): its {name} is {list(shapes[name])}, {list(wanted)} belongs to words of "
                f"[{rows}, {columns}]. Make this directory again."
            )


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
    encoding = encodings.pop()
    tile = tile_here(encoding, records["words"]) if "words" in records else None
    _check_shapes(weight, encoding, {part: words.shape for part, (_, words) in parts.items()}, tile)
    return decode_parts(weight, encoding, parts, tile=tile)
