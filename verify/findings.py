"""What failed, as data: which file of which directory is not to be trusted, and what it can be made from again."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ..checkpoint.errors import DuovoltError
from ..checkpoint.manifest import Manifest, read_manifest
from .downloaded import PROOF as DOWNLOADED
from .ranks import rank_directories
from .report import Failure, Proof, Report

Stage = Literal["downloaded", "converted", "ranks"]
IDENTITY = "ranks: identity"
MADE_FROM = {"downloaded": "hub", "converted": "source", "ranks": "converted"}


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `directory` that failed a proof; `file` None: the directory as a whole.

    `fixable_from`: what it is made from again. `compared`: the directory is sound in itself, but differs from the stage
    before. `extra`: the file is nobody's, and can only be moved aside.
    """

    stage: Stage
    directory: str
    file: str | None
    tensor: str | None
    message: str
    fixable_from: str
    compared: bool = False
    extra: bool = False


@dataclass(frozen=True)
class Places:
    """The directories that were verified."""

    downloaded: Path | None = None
    converted: Path | None = None
    ranks: Path | None = None

    def rank_paths(self) -> list[Path]:
        """The directories of ranks, finished or not."""
        return rank_directories(self.ranks) if self.ranks is not None else []


def findings(report: Report, places: Places) -> list[Finding]:
    """The findings of a failed report, for the earliest stage that has any: later ones were compared with it.

    Damage that a directory's own digests show comes before what the comparison of directories shows: an unreadable file
    fails every comparison there is, and only the first names the culprit.
    """
    for stage in ("downloaded", "converted", "ranks"):
        found = [f for proof in report.failed for f in _of_proof(proof, places) if f.stage == stage]
        if found:
            return _distinct([f for f in found if not f.compared] or found)
    return []


def _distinct(found: list[Finding]) -> list[Finding]:
    """One finding a file, the first. A directory with damaged files is not given up as a whole: they may be all of it."""
    files = {f.directory for f in found if f.file is not None and not f.extra}
    kept: dict[tuple[str, str | None], Finding] = {}
    for finding in found:
        if finding.file is not None or finding.directory not in files:
            kept.setdefault((finding.directory, finding.file), finding)
    return list(kept.values())


def _of_proof(proof: Proof, places: Places) -> Iterator[Finding]:
    head, _, _ = proof.name.partition(": ")
    if proof.name == DOWNLOADED and places.downloaded is not None:
        for failure in proof.failures:
            yield _finding("downloaded", places.downloaded, _below(failure.file, places.downloaded), failure)
    elif head in ("converted", "source -> converted"):
        if places.converted is not None:
            yield from _placed(proof, "converted", [places.converted], compared=head != "converted")
    elif head.startswith(("rank", "converted -> ranks")):
        own = [path for path in places.rank_paths() if path.name == head]
        yield from _placed(proof, "ranks", own or places.rank_paths(), compared=not own)


def _placed(proof: Proof, stage: Stage, directories: list[Path], compared: bool) -> Iterator[Finding]:
    """Findings in the directory that a failure's file lies in; where it names none of them, in all."""
    if proof.failure_count > len(proof.failures):
        for directory in directories:
            yield _finding(stage, directory, None, Failure(message=f"{proof.failure_count} failures"))
        return
    manifests = {directory: _manifest(directory) for directory in directories}
    for failure in proof.failures:
        if failure.file is None and failure.tensor is None and proof.name == IDENTITY:
            continue  # how often a rank is there: another failure names the directory that is not what it should be
        sure = not compared or failure.index is not None or failure.tensor is None
        named = [d for d in directories if sure and failure.file is not None and _below(failure.file, d) is not None]
        if named:
            within = _below(failure.file, named[0])
            yield _finding(stage, named[0], None if within == "." else within, failure, compared)
            continue
        for directory in directories:
            files: list[str | None] = [*_files_of(failure, manifests[directory])]
            for name in files or [None]:
                yield _finding(stage, directory, name, failure, compared)


def _files_of(failure: Failure, manifest: Manifest | None) -> list[str]:
    """Files of a directory that hold what a failure speaks of: a stored tensor, a weight, or the source of one."""
    if manifest is None:
        return []
    if failure.tensor is None:
        name = Path(failure.file or "").name
        return [name] if name in manifest.files else []
    told = failure.tensor
    return sorted(
        {
            record.file
            for name, record in manifest.tensors.items()
            if told in (name, record.weight, *(ref.name for ref in record.sources))
        }
    )


def _finding(stage: Stage, directory: Path, file: str | None, failure: Failure, compared: bool = False) -> Finding:
    return Finding(
        stage=stage,
        directory=str(directory),
        file=file,
        tensor=failure.tensor,
        message=failure.message,
        fixable_from=MADE_FROM[stage],
        compared=compared,
        extra=failure.extra,
    )


def _below(file: str | None, directory: Path) -> str | None:
    """`file` as a name in `directory`, `.` for the directory itself; None if it lies elsewhere."""
    if file is None or not Path(file).is_relative_to(directory):
        return None
    return str(Path(file).relative_to(directory))


def _manifest(directory: Path) -> Manifest | None:
    try:
        return read_manifest(directory)
    except DuovoltError:
        return None
