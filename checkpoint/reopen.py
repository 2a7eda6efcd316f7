"""A finished directory made an interrupted run again, so that the stage that wrote it can write a part of it anew.

Repair needs no second writer: what is proved right is listed in a journal, the manifest goes, and the stage, run once
more, keeps the listed files and writes the others, as after a kill. Of those it keeps the tensors that are as the
manifest had them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .container import read_header
from .directory import MANIFEST
from .errors import DuovoltError, InputError
from .lock import DirectoryLock
from .manifest import Manifest, has_manifest, read_manifest
from .stage import (
    JOURNAL,
    NO_JSON,
    AtomicFile,
    JournalEntry,
    Mark,
    disk_errors,
    sync_directory,
    tidy,
    write_event,
)


@dataclass(frozen=True)
class Sound:
    """What is right in a damaged directory: whole `files`, and of the others every tensor but those in `suspect`.

    `suspect` None: no tensor. Either is proved again by the manifest's digests before it is kept; `suspect` names those
    that the manifest itself may be wrong about.
    """

    files: Collection[str]
    suspect: Collection[str] | None = None


def reopen(
    directory: Path, identity: str, conversion_id: str, sound: Sound, about: Mapping[str, Any] | None = None
) -> None:
    """Make `directory` an interrupted run of `identity` that has finished the files of `sound`, and nothing else.

    `identity` is that of the stage's StageDirectory; `about` is kept beside it for `about_interrupted`. A directory that
    is empty, absent or an interrupted run already stays as it is. A kill at any moment leaves a directory that is
    either as it was or such a run. Raises InputError for a directory of another conversion.
    """
    if not directory.is_dir() or not any(directory.iterdir()):
        return
    with DirectoryLock(directory), disk_errors(directory):
        if not has_manifest(directory) and (directory / JOURNAL).is_file():
            return
        manifest = _readable_manifest(directory)
        there = {manifest.conversion_id} if manifest is not None else conversions_named(directory)
        if conversion_id not in there:
            raise InputError(
                f"{directory}: holds {', '.join(sorted(there)) or 'no conversion that can be read'}, and this would write "
                f"{conversion_id} into it: what it is to be made from, or the recipe, is another or has changed since. Nothing "
                "was changed here. Give what it was made from; remove it only if it is not wanted any more."
            )
        tidy(directory)
        lines: list[Any] = [{"identity": identity, "about": dict(about or {})}]
        if manifest is not None:
            lines += [_entry(name, manifest) for name in sorted(sound.files) if name in manifest.files]
            if sound.suspect is not None:
                damaged = {record.file for record in manifest.tensors.values()} - set(sound.files)
                lines += [Mark(name, tensors=_digests(name, manifest, sound.suspect)) for name in sorted(damaged)]
        with AtomicFile(directory / JOURNAL) as handle:
            handle.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        write_event()
        (directory / MANIFEST).unlink(missing_ok=True)
        sync_directory(directory)


def _entry(name: str, manifest: Manifest) -> JournalEntry:
    digests = _digests(name, manifest)
    return JournalEntry(name, manifest.files[name], {"digests": digests} if digests else {})


def _digests(name: str, manifest: Manifest, without: Collection[str] = ()) -> dict[str, str]:
    tensors = {tensor: record.digest for tensor, record in manifest.tensors.items() if record.file == name}
    return {tensor: digest for tensor, digest in tensors.items() if tensor not in without}


def _readable_manifest(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except DuovoltError:
        return None


def conversions_named(directory: Path) -> set[str]:
    """The conversion ids that readable shards in a directory carry."""
    found = set()
    for path in sorted(directory.glob("*.safetensors")):
        try:
            found.add(read_header(path).metadata.get("duovolt.conversion_id", ""))
        except (DuovoltError, OSError):
            continue
    return found - {""}


def about_interrupted(directory: Path) -> dict[str, Any]:
    """What `reopen` kept for whoever finishes the run; empty without a journal, or where nothing was kept."""
    try:
        with (directory / JOURNAL).open("rb") as handle:
            first = msgspec.json.decode(handle.readline(1 << 20))
    except (OSError, *NO_JSON):
        return {}
    about = first.get("about") if isinstance(first, dict) else None
    return about if isinstance(about, dict) else {}
