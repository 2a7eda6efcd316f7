"""`duovolt-download.json`: written last, so a directory with it is a finished download; names the pinned commit."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ..checkpoint.directory import DOWNLOAD_RECORD
from ..checkpoint.errors import InputError
from ..checkpoint.stage import AtomicFile, disk_errors

if TYPE_CHECKING:
    from .hub import RemoteFile  # pulls in the hub's client library, which a reader of records has no use for

DigestKind = Literal["sha256", "git-sha1"]

FORMAT_VERSION = 1


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
    def of(repo: str, revision: str, commit: str, files: "list[RemoteFile]") -> "DownloadRecord":
        """The record of a download of `files`."""
        known = {file.name: DownloadedFile(file.size, file.digest_kind, file.digest, file.digest) for file in files}
        return DownloadRecord(FORMAT_VERSION, repo, revision, commit, dict(sorted(known.items())))

    def write(self, directory: Path) -> None:
        """Put the record into `directory`, atomically."""
        with disk_errors(directory), AtomicFile(directory / DOWNLOAD_RECORD) as handle:
            handle.write(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read_record(directory: Path) -> DownloadRecord | None:
    """The record of a finished download; None without one. Raises InputError for a broken or newer one."""
    path = directory / DOWNLOAD_RECORD
    try:
        record = msgspec.json.decode(path.read_bytes(), type=DownloadRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{path}: not a download record ({error}). Run `duovolt download` again.") from None
    if record.format_version != FORMAT_VERSION:
        raise InputError(f"{path}: format version {record.format_version}; this duovolt reads {FORMAT_VERSION}.")
    return record
