"""Writing a directory so that it is either finished and right, or visibly unfinished.

Files are written under temporary names beside their target, flushed, fsynced and renamed. A journal remembers what was
finished, and how far a large file had come, so that an interrupted stage resumes by re-hashing; the manifest is written
last. A lock keeps two runs out.

Test doors: DUOVOLT_STOP_AT_WRITE=N kills this process with SIGKILL at its N-th write, fsync or rename;
DUOVOLT_FAIL_AT_WRITE=N:ENOSPC (or another name of errno) lets that one fail, N:SIGINT interrupts it;
DUOVOLT_COUNT_WRITES=FILE keeps their number in FILE.
"""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import xxhash

from .digest import digest_bytes, digest_file, file_blocks
from .directory import INDEX, MANIFEST, index_bytes
from .errors import CheckFailed, EnvironmentFault, InputError
from .lock import LOCK, DirectoryLock, require_regular
from .manifest import FileRecord, Manifest
from .numbers import whole_number
from .writeback import begin_writeback

JOURNAL = ".duovolt.journal"
FACTS = ".duovolt.facts"  # what a stage keeps for whoever resumes it
TEMPORARY = ".duovolt-tmp"
READ_AGAIN = 1 << 20  # bytes
WRITE_BEHIND = 16 << 20  # bytes written before the disk is asked to begin with them
NO_JSON = (msgspec.MsgspecError, UnicodeError, RecursionError)  # what decoding rubbish raises
WRITE_DOORS = ("DUOVOLT_STOP_AT_WRITE", "DUOVOLT_FAIL_AT_WRITE", "DUOVOLT_COUNT_WRITES")

_events = 0
_events_lock = threading.Lock()


def write_event() -> None:
    """Called before every write, fsync and rename of a stage: the place where the test doors act."""
    global _events
    if not any(os.environ.get(door) for door in WRITE_DOORS):
        return
    with _events_lock:
        _events += 1
        if counter := os.environ.get("DUOVOLT_COUNT_WRITES"):
            Path(counter).write_text(f"{_events}\n")
        if (stop := os.environ.get("DUOVOLT_STOP_AT_WRITE")) and _events == _number("DUOVOLT_STOP_AT_WRITE", stop):
            os.kill(os.getpid(), signal.SIGKILL)
        at, _, name = os.environ.get("DUOVOLT_FAIL_AT_WRITE", "").partition(":")
        if at and _events == _number("DUOVOLT_FAIL_AT_WRITE", at):
            _fail(name)


def _number(door: str, text: str) -> int:
    try:
        return whole_number(text)
    except ValueError as error:
        raise InputError(f"{door}: {error}.") from None


def _fail(name: str) -> None:
    """An error of the system by its name in `errno`, or SIGINT, as Ctrl-C sends it."""
    if name == "SIGINT":
        os.kill(os.getpid(), signal.SIGINT)
    else:
        number = getattr(errno, name)
        raise OSError(number, os.strerror(number))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn 'no space', 'read-only' and 'permission' into EnvironmentFault with the free space and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path if path.is_dir() else path.parent).free
            raise EnvironmentFault(
                f"{path}: the disk is full ({free / 1e9:.2f} GB free). Nothing half-written was kept under its final "
                "name; free some space and run the same command again, it resumes."
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE, errno.EFBIG):
            raise EnvironmentFault(f"{error.filename or path}: {error.strerror}.") from None
        raise


def require_space(directory: Path, needed: int) -> None:
    """Raises EnvironmentFault unless `needed` bytes (and a little for the file system) are free under `directory`."""
    place = directory
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed + (1 << 20):
        raise EnvironmentFault(
            f"{directory}: {needed / 1e9:.3f} GB needed, {free / 1e9:.3f} GB free. Nothing was written."
        )


def sync_directory(directory: Path) -> None:
    """Make renames in `directory` survive a power cut."""
    write_event()
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f".{path.name}{TEMPORARY}")


def _is_only_ours(path: Path) -> bool:
    """True for a regular file that has no other name: to write into it changes nothing else."""
    return path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1


class AtomicFile:
    """A file that appears under its final name only when whole: temporary name, fsync, rename.

    The mode follows the umask, or that of the file it replaces. `kept`: what an earlier run left under the temporary name
    is at hand, its first `left` bytes, and what this one leaves stays there if it is `worth_keeping`, unless it proves wrong
    (CheckFailed).
    """

    def __init__(self, path: Path, kept: bool = False) -> None:
        self.path = path
        self.left = 0
        self.worth_keeping = False
        self._kept = kept
        self._temporary = temporary(path)

    def __enter__(self) -> "AtomicFile":
        if self._kept and _is_only_ours(self._temporary):
            self._file = self._temporary.open("r+b", buffering=0)
            self.left = os.fstat(self._file.fileno()).st_size
        else:
            self._temporary.unlink(missing_ok=True)
            self._file = self._temporary.open("x+b", buffering=0)
        self._written = self._begun = 0
        if self.path.exists():
            os.fchmod(self._file.fileno(), self.path.stat().st_mode & 0o7777)
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append all of `data`."""
        view = memoryview(data).cast("B")
        while len(view):
            write_event()
            count = self._file.write(view)
            view = view[count:]
            self._written += count
        if self._written - self._begun >= WRITE_BEHIND:
            begin_writeback(self._file.fileno(), self._begun, self._written - self._begun)
            self._begun = self._written

    def read_left(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes begin .. end - 1 of what was left, a piece at a time, each valid until the next; fewer if there are fewer."""
        room = memoryview(bytearray(min(READ_AGAIN, max(0, end - begin))))
        while begin < end and (count := os.preadv(self._file.fileno(), [room[: end - begin]], begin)):
            yield room[:count]
            begin += count

    def keep(self, nbytes: int) -> None:
        """The next `nbytes` are there already."""
        self._file.seek(nbytes, os.SEEK_CUR)
        self._written += nbytes
        self._begun = self._written

    def skip(self, nbytes: int) -> None:
        """Append a hole: `nbytes` that read as zeros and take no room on most file systems."""
        write_event()
        self._file.truncate(self._file.seek(nbytes, os.SEEK_CUR))
        self._written += nbytes

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if kind is not None:
            self._file.close()
            if not (self._kept and self.worth_keeping) or issubclass(kind, CheckFailed):
                self._temporary.unlink(missing_ok=True)
            return
        if self.left > self._written:
            self._file.truncate(self._written)
        write_event()
        os.fsync(self._file.fileno())
        self._file.close()
        write_event()
        self._temporary.rename(self.path)
        sync_directory(self.path.parent)


def tidy(directory: Path) -> None:
    """Remove what a kill after the manifest's rename left in a finished directory: journal and temporary files."""
    for leftover in (directory / JOURNAL, directory / FACTS, *directory.glob(f".*{TEMPORARY}")):
        leftover.unlink(missing_ok=True)


def recheck_finished(directory: Path, manifest: Manifest) -> None:
    """Re-hash every file of a finished directory and tidy it. Raises CheckFailed for a missing or damaged one."""
    with DirectoryLock(directory):
        tidy(directory)
        for name, record in manifest.files.items():
            path = directory / name
            if not path.is_file() or path.stat().st_size != record.size or digest_file(path) != record.digest:
                raise CheckFailed(
                    f"{path}: missing or damaged in a finished directory. Remove {directory} and run this stage again."
                )


class JournalEntry(msgspec.Struct, frozen=True):
    """One finished file: its record, and whatever the stage wants back when it resumes."""

    name: str
    record: FileRecord
    note: dict[str, Any]


class Mark(msgspec.Struct, frozen=True):
    """How far `part`, a file not yet finished, had come: its first `bytes` have this digest, and the stage's `note`.

    Or, of a file to be repaired, the digests that its tensors should have.
    """

    part: str
    bytes: int = 0
    digest: str = ""
    tensors: dict[str, str] = {}
    note: dict[str, Any] = {}


class StageDirectory:
    """The output directory of one stage, entered as a context manager.

    `identity` names what is being written (conversion id, rank): a journal of another identity is refused, so that two
    conversions never mix in one directory.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.path = path
        self.identity = identity
        self.files: dict[str, FileRecord] = {}
        self.resumed: list[str] = []
        self._done: dict[str, JournalEntry] = {}
        self._marks: dict[str, list[Mark]] = {}

    def __enter__(self) -> "StageDirectory":
        with disk_errors(self.path):
            if self.path.exists() and not self.path.is_dir():
                raise InputError(f"{self.path}: exists and is not a directory.")
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.path)
            self._lock.__enter__()
            try:
                self._open()
            except BaseException:
                self._lock.__exit__()
                raise
        return self

    def _open(self) -> None:
        self._read_journal()  # refuses what is not this run's, and then nothing may be lost
        wanted = {temporary(self.path / name) for name in self._marks}
        for leftover in set(self.path.glob(f".*{TEMPORARY}")) - wanted:
            leftover.unlink()

    def _read_journal(self) -> None:
        journal = self.path / JOURNAL
        require_regular(journal)
        if not journal.exists():
            known = {LOCK, *(p.name for p in self.path.glob(f".*{TEMPORARY}"))}
            if strangers := [p.name for p in sorted(self.path.iterdir()) if p.name not in known]:
                raise InputError(
                    f"{self.path}: not empty ({', '.join(strangers[:4])}{', ...' if len(strangers) > 4 else ''}), and not "
                    "an interrupted run of this stage. Choose an empty or new directory."
                )
            self._append({"identity": self.identity})
            return
        # A line cut off by a kill is dropped: its file is simply written again.
        whole = journal.read_bytes().rpartition(b"\n")[0]
        os.truncate(journal, len(whole) + 1 if whole else 0)
        lines = whole.split(b"\n")
        try:
            started = msgspec.json.decode(lines[0])["identity"]
        except (*NO_JSON, KeyError, TypeError):
            started = None
        if started is None:
            journal.unlink()
            self._append({"identity": self.identity})
            return
        if started != self.identity:
            raise InputError(
                f"{self.path}: holds an interrupted run of something else ({started}; now {self.identity}): the source, "
                "the recipe or the rank changed in between. Remove the directory or choose another."
            )
        for line in lines[1:]:
            try:
                entry = msgspec.json.decode(line, type=JournalEntry)
                self._done[entry.name] = entry
                continue
            except NO_JSON:
                pass
            try:
                mark = msgspec.json.decode(line, type=Mark)
                if mark.part and Path(mark.part).name == mark.part:  # a file of this directory
                    self._marks.setdefault(mark.part, []).append(mark)
            except NO_JSON:
                continue

    def _append(self, value: Any, durable: bool = True) -> None:
        with (self.path / JOURNAL).open("ab", buffering=0) as handle:
            write_event()
            handle.write(msgspec.json.encode(value) + b"\n")
            if durable:
                write_event()
                os.fsync(handle.fileno())

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._lock.__exit__()

    def resume(self, name: str) -> dict[str, Any] | None:
        """The note of a file that an earlier run finished and that still hashes the same; None: write it."""
        entry, path = self._done.get(name), self.path / name
        if entry is None or not path.is_file() or path.stat().st_size != entry.record.size:
            return None
        if digest_file(path) != entry.record.digest:
            return None
        self.files[name] = entry.record
        self.resumed.append(name)
        return entry.note

    @contextmanager
    def create(self, name: str, kept: bool = False) -> Iterator[AtomicFile]:
        """An AtomicFile in this directory, with disk faults explained. `kept`: what `marks` speak of is at hand."""
        path = self.path / name
        with disk_errors(self.path):
            if (
                kept
                and not temporary(path).exists()
                and any(m.tensors for m in self.marks(name))
                and _is_only_ours(path)
            ):
                write_event()
                path.rename(temporary(path))  # to be repaired where it stands
            with AtomicFile(path, kept) as handle:
                yield handle

    def marks(self, name: str) -> list[Mark]:
        """What an earlier run noted of a file that it did not finish, oldest first."""
        return self._marks.get(name, [])

    def mark(self, name: str, written: int, digest: str, note: dict[str, Any] | None = None) -> None:
        """Note how far a file has come. A power cut may lose it, and then only work is lost: marks are proved."""
        with disk_errors(self.path):
            self._append(Mark(name, written, digest, note=note or {}), durable=False)

    def finished(self, name: str, record: FileRecord, note: dict[str, Any] | None = None) -> None:
        """Record a file that `create` has just written."""
        self.files[name] = record
        with disk_errors(self.path):
            self._append(JournalEntry(name, record, note or {}))

    def copy(self, source: Path, expected: FileRecord | None = None) -> None:
        """Copy a file, under its own name, unless an earlier run did. Raises CheckFailed if it is not `expected`."""
        if self.resume(source.name) is not None:
            return
        digest, size = xxhash.xxh3_128(), 0
        with self.create(source.name) as handle:
            for block in file_blocks(source):
                digest.update(block)
                size += len(block)
                handle.write(block)
            found = FileRecord(size=size, digest=digest.hexdigest())
            if expected not in (None, found):
                raise CheckFailed(f"{source}: {found}; the manifest says {expected}: changed since. Restore the file.")
        self.finished(source.name, found)

    def put(self, name: str, content: bytes) -> None:
        """Write a small file whole."""
        with self.create(name) as handle:
            handle.write(content)
        self.finished(name, FileRecord(size=len(content), digest=digest_bytes(content)))

    def put_index(self, weight_map: dict[str, str], total_size: int) -> None:
        """Write the safetensors index."""
        self.put(INDEX, index_bytes(weight_map, total_size))

    def seal(self, manifest: Manifest) -> Manifest:
        """Write the manifest last and drop the journal: the directory is finished."""
        sealed = manifest.sealed()
        with self.create(MANIFEST) as handle:
            handle.write(sealed.encode())
        self.finish()
        return sealed

    def finish(self) -> None:
        """Drop the journal: nothing is left to resume. A plain checkpoint ends here, without a manifest."""
        with disk_errors(self.path):
            (self.path / FACTS).unlink(missing_ok=True)
            write_event()
            (self.path / JOURNAL).unlink()
