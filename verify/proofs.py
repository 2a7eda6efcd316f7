"""`verify`: every proof that the given directories allow, one after the other; a failed one does not stop the rest."""

from pathlib import Path

from ..checkpoint.bands import CanonicalReader
from ..checkpoint.errors import InputError
from .downloaded import prove_downloaded
from .draft import prove_draft_head
from .ranks import RankSet, open_ranks, prove_lineage, prove_partition, prove_replicas, rank_directories
from .report import Report
from .scan import BytesProofs, scan
from .source import open_source, prove_source, with_second
from .stage import StageView, open_stage, prove_inventory
from .whole import prove_joined
from .workers import Advance


def work_bytes(source: Path | None, converted: Path | None, ranks: Path | None, downloaded: Path | None = None) -> int:
    """About how many bytes `verify` will read, for a progress bar. Raises InputError for a missing directory.

    A source is compared with words that are read a second time, which is not counted.
    """

    def size(directory: Path) -> int:
        if not directory.is_dir():
            raise InputError(f"{directory}: not a directory.")
        return sum(child.stat().st_size for child in directory.iterdir() if child.is_file())

    directories = [path for path in (downloaded, source, converted) if path is not None]
    return sum(map(size, directories + (rank_directories(ranks) if ranks is not None else [])))


def verify(
    source: Path | None = None,
    converted: Path | None = None,
    ranks: Path | None = None,
    advance: Advance | None = None,
    mtp_from: Path | None = None,
    downloaded: Path | None = None,
) -> Report:
    """Prove what can be proved of a source, a converted directory, and the folder of its ranks (or one rank).

    `mtp_from`: the second source that the MTP layer was taken from. `downloaded`: a directory that `download` wrote, the
    source or another, to be compared with the hub's own digests. `advance` is called with bytes read. The report
    holds failures; InputError is raised only where there is nothing to check: a missing, unfinished or wrong kind of
    directory.
    """
    if source is None and converted is None and ranks is None and downloaded is None:
        raise InputError("nothing to verify: give --downloaded, --source, --converted or --ranks, or several of them.")
    if source is not None and converted is None and ranks is None:
        raise InputError(
            f"{source}: a source proves nothing alone. Give --converted or --ranks, or --downloaded for it."
        )
    tell = advance or (lambda count: None)
    report = Report()
    if downloaded is not None:
        prove_downloaded(downloaded, report, tell)
    bytes_proofs: list[BytesProofs] = []
    whole = _converted(converted, report, bytes_proofs) if converted is not None else None
    rank_set = _ranks(ranks, report, bytes_proofs) if ranks is not None else None
    in_step = rank_set.views if rank_set is not None and rank_set.complete else []
    found = scan([proofs.view for proofs in bytes_proofs if proofs.view not in in_step], in_step, tell)
    for proofs in bytes_proofs:
        proofs.judge(found)
    reader: CanonicalReader | None = whole
    view = whole
    if rank_set is not None:
        prove_partition(rank_set, report)
        prove_replicas(rank_set, report)
        if whole is not None:
            prove_lineage(whole, rank_set, report)
        joined = prove_joined(rank_set, whole, found.joined, report)
        if converted is None and joined is not None:
            reader, view = joined, rank_set.views[0]
    if reader is not None and view is not None:
        prove_draft_head(view, reader, report)
    if source is not None:
        checkpoint = open_source(source, report)
        if checkpoint is None or reader is None or view is None:
            report.skip("source -> converted", "needs a readable source, and a converted directory or all its ranks")
        else:
            if mtp_from is not None:
                checkpoint = with_second(checkpoint, mtp_from)
            prove_source(checkpoint, view, reader, report, tell)
    return report


def _converted(path: Path, report: Report, bytes_proofs: list[BytesProofs]) -> StageView | None:
    view = open_stage(path, "converted", report)
    if view is None:
        return None
    if view.manifest.stage != "converted":
        raise InputError(f"{path}: holds rank {view.manifest.tp_rank} of {view.manifest.tp_size}. Use --ranks for it.")
    prove_inventory(view, report)
    bytes_proofs.append(BytesProofs.begin(view, report))
    return view


def _ranks(path: Path, report: Report, bytes_proofs: list[BytesProofs]) -> RankSet | None:
    ranks = open_ranks(path, report)
    if ranks is None:
        return None
    for view in ranks.views:
        prove_inventory(view, report)
        bytes_proofs.append(BytesProofs.begin(view, report))
    return ranks
