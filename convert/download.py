"""Fetching a checkpoint from a hub: plan, check the disk, fetch in parallel, prove every byte, record the commit.

Every step can be killed at any moment; running the same command again continues where the bytes end, and the result
is the one of an unbroken run.
"""

import glob
import shutil
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.directory import DOWNLOAD_RECORD, INDEX, MANIFEST, MAX_JSON, Checkpoint
from ..checkpoint.download_record import PENDING, DownloadRecord, finish_record, read_record
from ..checkpoint.errors import EnvironmentFault, InputError
from ..checkpoint.lock import LOCK, DirectoryLock
from ..checkpoint.stage import TEMPORARY, disk_errors, require_space
from .download_progress import NoProgress, Progress
from .fetchlist import FetchList, choose, weight_files
from .hub import Listing, Patience, RemoteFile, Stopped, list_repo
from .hubcache import take_from_cache
from .localfile import LocalFile
from .transfer import Transfer

MAX_WORKERS = 64
FIRST_PAUSE = 0.5  # seconds before the first retry; doubles with each


@dataclass(frozen=True)
class FileReport:
    """One file of the plan. `present`: bytes that were here before; `defect`: why it must be fetched, None if right."""

    name: str
    size: int
    digest_kind: str
    digest: str
    present: int
    defect: str | None


@dataclass(frozen=True)
class DownloadReport:
    """What a download did, or with `dry_run` would do. `needed` bytes to fetch, `free` bytes on the target's disk."""

    repo: str
    revision: str
    commit: str
    directory: Path
    dry_run: bool
    files: list[FileReport]
    skipped: dict[str, str]
    total: int
    needed: int
    free: int


def download(
    repo: str,
    dst: Path,
    *,
    revision: str | None = None,
    endpoint: str | None = None,
    include: Sequence[str] = (),
    workers: int = 4,
    dry_run: bool = False,
    progress: Progress | None = None,
    again: DownloadRecord | None = None,
) -> DownloadReport:
    """Fetch `repo` at `revision` (default main) into `dst`: every file its index names, and every side file.

    endpoint: a hub's URL, None for the library's default. include: globs that narrow the side files. dry_run: plan
    and write nothing. again: fetch exactly what this record lists, at its commit, as `repo` and `revision` were asked
    for then. Raises InputError (names, access, revision), CheckFailed (content), EnvironmentFault (disk,
    network).
    """
    if not 1 <= workers <= MAX_WORKERS:
        raise InputError(f"--workers {workers}: choose 1 to {MAX_WORKERS}.")
    if dst.exists() and not dst.is_dir():
        raise InputError(f"{dst}: exists and is not a directory.")
    try:
        with disk_errors(dst):
            pinned = None if again is None else again.commit
            wanted = include if again is None else [glob.escape(name) for name in again.files]
            job = _Download(repo, dst, revision, endpoint, wanted, workers, progress or NoProgress(), pinned)
            return job.plan(dry_run=True) if dry_run else job.run()
    except OSError as error:
        raise EnvironmentFault(f"{error.filename or dst}: {error.strerror or error}.") from error


class _Download:
    """One run: the listing and the choice are made once, the state of the directory whenever `plan` is called."""

    def __init__(
        self,
        repo: str,
        dst: Path,
        revision: str | None,
        endpoint: str | None,
        include: Sequence[str],
        workers: int,
        progress: Progress,
        commit: str | None,
    ) -> None:
        self._dst = dst
        self._workers = workers
        self._progress = progress
        self._stop = threading.Event()
        self._transfer = Transfer(self._stop, progress, FIRST_PAUSE)
        patience = Patience(self._stop, first_seconds=FIRST_PAUSE)
        self._listing: Listing = list_repo(repo, commit or revision, endpoint, patience)
        self._listing.revision = revision or self._listing.revision
        self._index = self._read_index(patience)
        self._choice: FetchList = choose(self._listing, weight_files(self._listing, self._index), include)
        self._remotes = [self._listing.file(name, patience) for name in self._choice.files]

    def _read_index(self, patience: Patience) -> bytes | None:
        if INDEX not in self._listing.files:
            return None
        remote = self._listing.file(INDEX, patience)
        if remote.size > MAX_JSON:
            raise InputError(f"{remote.name}: {remote.size} bytes, more than the {MAX_JSON} allowed for a JSON file.")
        local = LocalFile(self._dst, remote, self._listing.commit)
        if local.defect(self._stop, lambda count: None) is None:
            return local.final.read_bytes()
        return self._transfer.read(remote)

    def plan(self, dry_run: bool) -> DownloadReport:
        """Compare the directory with the listing, reading (hashing) what is there; writes nothing."""
        if MANIFEST not in self._listing.files and (self._dst / MANIFEST).exists():
            raise InputError(f"{self._dst}: holds a converted checkpoint ({MANIFEST}); choose another directory.")
        locals_ = {remote.name: self._local(remote) for remote in self._remotes}
        on_disk = sum(item.remote.size for item in locals_.values() if item.final.is_file())
        self._progress.begin("check", on_disk, 0)
        reports: dict[str, FileReport] = {}

        def check(item: LocalFile) -> None:
            remote, defect = item.remote, item.defect(self._stop, self._progress.advance)
            present = remote.size if defect is None else item.partial()[0]
            report = FileReport(remote.name, remote.size, remote.digest_kind, remote.digest, present, defect)
            reports[remote.name] = report

        self._each(check, list(locals_.values()))
        files = [reports[name] for name in locals_]
        total, present = sum(file.size for file in files), sum(file.present for file in files)
        return DownloadReport(
            self._listing.repo,
            self._listing.revision,
            self._listing.commit,
            self._dst,
            dry_run,
            files,
            self._choice.skipped,
            total,
            total - present,
            _free(self._dst),
        )

    def run(self) -> DownloadReport:
        """Make the directory complete and put the record into it."""
        self._dst.mkdir(parents=True, exist_ok=True)
        with DirectoryLock(self._dst):
            report = self.plan(dry_run=False)
            wanted = [
                self._local(remote) for remote, file in zip(self._remotes, report.files, strict=True) if file.defect
            ]
            self._clear_stale(wanted)
            require_space(self._dst, report.needed)
            record = DownloadRecord.of(report.repo, report.revision, report.commit, self._remotes)
            unfinished = bool(wanted) or (self._dst / PENDING).exists() or self._recorded() != record
            if unfinished:
                record.write_pending(self._dst)
            for file in report.files:
                if file.defect not in (None, "missing"):
                    self._progress.notice(f"{file.name}: {file.defect}; fetched anew")
            self._progress.begin("fetch", report.total, report.total - report.needed)
            manifest = [item for item in wanted if item.remote.name == MANIFEST]
            self._each(self._fetch, [item for item in wanted if item not in manifest])
            self._each(self._fetch, manifest)
            self._sweep()
            if unfinished:
                finish_record(self._dst)
        self._look()
        return report

    def _local(self, remote: RemoteFile) -> LocalFile:
        return LocalFile(self._dst, remote, self._listing.commit)

    def _fetch(self, item: LocalFile) -> None:
        if item.remote.name == INDEX and self._index is not None:
            item.put(self._index)
            self._progress.advance(len(self._index))
        elif take_from_cache(self._listing.repo, item):
            self._progress.advance(item.remote.size)
            self._progress.notice(f"{item.remote.name}: taken from the hub's cache on this machine")
        else:
            self._transfer.fetch(item)

    def _clear_stale(self, wanted: Sequence[LocalFile]) -> None:
        for item in wanted:
            why = item.partial()[1]
            if why is not None:
                self._progress.notice(f"{item.remote.name}: the partial is useless ({why}), thrown away")
                item.discard_partial()

    def _recorded(self) -> DownloadRecord | None:
        try:
            return read_record(self._dst)
        except InputError:
            return None  # broken: written anew

    def _sweep(self) -> None:
        """Remove what killed runs left behind: our own partials and temporary files, nobody else's."""
        for folder in {(self._dst / remote.name).parent for remote in self._remotes}:
            for leftover in folder.glob(f".*{TEMPORARY}"):
                leftover.unlink()
            for sidecar in folder.glob(".*.part.json"):
                part = sidecar.with_suffix("")
                if part.exists():
                    self._progress.notice(f"{part.name}: a partial of a file that this revision lacks, removed")
                part.unlink(missing_ok=True)
                sidecar.unlink()

    def _look(self) -> None:
        """Say what a later stage would stumble over. The bytes are the hub's all the same."""
        ours = {*self._choice.files, DOWNLOAD_RECORD, LOCK}
        if strangers := sorted(path.name for path in self._dst.iterdir() if path.is_file() and path.name not in ours):
            self._progress.notice(f"not part of this download, left alone: {', '.join(strangers)}")
        try:
            Checkpoint.open(self._dst)
        except InputError as error:
            self._progress.notice(f"every byte is the hub's, but `duovolt convert` will refuse them: {error}")

    def _each(self, work: Callable[[LocalFile], None], items: Sequence[LocalFile]) -> None:
        """`work` on every item, on several threads; the first failure ends all of them and is raised."""
        queue = deque(items)
        failures: list[BaseException] = []

        def loop() -> None:
            try:
                while not self._stop.is_set():
                    work(queue.popleft())
            except (IndexError, Stopped):
                return
            except BaseException as error:
                failures.append(error)
                self._stop.set()
                self._transfer.abort()

        # Daemons: a worker that hangs in a system call must not keep an interrupted program alive.
        threads = [threading.Thread(target=loop, daemon=True) for _ in range(min(self._workers, len(items)))]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._stop.set()
            self._transfer.abort()
            for thread in threads:
                thread.join(timeout=3)
            raise
        if failures:
            raise failures[0]


def _free(directory: Path) -> int:
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free
