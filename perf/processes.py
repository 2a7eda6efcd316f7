"""Running a command of ours as a process, as a user does, with its time and its peak of anonymous memory."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.errors import DuovoltError, InputError


@dataclass(frozen=True)
class Measured:
    """Wall seconds from start to end, CPU seconds, and peak bytes of anonymous memory: what is not a file's page."""

    seconds: float
    cpu_seconds: float
    peak_anonymous: int
    output: str


class _AnonymousPeak(threading.Thread):
    """Watches the anonymous memory of a process until it ends."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.status, self.peak = Path(f"/proc/{pid}/status"), 0

    def run(self) -> None:
        while True:
            try:
                lines = self.status.read_text().splitlines()
            except OSError:
                return
            found = [int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")]
            if not found:
                return  # a zombie has no memory
            self.peak = max(self.peak, found[0])
            time.sleep(0.02)


def run_duovolt(*arguments: object) -> Measured:
    """Run `duovolt ARGUMENTS...` to its end. Raises DuovoltError with what it said if it fails."""
    words = [str(argument) for argument in arguments]
    spent, begin = os.times(), time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "duovolt", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    watch = _AnonymousPeak(process.pid)
    watch.start()
    try:
        output, errors = process.communicate()
    except BaseException:
        process.kill()
        process.wait()
        raise
    seconds, after = time.perf_counter() - begin, os.times()
    watch.join()
    if process.returncode:
        raise DuovoltError(f"`duovolt {' '.join(words)}` failed in the benchmark: {errors.strip() or output.strip()}")
    cpu = after.children_user + after.children_system - spent.children_user - spent.children_system
    return Measured(seconds, cpu, watch.peak, output)


def files_below(*directories: Path) -> list[Path]:
    """Every file of some directories, in order of name."""
    return sorted(path for directory in directories for path in directory.rglob("*") if path.is_file())


def size_of(paths: Iterable[Path]) -> int:
    """Bytes of files."""
    return sum(path.stat().st_size for path in paths)


def flush(paths: Iterable[Path]) -> None:
    """fsync files: what any tool that writes as much must pay before it is done."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def drop_cache(paths: Iterable[Path]) -> None:
    """Have the kernel forget the files' pages, so that the next reader goes to the disk. Needs no privilege."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)  # a page that is not yet written stays
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def copy_files(source: Path, target: Path) -> None:
    """`cp` of a directory and fsync, byte by byte: no shared extents where the file system could."""
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(target)], check=True)
    flush(files_below(target))


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def require_new(*places: Path | None) -> None:
    """Raises InputError for a directory of a benchmark that exists, since it is removed at the end, or cannot be made."""
    for place in places:
        if place is None:
            continue
        if place.exists():
            raise InputError(f"{place}: exists. The benchmark makes and removes this directory; name a new one.")
        above = next(parent for parent in place.absolute().parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise InputError(f"{place}: nothing can be made in {above}. Name a new directory that you may write to.")
