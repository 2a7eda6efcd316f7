"""Which stored tensor goes into which file: the same plan for converted and rank directories."""

from collections.abc import Sequence

from .manifest import FORMAT_VERSION
from .writer import ITEMSIZE, Planned


def plan_files(groups: Sequence[Sequence[Planned]], max_shard_bytes: int) -> list[tuple[str, list[Planned]]]:
    """(file name, its tensors in storage order) for groups of tensors that must not cross files.

    Groups stay in order; a new file starts where the next group would pass `max_shard_bytes` (a larger group gets a
    file of its own). Within a file wide elements come first, so that every tensor is aligned to its element.
    """
    files: list[list[Planned]] = []
    filled = 0
    for group in groups:
        size = sum(tensor.nbytes for tensor in group)
        if not files or (filled and filled + size > max_shard_bytes):
            files.append([])
            filled = 0
        files[-1].extend(group)
        filled += size
    return [
        (f"model-{number:05}-of-{len(files):05}.safetensors", sorted(tensors, key=lambda t: -ITEMSIZE[t.dtype]))
        for number, tensors in enumerate(files, 1)
    ]


def file_metadata(conversion_id: str, tp_size: int | None = None, tp_rank: int | None = None) -> dict[str, str]:
    """`__metadata__` of every file we write: identity is read from the weights, never from a path."""
    metadata = {
        "format": "pt",
        "duovolt.format_version": str(FORMAT_VERSION),
        "duovolt.conversion_id": conversion_id,
    }
    if tp_size is not None:
        metadata |= {"duovolt.tp_size": str(tp_size), "duovolt.tp_rank": str(tp_rank)}
    return metadata
