"""`duovolt-download.json`: appears last, so a directory with it is a finished download; names the pinned commit.

While a download runs, the same record stands in a hidden file: what is being fetched, and that it is not all there.
"""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

import msgspec

from .directory import DOWNLOAD_RECORD, MAX_JSON
from .errors import InputError, one_line
from .stage import AtomicFile, disk_errors, sync_directory, write_event

DigestKind = Literal["sha256", "git-sha1"]

FORMAT_VERSION = 1
PENDING = f".{DOWNLOAD_RECORD}.part"
DIGITS = {"sha256": 64, "git-sha1": 40}


class ContentDigest:
    """The digest by which the hub names a file's content.

    `sha256` of the bytes for LFS files; for git files git's blob id: sha1 of `blob <size>\\0` and the bytes.
    """

    def __init__(self, kind: DigestKind, size: int) -> None:
        if kind == "sha256":
            self._state = hashlib.sha256()
        else:
            self._state = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        self._state.update(data)

    def hexdigest(self) -> str:
        return self._state.hexdigest()


class DescribedFile(Protocol):
    """A file as a hub lists it: name, size in bytes, digest and its kind."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def digest_kind(self) -> DigestKind: ...
    @property
    def digest(self) -> str: ...


class DownloadedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file as the hub describes it. size in bytes; `etag` is the hub's name of the content."""

    size: int
    digest_kind: DigestKind
    digest: str
    etag: str


class DownloadRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a directory's files come from: `revision` as asked for, `commit` as it was resolved."""

    format_version: int
    repo: str
    revision: str
    commit: str
    files: dict[str, DownloadedFile]

    @staticmethod
    def of(repo: str, revision: str, commit: str, files: Iterable[DescribedFile]) -> "DownloadRecord":
        """The record of a download of `files`."""
        known = {file.name: DownloadedFile(file.size, file.digest_kind, file.digest, file.digest) for file in files}
        return DownloadRecord(FORMAT_VERSION, repo, revision, commit, dict(sorted(known.items())))

    def write_pending(self, directory: Path) -> None:
        """From here on the directory is an unfinished download of these files, and says so."""
        with disk_errors(directory):
            with AtomicFile(directory / PENDING) as handle:
                handle.write(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")
            if (directory / DOWNLOAD_RECORD).exists():
                write_event()
                (directory / DOWNLOAD_RECORD).unlink()
                sync_directory(directory)


def finish_record(directory: Path) -> None:
    """Every file is there and right: give the pending record its final name."""
    with disk_errors(directory):
        write_event()
        (directory / PENDING).rename(directory / DOWNLOAD_RECORD)
        sync_directory(directory)


def unusable_name(name: object) -> str | None:
    """Why a name from a server or a record must not become a local path; None for a plain relative path."""
    if not isinstance(name, str) or not name:
        return "no name"
    if any(ord(letter) < 32 or ord(letter) == 127 or 0xD800 <= ord(letter) < 0xE000 for letter in name):
        return "control or unpaired characters"
    if "\\" in name or re.match(r"[A-Za-z]:", name):
        return "a path of another system"
    if name.startswith("/"):
        return "an absolute path"
    if ".." in name.split("/"):
        return "a path that climbs out"
    if PurePosixPath(name).as_posix() != name or name == ".":
        return "not a plain relative path"
    return None


def read_record(directory: Path, pending: bool = False) -> DownloadRecord | None:
    """The record of a finished download, or of a `pending` one; None without it.

    Raises InputError for a broken, hostile or newer one.
    """
    path = directory / (PENDING if pending else DOWNLOAD_RECORD)
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a regular file. Remove it and run `duovolt download` again.")
        if path.exists() and path.stat().st_size > MAX_JSON:
            raise InputError(f"{path}: {path.stat().st_size} bytes, more than the {MAX_JSON} allowed for a JSON file.")
        record = msgspec.json.decode(path.read_bytes(), type=DownloadRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a download record ({one_line(error)}). Run `duovolt download` again.") from None
    if record.format_version != FORMAT_VERSION:
        raise InputError(f"{path}: format version {record.format_version}; this duovolt reads {FORMAT_VERSION}.")
    for name, file in record.files.items():
        why = unusable_name(name)
        if why is None and not (
            file.size >= 0 and re.fullmatch(f"[0-9a-f]{{{DIGITS[file.digest_kind]}}}", file.digest)
        ):
            why = f"size {file.size} or {file.digest_kind} {file.digest[:80]!r} makes no sense"
        if why is not None:
            raise InputError(f"{path}: file {name[:200]!r}: {why}. Run `duovolt download` again.")
    return record
