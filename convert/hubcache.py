"""Files that another program has fetched into the hub's cache on this machine: linked, not fetched and not copied."""

import os
from pathlib import Path

from huggingface_hub import constants

from ..checkpoint.digest import file_blocks
from ..checkpoint.stage import TEMPORARY, disk_errors, sync_directory, write_event
from .localfile import LocalFile


def cached_blob(repo: str, item: LocalFile) -> Path | None:
    """The cache's file with the content of `item`, named by its digest there, if it is whole; hashed, not trusted."""
    blob = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "blobs" / item.remote.digest
    try:
        if blob.is_symlink() or not blob.is_file() or blob.stat().st_size != item.remote.size:
            return None
        digest = item.remote.new_digest()
        for block in file_blocks(blob):
            digest.update(block)
    except OSError:
        return None  # a cache of somebody else's, or a broken one: fetch the file
    return blob if digest.hexdigest() == item.remote.digest else None


def take_from_cache(repo: str, item: LocalFile) -> bool:
    """Give `item` its final name from the hub's cache: by a hard link, or a copy where the disk knows no link to there.

    Neither program changes such a file in place, so the two names can share it. False if the cache does not have it.
    """
    blob = cached_blob(repo, item)
    if blob is None:
        return False
    temporary = item.final.with_name(f".{item.final.name}{TEMPORARY}")
    with disk_errors(item.final):
        item.final.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        try:
            os.link(blob, temporary)
        except OSError:
            _copy(blob, item)
            return True
        write_event()
        temporary.rename(item.final)
        sync_directory(item.final.parent)
        item.discard_partial()
    return True


def _copy(blob: Path, item: LocalFile) -> None:
    with item.writing() as writer:
        writer.restart()
        for block in file_blocks(blob):
            writer.append(block)
        writer.install()
