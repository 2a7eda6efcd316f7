"""Who a rank directory is, read from its own weights and manifest, never from its path; and which ranks a folder holds."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...checkpoint.directory import MAX_JSON, Checkpoint, require_file
from ...checkpoint.errors import InputError, naming
from ...checkpoint.files import file_metadata
from ...checkpoint.manifest import has_manifest, read_manifest

TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
SUPPORTED_SIZES = (1, 2)
_RANK_NAME = re.compile(r"^rank-(\d+)-of-(\d+)$")


@dataclass(frozen=True)
class RankIdentity:
    """What must be equal on all ranks of a server, and the rank's own number."""

    rank: int
    size: int
    conversion_id: str
    recipe: str
    tokenizer_digest: str
    config_digest: str
    source: str


def read_identity(directory: Path) -> RankIdentity:
    """Identity of a finished rank directory.

    Raises InputError if it is unfinished, is no rank, or its weight files name another rank or conversion than its manifest.
    """
    manifest = read_manifest(directory)
    if manifest.stage != "rank" or manifest.tp_rank is None or manifest.tp_size is None:
        raise InputError(f"{directory} is a {manifest.stage} directory, not a rank; split it with `duovolt shard`.")
    expected = file_metadata(manifest.conversion_id, manifest.tp_size, manifest.tp_rank)
    for file, header in Checkpoint.open(directory).headers.items():
        for key, value in expected.items():
            if header.metadata.get(key) != value:
                raise InputError(
                    f"{directory / file}: its weights say {key} {header.metadata.get(key)!r}, the manifest {value!r}; "
                    "files of different ranks or conversions were mixed. Run `duovolt shard` again."
                )
    return RankIdentity(
        manifest.tp_rank,
        manifest.tp_size,
        manifest.conversion_id,
        str(manifest.recipe.get("name") or json.dumps(manifest.recipe, sort_keys=True)),
        tokenizer_digest(directory),
        config_digest(directory),
        str(manifest.provenance.get("repo") or ""),
    )


def scripted_identity(directory: Path) -> RankIdentity:
    """Identity where answers come from a script and no weights are read: number and size from the folder's name."""
    match = _RANK_NAME.match(directory.name)
    rank, size = (int(match[1]), int(match[2])) if match else (0, 1)
    return RankIdentity(rank, size, "none", "scripted", tokenizer_digest(directory), config_digest(directory), "")


def tokenizer_digest(directory: Path) -> str:
    """xxh3-128 of tokenizer.json. Raises InputError if it is missing."""
    try:
        require_file(directory / TOKENIZER, MAX_JSON, "a tokenizer")
        return xxhash.xxh3_128_hexdigest((directory / TOKENIZER).read_bytes())
    except OSError as error:
        raise InputError(
            f"{directory / TOKENIZER}: {error.strerror}; the server needs the model's tokenizer."
        ) from error


def config_digest(directory: Path) -> str:
    """xxh3-128 of config.json, which says how the weights are used; empty where there is none. Raises InputError."""
    path = directory / CONFIG
    if not path.exists():
        return ""
    require_file(path, MAX_JSON, "a configuration")
    with naming(path):
        return xxhash.xxh3_128_hexdigest(path.read_bytes())


def find_ranks(path: Path, scripted: bool) -> list[Path]:
    """The rank directories of a server in rank order: all of a folder of ranks, or a single rank-0-of-1.

    `scripted` also accepts a plain folder with a tokenizer. Raises InputError naming what is missing or in excess.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such directory.")
    found: dict[int, dict[int, Path]] = {}
    for child in sorted(path.iterdir()):
        if (match := _RANK_NAME.match(child.name)) and child.is_dir():
            found.setdefault(int(match[2]), {})[int(match[1])] = child
    if not found:
        return [_single(path, scripted)]
    if len(found) > 1:
        sets = ", ".join(f"{len(ranks)} of {size}" for size, ranks in sorted(found.items()))
        raise InputError(f"{path} holds ranks of several splits ({sets}); keep one split a folder.")
    size, ranks = next(iter(found.items()))
    if size not in SUPPORTED_SIZES:
        raise InputError(f"{path} is split over {size} ranks; this runtime serves 1 or 2. Use `duovolt shard --tp 2`.")
    if missing := [f"rank-{rank}-of-{size}" for rank in range(size) if rank not in ranks]:
        raise InputError(f"{path}: {', '.join(missing)} is missing; run `duovolt shard` for it.")
    return [ranks[rank] for rank in range(size)]


def _single(path: Path, scripted: bool) -> Path:
    match = _RANK_NAME.match(path.name)
    if match and match[2] != "1":
        raise InputError(f"{path} is one rank of {match[2]}; give the folder that holds all of them.")
    if match is None and not scripted:
        raise InputError(_no_ranks(path))
    return path


def _no_ranks(path: Path) -> str:
    if has_manifest(path):
        return f"{path} is no folder of ranks but converted: `duovolt shard {path} RANKS --tp N` (N 1 or 2), then serve RANKS."
    if (path / "config.json").is_file():
        return (
            f"{path} is no folder of ranks but a checkpoint: `duovolt convert {path} CONVERTED`, then "
            "`duovolt shard CONVERTED RANKS --tp N` (N 1 or 2), then serve RANKS."
        )
    beneath = sorted({child.parent for child in path.glob("*/rank-*-of-*")})
    if beneath:
        return f"{path} holds no rank-R-of-N directory, but {beneath[0]} does: serve that."
    return f"{path} holds no rank-R-of-N directory; make them with `duovolt shard CONVERTED {path} --tp N` (N 1 or 2)."


def check_ranks(directories: list[Path], scripted: bool) -> list[RankIdentity]:
    """The identities of all ranks, proved to belong together. Raises InputError for swapped, mixed or unfinished ones."""
    identities = [scripted_identity(path) if scripted else read_identity(path) for path in directories]
    first = identities[0]
    for number, (path, identity) in enumerate(zip(directories, identities, strict=True)):
        if (identity.rank, identity.size) != (number, len(directories)):
            raise InputError(
                f"{path}: its weights are rank {identity.rank} of {identity.size}, expected rank {number} of "
                f"{len(directories)}; the directories were swapped or renamed. Put them back or run `duovolt shard` again."
            )
        for what in ("conversion_id", "recipe", "tokenizer_digest", "config_digest"):
            mine, other = getattr(identity, what), getattr(first, what)
            if mine != other:
                raise InputError(
                    f"{path}: {what.replace('_', ' ')} {mine} differs from {other} of {directories[0]}; "
                    "ranks of two conversions cannot serve together."
                )
    return identities
