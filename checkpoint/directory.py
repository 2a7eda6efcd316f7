"""A checkpoint directory: index, shards, side files. The index is the authority; file name patterns mean nothing."""

import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
import numpy as np

from . import container
from .container import Header, TensorEntry
from .digest import BLOCK
from .errors import InputError, naming

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MANIFEST = "duovolt.json"
DOWNLOAD_RECORD = "duovolt-download.json"
QUARANTINE = ".duovolt-bad"  # folder in a directory for what `verify --quarantine` moved aside
MAX_JSON = 256 << 20
MAX_NAME = 255  # bytes of a file name that file systems take

# Rewritten by our stages, or bookkeeping of ours; every other file beside the shards is a side file.
OWN_FILES = {INDEX, MANIFEST, DOWNLOAD_RECORD, ".duovolt.lock"}
# Other containers of the same weights, never copied along.
FOREIGN_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".safetensors")


def read_json(path: Path) -> Any:
    """A JSON file of bounded size without duplicate keys. Raises InputError."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would block the reader for ever
            raise InputError(f"{path}: not a regular file, where a JSON file was expected.")
        if path.stat().st_size > MAX_JSON:
            raise InputError(f"{path}: {path.stat().st_size} bytes, more than the {MAX_JSON} allowed for a JSON file.")
        with naming(path):
            return container.parse_json(path.read_bytes(), path)
    except FileNotFoundError:
        ranks = sorted(path.parent.glob("rank-*-of-*"))
        hint = f" {path.parent} is a folder of ranks: name one of them, such as {ranks[0]}." if ranks else ""
        raise InputError(f"{path}: no such file.{hint}") from None
    except IsADirectoryError:
        raise InputError(f"{path}: a directory, where a file was expected.") from None


def require_report_place(file: Path | None, checkpoints: Iterable[Path | None], option: str = "--json") -> None:
    """Raises InputError, before any work, if a report cannot lie at `file`: no directory, or in one of `checkpoints`.

    A report in a checkpoint's directory would overwrite a file of it, or be a stranger there for every later proof.
    """
    if file is None:
        return
    if not file.parent.is_dir():
        raise InputError(f"{option} {file}: there is no directory {file.parent}.")
    if file.is_dir():
        raise InputError(f"{option} {file}: a directory, where a file is to be written.")
    place = file.resolve()
    for directory in checkpoints:
        if directory is not None and directory.resolve() in place.parents:
            raise InputError(
                f"{option} {file}: lies in {directory}, where a report does not belong. Choose another place."
            )


def write_report(file: Path, value: Any) -> None:
    """`value` as JSON in `file`. Raises OSError that names it."""
    with naming(file):
        file.write_text(json.dumps(value, indent=1) + "\n")


def require_file(path: Path, limit: int, what: str) -> None:
    """To be asked before a file is read whole: a pipe or a device may never end. Raises InputError, OSError if absent."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError(f"{path}: not a regular file, where {what} was expected.")
    if path.stat().st_size > limit:
        raise InputError(f"{path}: {path.stat().st_size} bytes, more than the {limit} allowed for {what}.")


def read_text(path: Path, limit: int, what: str) -> str:
    """A UTF-8 file of at most `limit` bytes. `what` names its part in messages. Raises InputError."""
    try:
        require_file(path, limit, what)
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no text, or a NUL in the name
        raise InputError(f"{ascii(str(path))[1:-1]}: {what}: {getattr(error, 'strerror', None) or error}.") from None


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The safetensors index of a directory that we write: tensor name -> file, and the bytes of all tensors."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"


def plain_name(name: Any, path: Path) -> str:
    """`name` if it is a plain file name; InputError for paths, parents, absolute and hidden names."""
    if (
        not isinstance(name, str)
        or not name
        or PurePosixPath(name).name != name
        or name.startswith(".")
        or "\\" in name
        or not name.isprintable()
        or len(name.encode()) > MAX_NAME
    ):
        raise InputError(f"{path}: shard name {str(name)[:300]!r} is not a plain file name.")
    return name


def _checked_file(directory: Path, name: str) -> Path:
    path = directory / name
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: a dangling link to {path.readlink()}. Fetch the content, not the link.")
    if not path.is_file():
        raise InputError(f"{path}: named by {INDEX} but missing. Run `duovolt download` again for this directory.")
    return path


def _weight_map(directory: Path) -> dict[str, str]:
    index_path = directory / INDEX
    if not index_path.exists():
        if not (directory / SINGLE).exists():
            raise InputError(f"{directory}: neither {INDEX} nor {SINGLE}: not a safetensors checkpoint.")
        return dict.fromkeys(container.read_header(_checked_file(directory, SINGLE)).tensors, SINGLE)
    index = read_json(index_path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index_path}: no weight_map.")
    return {name: plain_name(file, index_path) for name, file in weight_map.items()}


@dataclass(frozen=True)
class Checkpoint:
    """An opened directory; only headers and JSON have been read."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    headers: dict[str, Header]
    side_files: list[str]
    notices: list[str]

    @staticmethod
    def open(path: Path) -> "Checkpoint":
        """Open `path` and check its index against the headers of every shard it names.

        Raises InputError listing missing shards, tensors that the index places wrongly, and unreadable files.
        """
        if not path.is_dir():
            raise InputError(f"{path}: not a directory.")
        config = read_json(path / "config.json")
        if not isinstance(config, dict):
            raise InputError(f"{path / 'config.json'}: not a JSON object.")
        weight_map = _weight_map(path)
        files = sorted(set(weight_map.values()))
        if missing := [name for name in files if not (path / name).exists() and not (path / name).is_symlink()]:
            raise InputError(
                f"{path}: {len(missing)} of {len(files)} shards named by {INDEX} are missing: "
                f"{', '.join(missing[:8])}. Run `duovolt download` again for this directory."
            )
        headers = {name: container.read_header(_checked_file(path, name)) for name in files}
        tensors: dict[str, TensorEntry] = {}
        for name, file in weight_map.items():
            entry = headers[file].tensors.get(name)
            if entry is None:
                raise InputError(f"{path / INDEX}: places tensor {name!r} in {file}, which does not hold it.")
            tensors[name] = entry
        notices = []
        for file, header in headers.items():
            if extra := [name for name in header.tensors if weight_map.get(name) != file]:
                raise InputError(f"{path / file}: tensor {extra[0]!r} is not the index's ({len(extra)} such tensors).")
        side_files = []
        for child in sorted(path.iterdir()):
            if child.name in files or child.name in OWN_FILES or child.name.startswith(".") or child.is_dir():
                continue
            if child.name.endswith(FOREIGN_WEIGHTS) or child.name.endswith(".index.json"):
                notices.append(f"{child.name}: not named by {INDEX}, left alone")
            elif child.is_symlink() and not child.exists():
                raise InputError(f"{child}: a dangling link to {child.readlink()}. Fetch the content, not the link.")
            elif not stat.S_ISREG(child.stat().st_mode):  # a pipe or a device would never end
                raise InputError(f"{child}: not a regular file. Remove it from the checkpoint's directory.")
            elif not child.name.isprintable():
                raise InputError(f"{path}: side file {child.name!r} has a name that is no text. Rename or remove it.")
            else:
                side_files.append(child.name)
        return Checkpoint(path, config, tensors, headers, side_files, notices)

    def read(self, name: str) -> np.ndarray:
        """A whole tensor: BF16 as uint16 words, F8 as uint8 words, else its own type; shape as stored."""
        return container.read_tensor(self.tensors[name])

    def blocks(self, name: str, block_bytes: int = BLOCK) -> Iterator[memoryview]:
        """A tensor's bytes in order; each block is only valid until the next."""
        return container.blocks(self.tensors[name], block_bytes)

    def read_range(self, name: str, begin: int, end: int) -> np.ndarray:
        """Bytes [begin, end) of a tensor, uint8."""
        return container.read_range(self.tensors[name], begin, end)
