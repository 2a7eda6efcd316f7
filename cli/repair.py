"""`duovolt verify --repair` and `--quarantine`: what `verify` found is made again by the stage that made it first.

`verify` only finds; this module hands its findings to `download`, `convert` and `shard`, each of which keeps the files
that are proved right and writes the others, under temporary names and by rename, as it always does.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint.directory import MANIFEST, Checkpoint
from ..checkpoint.download_record import read_record
from ..checkpoint.errors import CheckFailed, DuovoltError, InputError
from ..checkpoint.lock import LOCK, DirectoryLock
from ..checkpoint.manifest import has_manifest, read_manifest
from ..checkpoint.reopen import Sound, about_interrupted
from ..checkpoint.stage import FACTS, JOURNAL, TEMPORARY
from ..convert.download import download
from ..convert.download_progress import NoProgress
from ..convert.draft_head import LISTED
from ..convert.pipeline import convert
from ..convert.recipe import DEFAULT_RECIPE, Recipe, load_recipe, recorded_recipe
from ..convert.source import Source
from ..model.inventory import DRAFT_IDS
from ..model.partition import MAX_RANKS
from ..shard.split import shard
from ..verify.findings import Finding, Places
from ..verify.quarantine import quarantine
from .download import TerminalProgress
from .progress import byte_bar

RANK_NAME = re.compile(r"rank-(\d{1,3})-of-(\d{1,3})")


@dataclass
class Repairs:
    """Where to take what from, and what was done. `aside`: what belongs to nobody may be moved aside."""

    places: Places
    source: Path | None
    mtp_from: Path | None
    recipe: str | None
    endpoint: str | None
    aside: bool
    quiet: bool
    workers: int
    done: list[str] = field(default_factory=list)

    def finish_interrupted(self) -> None:
        """Finish what was cut off: a download with a pending record, a converted directory and ranks without manifest.

        Ranks that are not there at all are made too.
        """
        downloaded, converted = self.places.downloaded, self.places.converted
        if downloaded is not None and read_record(downloaded) is None and read_record(downloaded, pending=True):
            self._download(downloaded, "unfinished")
        if converted is not None and not has_manifest(converted):
            self._convert(converted, Sound([]), "unfinished")
        for path in self._wanted_ranks():
            if not has_manifest(path):
                self._shard(path, Sound([]), "unfinished" if path.is_dir() else "missing")

    def repair(self, found: Sequence[Finding]) -> None:
        """Make again what the findings name; all are of one stage.

        Raises InputError, with what to do, where that cannot be.
        """
        for directory in sorted({finding.directory for finding in found}):
            mine = [finding for finding in found if finding.directory == directory]
            path = Path(directory)
            self._clear_way(path, mine)
            if all(finding.extra and not _is_ours(finding.file or "") for finding in mine):
                continue  # moved aside, and nothing else is wrong
            keep = _sound(path, mine)
            why = _named(mine)
            if mine[0].stage == "downloaded":
                self._download(path, why)
            elif mine[0].stage == "converted":
                self._convert(path, keep, why)
            else:
                self._shard(path, keep, why)

    def move_aside(self, found: Sequence[Finding]) -> None:
        """Move the bad files of a download aside, so that the next `download` fetches them and nothing else."""
        for finding in found:
            if finding.stage != "downloaded" or finding.file is None:
                continue
            root = Path(finding.directory)
            if _there(root / finding.file):
                self._move(root, root / finding.file)

    def _move(self, root: Path, path: Path) -> None:
        with DirectoryLock(root):
            self.done.append(f"moved {path} to {quarantine(root, path)}")

    def _clear_way(self, root: Path, found: Sequence[Finding]) -> None:
        """Move aside what does not belong here, and what stands where a file must be and is none."""
        for finding in found:
            if finding.file is None or _is_ours(finding.file):
                continue
            path = root / finding.file
            in_the_way = _there(path) and not path.is_symlink() and not path.is_file()
            if not (finding.extra or in_the_way):
                continue
            if not self.aside:
                raise InputError(
                    f"{path}: {'not a regular file' if in_the_way else 'does not belong here'}, and --repair deletes "
                    "nothing. Remove it, or add --quarantine to have it moved aside."
                )
            self._move(root, path)

    def _download(self, path: Path, why: str) -> None:
        record = read_record(path) or read_record(path, pending=True)
        assert record is not None  # whoever found something wrong has read it
        progress = NoProgress() if self.quiet else TerminalProgress()
        try:
            download(
                record.repo, path, revision=record.revision, endpoint=self.endpoint, progress=progress, again=record
            )
        finally:
            progress.close()
        self.done.append(f"repaired {path} from {record.repo} at commit {record.commit}: {why}")

    def _recipe(self, path: Path) -> Recipe:
        if self.recipe is not None:
            return load_recipe(self.recipe)
        for place in (path, *self.places.rank_paths()):
            try:
                manifest = read_manifest(place)
                recipe = recorded_recipe(manifest.recipe, str(place / MANIFEST))
            except DuovoltError:
                continue
            ids = manifest.tensors.get(DRAFT_IDS)
            if ids is not None and any(ref.name == LISTED for ref in ids.sources):
                raise InputError(
                    f"{path}: its draft head was chosen by a list of tokens ({LISTED}), which no manifest keeps: name the "
                    "recipe that it was converted with, --recipe FILE."
                )
            return recipe
        recorded = about_interrupted(path).get("recipe")
        return load_recipe(DEFAULT_RECIPE) if recorded is None else recorded_recipe(recorded, str(path / JOURNAL))

    def _convert(self, path: Path, keep: Sound, why: str) -> None:
        if self.source is None:
            raise InputError(f"{path}: to be repaired ({why}) it has to be converted again in part: give --source.")
        total = 2 * Source.open(self.source, self.mtp_from).nbytes
        with byte_bar("repair converted", total, self.quiet) as advance:
            convert(self.source, path, self._recipe(path), self.workers, advance, self.mtp_from, keep=keep)
        self.done.append(f"repaired {path} from {self.source}: {why}")

    def _wanted_ranks(self) -> list[Path]:
        """Every rank directory that should be there, by the names of those that are."""
        if self.places.ranks is None:
            return []
        if has_manifest(self.places.ranks) or _rank_and_size(self.places.ranks):
            return [self.places.ranks]
        named = [_rank_and_size(path) for path in self.places.rank_paths()]
        sizes = {found[1] for found in named if found is not None}
        if len(sizes) != 1 or None in named:
            names = ", ".join(path.name for path in self.places.rank_paths())
            raise InputError(
                f"{self.places.ranks}: {names}: not the ranks of one split, and which of them are meant is not for "
                "--repair to say. Move the others away."
            )
        (size,) = sizes
        return [self.places.ranks / f"rank-{rank}-of-{size}" for rank in range(size)]

    def _shard(self, path: Path, keep: Sound, why: str) -> None:
        converted = self.places.converted
        found = _rank_and_size(path)
        if converted is None:
            raise InputError(f"{path}: to be repaired ({why}) it has to be cut again in part: give --converted.")
        if found is None:
            raise InputError(f"{path}: the name is not rank-R-of-N, so that it is not known which rank to make again.")
        rank, size = found
        total = sum(entry.nbytes for entry in Checkpoint.open(converted).tensors.values())
        with byte_bar(f"repair {path.name}", total, self.quiet) as advance:
            shard(converted, path.absolute().parent, size, rank, advance, {rank: keep})
        self.done.append(f"repaired {path} from {converted}: {why}")


def _rank_and_size(path: Path) -> tuple[int, int] | None:
    """R and N of a folder that `shard` would name so (`.` has the name of the folder it is); None for another name."""
    match = RANK_NAME.fullmatch(path.absolute().name)
    if match is None:
        return None
    rank, size = int(match[1]), int(match[2])
    fitting = rank < size <= MAX_RANKS and match[0] == f"rank-{rank}-of-{size}"
    return (rank, size) if fitting else None


def _there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _is_ours(name: str) -> bool:
    """Bookkeeping of an interrupted run, which the stage itself tidies away."""
    return name in (LOCK, JOURNAL, FACTS) or (name.startswith(".") and name.endswith(TEMPORARY))


def _sound(directory: Path, found: Sequence[Finding]) -> Sound:
    """The files of a finished directory that nothing was found against, and the tensors to be suspected in the others."""
    mine = [finding for finding in found if not finding.extra]
    bad = {finding.file for finding in mine}
    if None in bad:
        return Sound([])
    try:
        files = [name for name in read_manifest(directory).files if name not in bad]
    except DuovoltError:
        return Sound([])
    return Sound(files, {finding.tensor for finding in mine if finding.tensor is not None})


def _named(found: Sequence[Finding]) -> str:
    """The damaged files for one line of text."""
    names = sorted({finding.file or "all of it" for finding in found if not finding.extra})
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "") or "strange files"


def unrepaired(found: Sequence[Finding]) -> CheckFailed:
    """The error for findings that a repair did not change."""
    return CheckFailed(
        f"still wrong after a repair: {_named(found)} in {found[0].directory} ({found[0].message}). Is the "
        f"{found[0].fixable_from} that it was made from the right one?"
    )
