"""`duovolt download`: fetch a checkpoint from a hub, resumed by byte range and proved by content digest."""

import argparse
import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from ..checkpoint.errors import EnvironmentFault, InputError
from ..convert.download import DownloadReport, download
from ..convert.download_progress import NoProgress
from .numbers import whole
from .reads import ALWAYS, Reads

EPILOG = """\
examples:
  duovolt download Qwen/Qwen3.8-27B source/
  duovolt download Qwen/Qwen3.8-27B source/ --revision main --dry-run

Every file that the index names and every side file is fetched; weights in other forms (pickles, GGUF) are not. Run the
same command again after an interruption: it hashes what is there and asks for the missing bytes only. What lies in the
hub's cache on this machine is linked (copied on another disk) after its digest was checked. The commit is
written to DST/duovolt-download.json when everything is there and right.
The token comes from HF_TOKEN or `hf auth login`, and goes to the endpoint alone.
"""


READS = Reads({ALWAYS: "repo dst revision endpoint include workers dry_run json"})


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EPILOG
    parser.add_argument("repo", metavar="REPO", help="repository, such as Qwen/Qwen3.8-27B")
    parser.add_argument("dst", metavar="DST", help="directory to fetch into; made if need be")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit (default: main)")
    parser.add_argument("--endpoint", metavar="URL", help="hub or mirror (default: HF_ENDPOINT, or the public hub)")
    parser.add_argument(
        "--include",
        metavar="GLOB",
        action="append",
        default=[],
        help="fetch only files that match (may be repeated); what the checkpoint needs must be among them",
    )
    parser.add_argument("--workers", metavar="N", type=whole, default=4, help="files fetched at once (default: 4)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; write nothing")
    parser.add_argument("--json", action="store_true", help="print the plan or the outcome as JSON")


def run(args: argparse.Namespace) -> int:
    """Download, or with --dry-run print what a download would do."""
    if not args.dst.strip():
        raise InputError("DST is empty: name a directory.")
    progress = NoProgress() if args.quiet else TerminalProgress()
    try:
        report = download(
            args.repo,
            Path(args.dst),
            revision=args.revision,
            endpoint=args.endpoint,
            include=args.include,
            workers=args.workers,
            dry_run=args.dry_run,
            progress=progress,
        )
    except KeyboardInterrupt:
        if args.debug:
            raise
        progress.close()
        print("duovolt: interrupted; what is there is kept, and the same command resumes.", file=sys.stderr)
        return 130
    finally:
        progress.close()
    if args.json:
        print(json.dumps(asdict(report), indent=2, default=str))
    elif not args.quiet:
        print("\n".join(_plan(report) if args.dry_run else _outcome(report)))
    if args.dry_run and report.needed > report.free:
        raise EnvironmentFault(f"{report.directory}: {_size(report.needed)} needed, {_size(report.free)} free.")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 10_000_000 else f"{count} bytes"


def _plan(report: DownloadReport) -> list[str]:
    lines = [f"{report.repo} at {report.commit} (asked: {report.revision}) to {report.directory}"]
    for file in report.files:
        state = "there" if file.defect is None else file.defect
        if file.defect is not None and file.present:
            state += f", partial of {file.present} bytes"
        lines.append(f"  {file.size:>14,}  {file.name}  ({state})")
    lines += [f"  {'skipped':>14}  {name}  ({why})" for name, why in report.skipped.items()]
    lines.append(
        f"{len(report.files)} files, {_size(report.total)}; {_size(report.total - report.needed)} there, "
        f"{_size(report.needed)} to fetch, {_size(report.free)} free. Nothing was written."
    )
    return lines


def _outcome(report: DownloadReport) -> list[str]:
    fetched = sum(file.defect is not None for file in report.files)
    lines = [f"skipped {name} ({why})" for name, why in report.skipped.items()]
    lines.append(
        f"{report.repo} at {report.commit}: {len(report.files)} files, {_size(report.total)}, every digest checked; "
        f"{fetched} fetched ({_size(report.needed)}). In {report.directory}"
    )
    return lines


class TerminalProgress:
    """Notices on stderr, and a bar when it is a terminal."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bar: tqdm | None = None

    def begin(self, phase: str, total: int, done: int) -> None:
        """Start the bar of a phase."""
        self.close()
        if total and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, desc=phase, unit="B", unit_scale=True, leave=False)

    def advance(self, count: int) -> None:
        """Move the bar."""
        with self._lock:
            if self._bar is not None:
                self._bar.update(count)

    def notice(self, text: str) -> None:
        """One line, above the bar."""
        with self._lock:
            tqdm.write(f"duovolt: {text}", file=sys.stderr)

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._bar is not None:
                self._bar.close()
                self._bar = None
