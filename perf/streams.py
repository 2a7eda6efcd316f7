"""CUDA streams that are surely different ones."""

import functools

import torch


@functools.cache
def streams(device: torch.device, count: int) -> tuple[torch.cuda.Stream, ...]:
    """So many streams of a device, up to 32, no two of them the same; for the same arguments the same ones again.

    torch hands out the 32 streams of its pool in turn and then begins anew: two that were made at different times may be one,
    and what should run beside something else would wait for it.
    """
    assert 0 < count <= 32
    found: dict[int, torch.cuda.Stream] = {}
    while len(found) < count:
        stream = torch.cuda.Stream(device)
        found.setdefault(stream.cuda_stream, stream)
    return tuple(found.values())
