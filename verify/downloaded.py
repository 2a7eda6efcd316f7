"""A download is what the hub described: every file of its record, size and content digest."""

import stat
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.digest import file_blocks
from ..checkpoint.directory import DOWNLOAD_RECORD, INDEX, read_json
from ..checkpoint.download_record import ContentDigest, DownloadedFile, read_record
from ..checkpoint.errors import InputError
from .report import Report

Advance = Callable[[int], None]
PROOF = "downloaded: bytes of files"


def prove_downloaded(path: Path, report: Report, advance: Advance) -> None:
    """Compare every file that the record names with it. Raises InputError without a record, or with a broken one."""
    if not path.is_dir():
        raise InputError(f"{path}: not a directory.")
    record = read_record(path)
    if record is None:
        raise InputError(f"{path}: no finished download: it has no {DOWNLOAD_RECORD}. Run `duovolt download` for it.")
    if not record.files:
        raise InputError(
            f"{path / DOWNLOAD_RECORD}: names no files, so nothing can be proved. Run `duovolt download` again."
        )
    proof = report.begin(PROOF)
    for name in sorted(_shards_named(path) - record.files.keys()):
        proof.fail("named by the index, but not by the record of the download", file=str(path / name))
    for name, file in record.files.items():
        try:
            wrong = _difference(path, name, file, advance)
        except OSError as error:
            wrong = (f"cannot be read ({error.strerror or error})", None, None)
        if wrong is not None:
            proof.fail(wrong[0], file=str(path / name), found=wrong[1], expected=wrong[2])
    total = sum(file.size for file in record.files.values())
    proof.detail = (
        f"{len(record.files)} files, {total / 1e6:,.2f} MB, as {record.repo} has them at commit {record.commit}"
    )


def _shards_named(path: Path) -> set[str]:
    """The files of the index; none where there is no index that can be read."""
    try:
        index = read_json(path / INDEX)
    except (InputError, OSError):
        return set()
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    return {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()


def _difference(
    root: Path, name: str, file: DownloadedFile, advance: Advance
) -> tuple[str, str | None, str | None] | None:
    """(what, found, expected) of the first thing that is wrong with a file; None if it is the hub's."""
    path = root / name
    for parent in list(path.relative_to(root).parents)[:-1]:
        if (root / parent).is_symlink():
            return f"{parent} is a link, where the download made a directory", None, None
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return "missing", None, None
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file", None, None
    if status.st_size != file.size:
        return "size in bytes", str(status.st_size), str(file.size)
    digest = ContentDigest(file.digest_kind, file.size)
    for block in file_blocks(path):
        digest.update(block)
        advance(len(block))
    found = digest.hexdigest()
    return None if found == file.digest else (file.digest_kind, found, file.digest)
