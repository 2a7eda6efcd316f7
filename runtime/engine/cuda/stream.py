"""A directory's weight files, read once from front to back, straight to a device, with every digest checked on the way.

Reads, digests and copies overlap: blocks go round in a few buffers (pinned for a card), each read by several threads at
once, so that the disk always has something to do; tensors and files are digested beside one another in two threads.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from ....checkpoint.container import Header, TensorEntry
from ....checkpoint.directory import Checkpoint
from ....checkpoint.errors import InputError, naming
from ....checkpoint.manifest import Manifest
from ..digests import check_file, check_sizes, check_tensor

BLOCK_BYTES = 32 << 20
BUFFERS = 4
READERS = 4  # threads on one block: one alone does not fill a fast disk's queue
READ_AHEAD = 2


@dataclass(frozen=True)
class StreamReport:
    """What reading cost. seconds: all of it; digest_seconds: work of the digest threads; waited: for them alone."""

    nbytes: int
    seconds: float
    digest_seconds: float
    waited: float

    def __str__(self) -> str:
        rate = self.nbytes / 1e9 / max(self.seconds, 1e-9)
        return (
            f"{self.nbytes / 1e9:.2f} GB in {self.seconds:.2f} s ({rate:.2f} GB/s); digests "
            f"{self.digest_seconds:.2f} s beside it, waited {self.waited:.2f} s for them"
        )


@dataclass
class _Block:
    """Bytes begin .. end of a file, at the start of the buffer `whole`, which is used again when all is done with them."""

    header: Header
    begin: int
    end: int
    whole: Tensor
    reads: list[Future[None]]
    digests: list[Future[None]] = field(default_factory=list)
    copied: torch.cuda.Event | None = None

    def view(self, begin: int, end: int) -> Tensor:
        """Bytes begin .. end of the file, uint8."""
        return self.whole[begin - self.begin : end - self.begin]

    def pieces(self) -> Iterator[tuple[TensorEntry, int, int]]:
        """Each tensor with a part in this block, and where in the file that part begins and ends."""
        for entry in self.header.tensors.values():
            begin, end = max(entry.begin, self.begin), min(entry.end, self.end)
            if begin < end or (entry.nbytes == 0 and self.begin <= entry.begin < self.end):
                yield entry, begin, end


class _Digests:
    """Digests of one file and of its tensors, in two threads; raises CheckFailed where they are not the manifest's."""

    def __init__(self, manifest: Manifest | None) -> None:
        self._manifest = manifest
        self._threads = [ThreadPoolExecutor(1) for _ in range(2 if manifest is not None else 0)]
        self._file, self._tensor = xxhash.xxh3_128(), xxhash.xxh3_128()
        self.seconds = 0.0

    def take(self, block: _Block) -> list[Future[None]]:
        """Queue a block; blocks of a file come in order."""
        parts = (self._tensors, self._whole)
        return [thread.submit(part, block) for thread, part in zip(self._threads, parts, strict=False)]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)

    def _tensors(self, block: _Block) -> None:
        begun = time.perf_counter()
        assert self._manifest is not None
        for entry, begin, end in block.pieces():
            if begin == entry.begin:
                self._tensor.reset()
            self._tensor.update(block.view(begin, end).numpy().data)
            if end == entry.end:
                check_tensor(entry, self._manifest, self._tensor.hexdigest())
        self.seconds += time.perf_counter() - begun

    def _whole(self, block: _Block) -> None:
        assert self._manifest is not None
        if block.begin == 0:
            self._file.reset()
        self._file.update(block.view(block.begin, block.end).numpy().data)
        if block.end == block.header.size:
            check_file(block.header, self._manifest, self._file.hexdigest())


class _Pipeline:
    """Blocks on their way: `ahead` are being read, `busy` are digested and copied, `free` are buffers for the next."""

    def __init__(
        self,
        digests: _Digests,
        place: Callable[[str], Tensor],
        complete: Callable[[str], None],
        block_bytes: int,
        on_card: bool,
    ) -> None:
        self.waited = 0.0
        self._digests, self._place, self._complete, self._on_card = digests, place, complete, on_card
        self._readers = ThreadPoolExecutor(READERS)
        self._free = deque(torch.empty(block_bytes, dtype=torch.uint8, pin_memory=on_card) for _ in range(BUFFERS))
        self._ahead: deque[_Block] = deque()
        self._busy: deque[_Block] = deque()
        self._places: dict[str, Tensor] = {}
        self._block_bytes = block_bytes

    def file(self, header: Header) -> None:
        """Read one file; its last blocks may still be digested and copied when this returns."""
        with naming(header.path):
            handle = os.open(header.path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for begin in range(0, header.size, self._block_bytes):
                if not self._free:
                    self._release()
                whole, end = self._free.popleft(), min(begin + self._block_bytes, header.size)
                reads = _read(self._readers, handle, header.path, begin, whole[: end - begin])
                self._ahead.append(_Block(header, begin, end, whole, reads))
                if len(self._ahead) == READ_AHEAD:
                    self._consume()
            while self._ahead:
                self._consume()
        finally:
            for block in self._ahead:  # after a failure: nobody may read on once the file is closed
                wait(block.reads)
            os.close(handle)

    def finish(self) -> None:
        """Wait for everything that is under way."""
        while self._busy:
            self._release()

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)

    def _release(self) -> None:
        """Wait until the oldest block's buffer may be used again."""
        block = self._busy.popleft()
        since = time.perf_counter()
        for work in block.digests:
            work.result()
        self.waited += time.perf_counter() - since
        if block.copied is not None:
            block.copied.synchronize()
        self._free.append(block.whole)

    def _consume(self) -> None:
        """Digest and copy the oldest block that was read."""
        block = self._ahead[0]  # there until all of it is read: a failure waits for the others
        for read in block.reads:
            read.result()
        self._ahead.popleft()
        block.digests = self._digests.take(block)
        for entry, begin, end in block.pieces():
            if begin == entry.begin:
                self._places[entry.name] = self._place(entry.name)
            there = self._places[entry.name][begin - entry.begin : end - entry.begin]
            there.copy_(block.view(begin, end), non_blocking=True)
            if end == entry.end:
                del self._places[entry.name]
                self._complete(entry.name)
        if self._on_card:
            block.copied = torch.cuda.Event()
            block.copied.record()
        self._busy.append(block)


def stream(
    checkpoint: Checkpoint,
    manifest: Manifest | None,
    device: torch.device,
    place: Callable[[str], Tensor],
    complete: Callable[[str], None],
    block_bytes: int = BLOCK_BYTES,
) -> StreamReport:
    """Read every tensor of the directory once.

    `place(name)`, called as its first byte arrives: uint8 [nbytes] on `device`, which the bytes are copied to on torch's
    current stream; `complete(name)` once the last copy is on the stream. `manifest` None: no digests are known.

    Raises CheckFailed naming the tensor (or file) whose digest differs, InputError for a file that is not the
    manifest's size or ends early.
    """
    begun = time.perf_counter()
    headers = list(checkpoint.headers.values())
    if manifest is not None:
        check_sizes(headers, manifest)
    largest = min(block_bytes, max(header.size for header in headers))
    digests = _Digests(manifest)
    pipeline = _Pipeline(digests, place, complete, largest, device.type == "cuda")
    try:
        for header in headers:
            pipeline.file(header)
        pipeline.finish()
    finally:
        pipeline.close()
        digests.close()
    nbytes = sum(header.size for header in headers)
    return StreamReport(nbytes, time.perf_counter() - begun, digests.seconds, pipeline.waited)


def _read(pool: ThreadPoolExecutor, file: int, path: Path, begin: int, buffer: Tensor) -> list[Future[None]]:
    """Fill `buffer` from byte `begin` of the file on, in a few parts at once."""
    share = -(-len(buffer) // READERS)
    return [
        pool.submit(_read_part, file, path, begin + offset, buffer[offset : offset + share])
        for offset in range(0, len(buffer), share)
    ]


def _read_part(file: int, path: Path, begin: int, buffer: Tensor) -> None:
    view = buffer.numpy().data
    while len(view):
        with naming(path):
            got = os.preadv(file, [view], begin)
        if got == 0:
            raise InputError(f"{path}: ends at byte {begin}; the file changed while being read.")
        view, begin = view[got:], begin + got
