"""`duovolt.json`, the manifest: what every tensor and file of a converted or rank directory is, and where it came from.

Written last: a directory without it is unfinished. It carries the digest of its own canonical form.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from .container import ITEMSIZE, MAX_NAME
from .digest import DIGEST_HEX, digest_json
from .directory import MANIFEST, MAX_JSON, plain_name
from .encodings import STORED_AS_IS, PartName, part_name, part_of
from .errors import CheckFailed, InputError, one_line
from .layouts import stored_shape

FORMAT_VERSION = 1

Stage = Literal["converted", "rank"]

DRAFT_HEAD = "draft_head.weight"  # chosen rows of the head: the one weight that is less than its source


class Record(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of the manifest's records: unknown keys are refused, values never change."""


class SourceRef(Record, frozen=True):
    """One tensor of the source: name, dtype and shape as its header said, xxh3-128 of its bytes."""

    name: str
    dtype: str
    shape: list[int]
    digest: str


class Whole(Record, frozen=True):
    """The tensor in the converted directory that a rank's tensor is a part of (shape and layout as stored there)."""

    shape: list[int]
    layout: str
    digest: str


class SplitRecord(Record, frozen=True):
    """Which part a rank holds: index ranges along `axis` of the canonical whole, concatenated in order.

    `axis` None: the tensor is replicated, and `ranges` is empty.
    """

    axis: int | None
    ranges: list[tuple[int, int]]
    whole: Whole


class TensorRecord(Record, frozen=True):
    """One stored tensor. `weight` is the logical weight it belongs to, `canonical_shape` its shape before the layout."""

    weight: str
    part: PartName
    encoding: str
    layout: str
    dtype: str
    shape: list[int]
    canonical_shape: list[int]
    file: str
    digest: str
    sources: list[SourceRef]
    split: SplitRecord | None = None


class FileRecord(Record, frozen=True):
    """Size in bytes and xxh3-128 of a file."""

    size: int
    digest: str


class SourceRecord(Record, frozen=True, omit_defaults=True):
    """What the source said of itself: quantisation configuration kept word for word, files with their digests.

    dropped   source tensors that nothing was made from (scales of activations and of the KV cache), each with the reason
    absent    parts of the model that the configuration declares and the source lacks (`mtp`)
    second    parts of the model that were taken from a second source
    """

    quantization_config: dict[str, Any] | None
    hf_quant_config: dict[str, Any] | None
    files: dict[str, FileRecord]
    dropped: dict[str, str] = {}
    absent: list[str] = []
    second: list[str] = []


class Manifest(Record, frozen=True):
    """The whole record; see docs/checkpoint.md for the meaning of each key."""

    format_version: int
    stage: Stage
    family: str
    conversion_id: str
    recipe: dict[str, Any]
    tp_size: int | None
    tp_rank: int | None
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    source: SourceRecord
    provenance: dict[str, Any]
    digest: str = ""

    def sealed(self) -> "Manifest":
        """The same manifest with `digest` set to that of its canonical form."""
        return msgspec.structs.replace(self, digest=self._own_digest())

    def _own_digest(self) -> str:
        content = msgspec.to_builtins(self)
        del content["digest"]
        return digest_json(content)

    def encode(self) -> bytes:
        """Readable JSON, one line a scalar, with a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"

    def check_own_digest(self, path: Path) -> None:
        """Raises CheckFailed if the manifest was edited after it was written."""
        if self.digest != (own := self._own_digest()):
            raise CheckFailed(
                f"{path}: the manifest's own digest is {self.digest!r}, its content gives {own}: "
                "it was changed after it was written. Make this directory again."
            )


def has_manifest(directory: Path) -> bool:
    """True if the directory is finished."""
    return (directory / MANIFEST).is_file()


def _check_record(name: str, record: TensorRecord) -> None:
    """Raises InputError if name, part, encoding, dtype, layout and shapes of a record contradict one another."""
    part = part_of(record.encoding, record.part)
    own_name = record.weight if part is None else part_name(record.weight, part)
    dtype = STORED_AS_IS[record.encoding] if part is None else part.dtype
    if (own_name, dtype) != (name, record.dtype):
        raise InputError(f"{record.part} of {record.weight!r} in {record.encoding} is {dtype} under {own_name!r}.")
    canonical = tuple(record.canonical_shape)
    if any(not 0 <= n < 2**48 for n in (*record.shape, *canonical)):
        raise InputError(f"extents {record.shape} or {list(canonical)} make no sense.")
    if part is not None and len(canonical) != sum(unit is not None for unit in part.unit):
        raise InputError(f"{record.part} of {record.encoding} cannot have the shape {list(canonical)}.")
    if stored_shape(record.layout, record.dtype, canonical) != tuple(record.shape):
        raise InputError(f"{list(canonical)} in layout {record.layout} is not {record.shape}.")


def _check_weights(tensors: dict[str, TensorRecord]) -> None:
    """Raises InputError if the parts of a weight do not fit its words, or a plain tensor its source."""
    for name, record in tensors.items():
        part = part_of(record.encoding, record.part)
        if part is None:
            if len(record.sources) != 1:
                raise InputError(f"tensor {name!r} has {len(record.sources)} sources, expected one.")
            if record.sources[0].shape != record.canonical_shape and name != DRAFT_HEAD:
                raise InputError(f"tensor {name!r} is {record.canonical_shape}, its source is not.")
            continue
        words = tensors.get(record.weight)
        words_part = part_of(record.encoding, "words")
        if words is None or words_part is None or words.encoding != record.encoding:
            raise InputError(f"tensor {name!r} belongs to {record.weight!r}, which has no words in {record.encoding}.")
        rows, columns = (n * (unit or 1) for n, unit in zip(words.canonical_shape, words_part.unit, strict=True))
        if part.shape(rows, columns) != tuple(record.canonical_shape):
            raise InputError(f"tensor {name!r} is {record.canonical_shape}, which does not fit [{rows}, {columns}].")


def _check(manifest: Manifest, path: Path) -> None:
    for file in manifest.files:
        plain_name(file, path)
    for name, record in manifest.tensors.items():
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise InputError(f"{path}: a tensor name is empty, too long or not printable: {name[:80]!r}.")
        if record.file not in manifest.files:
            raise InputError(f"{path}: tensor {name!r} lies in {record.file!r}, which the manifest does not list.")
        if record.dtype not in ITEMSIZE or len(record.digest) != DIGEST_HEX:
            raise InputError(f"{path}: tensor {name!r} has dtype {record.dtype!r} or digest {record.digest!r} unknown.")
        if (record.split is None) != (manifest.stage == "converted"):
            raise InputError(f"{path}: tensor {name!r} {'lacks' if record.split is None else 'has'} a split record.")
        try:
            _check_record(name, record)
        except InputError as error:
            raise InputError(f"{path}: tensor {name!r}: {error}") from None
    if manifest.stage == "converted":
        try:
            _check_weights(manifest.tensors)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    ranked = manifest.stage == "rank"
    size, rank = manifest.tp_size, manifest.tp_rank
    if ranked and (size is None or rank is None or not 0 <= rank < size):
        raise InputError(f"{path}: rank {rank} of {size} makes no sense.")


def without_manifest(directory: Path) -> str:
    """Why a directory without a manifest is none of ours, by what it looks like, and what to do."""
    if any(directory.glob("rank-*-of-*")):
        return f"{directory}: a folder of ranks. Name one of them, or give it where ranks are asked for."
    if (directory / "config.json").is_file():
        return (
            f"{directory}: unfinished, or as it was downloaded: it has no {MANIFEST}. Run the stage that writes it again, "
            "it will resume; or `duovolt convert` it first."
        )
    return f"{directory}: unfinished: it has no {MANIFEST}. Run the stage that writes it again; it will resume."


def read_manifest(directory: Path) -> Manifest:
    """The checked manifest of a finished directory.

    Raises InputError if the directory is unfinished, the manifest malformed or of another format version,
    CheckFailed if it does not match its own digest.
    """
    path = directory / MANIFEST
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory.")
    if not path.is_file():
        raise InputError(without_manifest(directory))
    if path.stat().st_size > MAX_JSON:
        raise InputError(f"{path}: {path.stat().st_size} bytes, more than the {MAX_JSON} allowed.")
    raw = path.read_bytes()
    try:
        version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("format_version", msgspec.Raw(b"0"))
        if bytes(version) != str(FORMAT_VERSION).encode():
            raise InputError(
                f"{path}: format version {bytes(version).decode()[:20]}, this duovolt reads {FORMAT_VERSION}. "
                "Convert again, or use the duovolt that wrote it."
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a manifest ({one_line(error)}). Make this directory again.") from None
    _check(manifest, path)
    manifest.check_own_digest(path)
    return manifest
