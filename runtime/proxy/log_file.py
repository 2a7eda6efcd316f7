"""A file of lines that is written beside the event loop: a slow disk or an unread pipe must not hold an answer up."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from pathlib import Path

from ...checkpoint.errors import InputError

_MOST_WAITING = 10_000  # lines; beyond it they are dropped and counted
_CLOSE_SECONDS = 0.5
_MODE = 0o600  # lines may hold what people asked


class LogFile:
    """Lines appended to `target`, a path or "-" for standard output. A file that was moved away is begun anew."""

    def __init__(self, target: Path) -> None:
        """Raises InputError if the file cannot be opened."""
        self._path = None if str(target) == "-" else target
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._complained = False
        self.lost = 0
        try:
            self._file = self._open()
        except OSError as error:
            raise InputError(f"--log-requests {target}: {error.strerror}.") from error
        self._writer = threading.Thread(target=self._run, daemon=True)
        self._writer.start()

    def write(self, line: str) -> None:
        """Take a line, without waiting."""
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Write what waits, for half a second at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
        self._writer.join(_CLOSE_SECONDS)

    def _open(self) -> int:
        if self._path is None:
            return sys.stdout.fileno()
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, _MODE)

    def _run(self) -> None:
        torn = False  # half a line stands at the end: what comes next must not be read as part of it
        while (line := self._lines.get()) is not None:
            whole = data = line.encode(errors="replace") + b"\n"
            try:
                if self._follow():
                    torn = False
                if torn:
                    os.write(self._file, b"\n")
                    torn = False
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:
                self.lost += 1
                torn = torn or len(data) < len(whole)
                if not self._complained:
                    self._complained = True
                    print(f"duovolt serve: the request log loses lines: {error.strerror}", file=sys.stderr, flush=True)

    def _follow(self) -> bool:
        """Open the path again if another file, or none, lies there now; whether it was."""
        if self._path is None:
            return False
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file)):
                return False
        opened = self._open()
        os.close(self._file)
        self._file = opened
        return True
