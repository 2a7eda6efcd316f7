"""One process at a time writes into a directory, or goes on with a file."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

from .errors import InputError

LOCK = ".duovolt.lock"


def process_start(pid: int) -> str:
    """The kernel's start time of a process in clock ticks, '' if there is none: tells a process from a reused pid."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def require_regular(path: Path) -> None:
    """Raises InputError if something else than a file bears the name of a file of ours: a pipe would hang us."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: not a regular file. Remove it.")


def open_alone(path: Path) -> BinaryIO:
    """A file to read and to write, made if it is not there, held by `flock` until it is closed.

    Raises InputError if a live process holds it or it is no regular file, OSError.
    """
    while True:
        if path.exists() and not path.is_file():  # a pipe would hang us
            raise InputError(f"{path}: not a regular file. Name another.")
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:  # its last owner has removed it between our open and our lock
            pass
        except BlockingIOError:
            file.close()
            raise InputError(f"{path}: another process is writing here. Wait for it, or name another file.") from None
        except OSError:
            file.close()
            raise
        file.close()


class DirectoryLock:
    """Exclusive use of a directory by one process: `flock`, with pid and start time for the message.

    A dead process's lock is taken over. Raises InputError if a live process holds it.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK
        self._handle: IO[str] | None = None

    def __enter__(self) -> "DirectoryLock":
        while True:
            require_regular(self.path)
            handle = self.path.open("a+")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().split()
                handle.close()
                who = f"process {owner[0]}" if owner else "another process"
                raise InputError(
                    f"{self.path.parent}: {who} is writing here. Wait for it, or choose another directory."
                ) from None
            # The last owner may have removed the file between our open and our lock: then ours is nameless.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle.fileno()), self.path.stat()):
                    break
            handle.close()
        try:
            handle.truncate(0)
            handle.write(f"{os.getpid()} {process_start(os.getpid())}\n")
            handle.flush()
        except OSError:
            handle.close()
            raise
        self._handle = handle
        return self

    def __exit__(self, *exception: object) -> None:
        if self._handle is not None:
            self.path.unlink(missing_ok=True)
            self._handle.close()
            self._handle = None
