"""Which files of a repository a download fetches. The index is the authority; nothing it names can be left out."""

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.container import parse_json
from ..checkpoint.directory import DOWNLOAD_RECORD, FOREIGN_WEIGHTS, INDEX, MANIFEST, SINGLE, plain_name
from ..checkpoint.errors import InputError
from .hub import Listing

# Containers of the same weights in other forms, and pickles, which run code when read.
OTHER_FORMS = (*FOREIGN_WEIGHTS, ".pkl", ".pickle", ".onnx_data", ".tflite", ".mlmodel", ".ot", ".npz", ".index.json")
GIT_FILES = (".gitattributes", ".gitignore")


@dataclass(frozen=True)
class FetchList:
    """`files` in the order of fetching; `skipped`: name and reason; `weights`: the files that hold tensors."""

    files: list[str]
    skipped: dict[str, str]
    weights: list[str]


def weight_files(listing: Listing, index: bytes | None) -> list[str]:
    """The files that hold the checkpoint's tensors: what `index` names, or the one file without an index.

    Raises InputError for a broken index, a name that is no plain file name, or a named file that the repository lacks.
    """
    if index is None:
        if SINGLE not in listing.files:
            raise InputError(
                f"{listing.repo}: neither {INDEX} nor {SINGLE} in revision {listing.commit}: not a safetensors "
                "checkpoint. Choose a repository that has one."
            )
        return [SINGLE]
    place = Path(f"{listing.repo}/{INDEX}")
    parsed = parse_json(index, place)
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{place}: no weight_map.")
    names = sorted({plain_name(name, place) for name in weight_map.values()})
    if wrong := [name for name in names if not name.endswith(".safetensors")]:
        raise InputError(f"{place}: names {wrong[0]}, which is not a safetensors file.")
    if missing := [name for name in names if name not in listing.files]:
        raise InputError(
            f"{listing.repo}: the index names {len(missing)} file(s) that revision {listing.commit} does not hold: "
            f"{', '.join(missing[:8])}. The upload is incomplete: choose another revision."
        )
    return names


def choose(listing: Listing, weights: Sequence[str], include: Sequence[str]) -> FetchList:
    """Index, weights and side files; with `include`, of the rest only what matches one of its globs.

    Raises InputError for an include that leaves out a needed file, or a glob that matches nothing.
    """
    for glob in include:
        if not any(fnmatch.fnmatchcase(name, glob) for name in listing.files):
            raise InputError(f"--include {glob!r}: matches no file of {listing.repo}.")
    needed = [name for name in (INDEX, "config.json") if name in listing.files] + list(weights)
    left_out = [name for name in needed if include and not _matches(name, include)]
    if left_out:
        raise InputError(
            f"--include leaves out {', '.join(left_out[:8])}, which the checkpoint needs: add a glob for "
            f"{'it' if len(left_out) == 1 else 'them'} (such as --include '*.safetensors' --include '*.json')."
        )
    skipped = {}
    files = []
    for name in sorted(listing.files):
        why = None if name in needed else _why_not(name, include)
        if why is None:
            files.append(name)
        else:
            skipped[name] = why
    # A converted checkpoint's manifest says "finished", so it comes after everything that it speaks of.
    files.sort(key=lambda name: (name == MANIFEST, name))
    return FetchList(files, skipped, list(weights))


def _matches(name: str, include: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in include)


def _why_not(name: str, include: Sequence[str]) -> str | None:
    last = name.rpartition("/")[2]
    if name == DOWNLOAD_RECORD or (last.startswith(".") and (".part" in last or ".duovolt" in last)):
        return "a name that duovolt keeps for itself"
    if include:
        return None if _matches(name, include) else "not asked for by --include"
    if last in GIT_FILES:
        return "git's own"
    if last.endswith(OTHER_FORMS):
        return f"weights in another form, or not named by {INDEX}"
    return None
