"""One shared-memory file a start: created by the proxy, mapped once by every rank, then nameless.

The file stands in /dev/shm (pinning for a GPU works in a memory file system only). It gets its full size under a
temporary name and is renamed: nobody ever sees it short, and nobody truncates it in place, which would kill a live
peer with SIGBUS. Its name is removed as soon as all sides have mapped it, so no stop of any kind leaves a file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from pathlib import Path

from ...checkpoint.errors import EnvironmentFault
from .owner import owned_name, owner_is_dead

SHARED_DIR = Path("/dev/shm")


def sweep_dead() -> list[str]:
    """Remove the files of owners that no longer run, never those of a live one; returns the names removed."""
    removed: list[str] = []
    if not SHARED_DIR.is_dir():
        return removed
    for entry in SHARED_DIR.iterdir():
        if owner_is_dead(entry.name):
            with contextlib.suppress(OSError):  # another user's, swept by a neighbour, or no file at all
                entry.unlink()
                removed.append(entry.name)
    return removed


class SharedFile:
    """A mapped file; `memory` is its bytes."""

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self.memory = memory

    @staticmethod
    def create(size: int) -> SharedFile:
        """A zeroed file of `size` bytes, mode 0600. Raises EnvironmentFault if the memory file system is full or absent."""
        name = owned_name()
        temporary = SHARED_DIR / f".{name}"
        try:
            fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EnvironmentFault(f"cannot create shared memory in {SHARED_DIR}: {error.strerror}") from error
        try:
            os.posix_fallocate(fd, 0, size)  # a full file system fails here, not later with SIGBUS
            memory = mmap.mmap(fd, size)
            temporary.rename(SHARED_DIR / name)
        except OSError as error:
            temporary.unlink()
            need = f"{size} bytes needed" if error.errno == errno.ENOSPC else f"{error.strerror}"
            raise EnvironmentFault(
                f"cannot create shared memory in {SHARED_DIR}: {need}; free some room there"
            ) from error
        finally:
            os.close(fd)
        return SharedFile(name, memory)

    @staticmethod
    def attach(name: str) -> SharedFile:
        """Map the file `name`. Raises EnvironmentFault if it is gone or is not this user's private file."""
        try:
            fd = os.open(SHARED_DIR / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise EnvironmentFault(f"cannot open shared memory {name}: {error.strerror}") from error
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or stat.S_IMODE(info.st_mode) != 0o600:
                raise EnvironmentFault(f"shared memory {name} is not a private file of this user")
            return SharedFile(name, mmap.mmap(fd, info.st_size))
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Remove the name; the mappings live on. Harmless when repeated."""
        with contextlib.suppress(FileNotFoundError):
            (SHARED_DIR / self.name).unlink()
