"""One file of a download on this side: is it there and right, and the partial that turns into it.

Beside the final name NAME stand, while it is incomplete, `.NAME.part` (the bytes so far) and `.NAME.part.json` (what
they are bytes of). The final name appears by a rename, after size and digest were checked.
"""

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..checkpoint.digest import BLOCK
from ..checkpoint.errors import InputError
from ..checkpoint.stage import NO_JSON, AtomicFile, disk_errors, sync_directory, write_event
from .hub import RemoteFile, Stopped


class PartialRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a partial is a part of. `digest` is the etag of the finished file; size in bytes."""

    commit: str
    size: int
    digest_kind: str
    digest: str


class LocalFile:
    """`remote` under `root`. Raises InputError when a link or a directory stands in the way."""

    def __init__(self, root: Path, remote: RemoteFile, commit: str) -> None:
        self.remote = remote
        self.final = root / remote.name
        self.part = self.final.with_name(f".{self.final.name}.part")
        self.sidecar = self.final.with_name(f".{self.final.name}.part.json")
        self._record = PartialRecord(commit, remote.size, remote.digest_kind, remote.digest)
        for parent in list(self.final.relative_to(root).parents)[:-1]:
            if (root / parent).is_symlink():
                raise InputError(f"{root / parent}: a link, where {remote.name} needs a directory. Remove it.")
        if self.final.is_dir() and not self.final.is_symlink():
            raise InputError(f"{self.final}: a directory, where the repository has a file. Choose another directory.")

    def defect(self, stop: threading.Event, advance: Callable[[int], None]) -> str | None:
        """Why the file under its final name is not the remote one (`missing`, ...); None when it is, digest and all.

        `advance` hears of the bytes hashed; `stop` ends it with Stopped.
        """
        try:
            status = self.final.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        if not stat.S_ISREG(status.st_mode):
            return "a link, not a file" if stat.S_ISLNK(status.st_mode) else "not a plain file"
        if status.st_size != self.remote.size:
            return f"{status.st_size} bytes instead of {self.remote.size}"
        digest = self.remote.new_digest()
        with self.final.open("rb", buffering=0) as handle:
            while block := handle.read(BLOCK):
                if stop.is_set():
                    raise Stopped
                digest.update(block)
                advance(len(block))
        return None if digest.hexdigest() == self.remote.digest else f"its {self.remote.digest_kind} is wrong"

    def partial(self) -> tuple[int, str | None]:
        """Bytes of a partial that can be continued, or 0 and why the partial that is there cannot."""
        try:
            status = self.part.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return 0, None
        if not stat.S_ISREG(status.st_mode):
            return 0, "not a plain file"
        try:
            record = msgspec.json.decode(self.sidecar.read_bytes(), type=PartialRecord)
        except (OSError, *NO_JSON):
            return 0, "no record of what it is part of"
        if (record.digest_kind, record.digest, record.size) != (
            self.remote.digest_kind,
            self.remote.digest,
            self.remote.size,
        ):
            return 0, "part of another version of the file"
        if status.st_size > self.remote.size:
            return 0, f"{status.st_size} bytes, more than the whole file has ({self.remote.size})"
        return status.st_size, None

    def discard_partial(self) -> None:
        """Remove the partial and its record."""
        with disk_errors(self.part):
            self.part.unlink(missing_ok=True)
            self.sidecar.unlink(missing_ok=True)

    def put(self, content: bytes) -> None:
        """Write the whole, already checked content."""
        with self.writing() as writer:
            writer.restart()
            writer.append(content)
            writer.install()

    @contextmanager
    def writing(self) -> Iterator["PartialWriter"]:
        """The partial, open for more bytes; kept as it is when the block fails."""
        with disk_errors(self.final):
            self.final.parent.mkdir(parents=True, exist_ok=True)
            if self.partial()[0] == 0:
                self.discard_partial()
            with AtomicFile(self.sidecar) as handle:
                handle.write(msgspec.json.format(msgspec.json.encode(self._record), indent=2) + b"\n")
            writer = PartialWriter(self)
            try:
                yield writer
            finally:
                writer.close()


class PartialWriter:
    """Appends to a partial and keeps the digest of all of it, whoever wrote the beginning."""

    def __init__(self, local: LocalFile) -> None:
        self._local = local
        self._fd = os.open(local.part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._digest = local.remote.new_digest()
        self.size = 0
        while block := os.read(self._fd, BLOCK):
            self._digest.update(block)
            self.size += len(block)

    @property
    def complete(self) -> bool:
        """All bytes are there; the digest is still to be checked."""
        return self.size == self._local.remote.size

    def append(self, data: bytes) -> None:
        """Write all of `data` behind the partial's end."""
        view = memoryview(data)
        while len(view):
            write_event()
            count = os.write(self._fd, view)
            self._digest.update(view[:count])
            self.size += count
            view = view[count:]

    def restart(self) -> None:
        """Throw the bytes away."""
        write_event()
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._digest = self._local.remote.new_digest()
        self.size = 0

    def digest(self) -> str:
        """Digest of the bytes so far."""
        return self._digest.hexdigest()

    def install(self) -> None:
        """Give the complete, checked partial its final name, durably; the mode of a file it replaces stays."""
        assert self.complete and self.digest() == self._local.remote.digest
        final = self._local.final
        if final.exists() and not final.is_symlink():
            os.fchmod(self._fd, final.stat().st_mode & 0o777)
        write_event()
        os.fsync(self._fd)
        write_event()
        self._local.part.rename(final)
        sync_directory(final.parent)
        self._local.sidecar.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)
