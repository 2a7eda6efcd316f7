"""Writing one safetensors file as a stream: header first, then each tensor's bytes in the announced order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash

from .container import ITEMSIZE, MAX_HEADER
from .errors import CheckFailed, InputError
from .manifest import FileRecord
from .stage import AtomicFile, Mark
from .stream import PIECE

ALIGNMENT = 64  # bytes: the data starts on a cache line
MARK_BYTES = 256 << 20  # written between two marks: what a kill costs at most


@dataclass(frozen=True)
class Planned:
    """A tensor to be written: name, safetensors dtype, shape as stored."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        total = ITEMSIZE[self.dtype]
        for extent in self.shape:
            total *= extent
        return total


def encode_header(tensors: Sequence[Planned], metadata: Mapping[str, str]) -> bytes:
    """Length word and JSON header, padded with spaces. Raises InputError beyond the readers' limit of 100 MB."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    raw = msgspec.json.encode(table)
    raw += b" " * (-(len(raw) + 8) % ALIGNMENT)
    if len(raw) > MAX_HEADER:
        raise InputError(f"{len(tensors)} tensors give a header of {len(raw)} bytes; readers accept {MAX_HEADER}.")
    return len(raw).to_bytes(8, "little") + raw


def noted_digests(note: Mapping[str, Any] | None, tensors: Sequence[Planned]) -> dict[str, str] | None:
    """What a journal's note has under `digests`, if it has one for each of exactly these tensors."""
    try:
        found = msgspec.convert((note or {}).get("digests"), dict[str, str])
    except msgspec.ValidationError:
        return None
    return found if found.keys() == {tensor.name for tensor in tensors} else None


@dataclass
class ShardWriter:
    """Streams `tensors`, in order, into `file`. `digests` maps each finished tensor to its xxh3-128.

    Where `file` holds what an earlier run left, `marks` say what it should be: `keep`, before each tensor, proves and keeps
    it. `mark` is told, now and then, the bytes written and their digest.
    """

    file: AtomicFile
    tensors: Sequence[Planned]
    metadata: Mapping[str, str]
    digests: dict[str, str] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    mark: Callable[[int, str], None] | None = None

    def __post_init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self._size = 0
        self._marked = 0
        header = encode_header(self.tensors, self.metadata)
        same = self.file.left > len(header) and b"".join(self.file.read_left(0, len(header))) == header
        self._proved = self._prefix() if same else 0
        self._wanted = {name: digest for m in self.marks for name, digest in m.tensors.items()} if same else {}
        self.file.worth_keeping = self.is_resumed
        self._again: xxhash.xxh3_128 | None = None  # of what is offered though it is there
        self._there = 0  # bytes of it
        self._emit(memoryview(header))
        self._current = xxhash.xxh3_128()
        self._position = 0  # tensor being written
        self._left = self.tensors[0].nbytes if self.tensors else 0
        self._skip_empty()

    @property
    def is_resumed(self) -> bool:
        """True if `keep` may find anything."""
        return bool(self._proved or self._wanted)

    def _prefix(self) -> int:
        """Bytes of what was left that a mark proves."""
        digest, at = xxhash.xxh3_128(), 0
        proved = 0
        for mark in sorted((m for m in self.marks if m.digest), key=lambda m: m.bytes):
            try:
                for piece in self.file.read_left(at, mark.bytes):
                    digest.update(piece)
                    at += len(piece)
            except OSError:  # a place that cannot be read is written anew
                break
            if at != mark.bytes or digest.hexdigest() != mark.digest:
                break
            proved = at
        return proved

    def keep(self, name: str) -> bool:
        """True if the next tensor, `name`, is there already, proved by a mark: then it must not be written again.

        Of a tensor that is there in part, the first bytes offered to `write` are compared and dropped.
        """
        if name in self.digests:  # it has no bytes
            return True
        assert self.tensors[self._position].name == name, f"{name!r} is not next"
        size, begin = self._left, self._size
        if begin + size < self._proved:  # what came after it was written too: its source had been proved by then
            self._take_left(size)
            self._left = 0
            self._skip_empty()
            return True
        if name in self._wanted and self.file.left >= begin + size:
            whole, current = self._whole.copy(), xxhash.xxh3_128()
            try:
                for piece in self.file.read_left(begin, begin + size):
                    whole.update(piece)
                    current.update(piece)
            except OSError:  # a place that cannot be read is written anew
                return False
            if current.hexdigest() != self._wanted[name]:
                return False
            self._whole, self._current, self._left = whole, current, 0
            self._pass(size)
            self._skip_empty()
            return True
        if (there := min(size, self._proved - begin)) > 0:
            self._take_left(there)
            self._again, self._there = xxhash.xxh3_128(), there
        return False

    def _take_left(self, size: int) -> None:
        for piece in self.file.read_left(self._size, self._size + size):
            self._whole.update(piece)
            self._current.update(piece)
        self._pass(size)

    def _pass(self, size: int) -> None:
        self.file.keep(size)
        self._size += size
        self._marked = self._size

    def _emit(self, view: memoryview, *digests: xxhash.xxh3_128) -> None:
        for begin in range(0, len(view), PIECE):  # all digests of a piece while it is in the core's cache
            piece = view[begin : begin + PIECE]
            for digest in (self._whole, *digests):
                digest.update(piece)
        self._size += len(view)
        self.file.write(view)
        if self.mark is not None and self._size - self._marked >= MARK_BYTES:
            self._marked = self._size
            self.file.worth_keeping = True
            self.mark(self._size, self._whole.hexdigest())

    def _skip_empty(self) -> None:
        while self._position < len(self.tensors) and not self._left:
            self.digests[self.tensors[self._position].name] = self._current.hexdigest()
            self._current = xxhash.xxh3_128()
            self._position += 1
            self._left = self.tensors[self._position].nbytes if self._position < len(self.tensors) else 0

    def write(self, data: np.ndarray | bytes | memoryview) -> None:
        """The next bytes of the tensor being written; must not cross into the next one. `data` is contiguous.

        Raises CheckFailed if an earlier run left other bytes in their place.
        """
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        view = memoryview(data)
        if len(view) > self._left:
            raise ValueError(f"{len(view)} bytes offered, {self._left} left to write")
        self._left -= len(view)
        if self._again is not None:
            view = self._compare(view)
        self._emit(view, self._current)
        self._skip_empty()

    def _compare(self, view: memoryview) -> memoryview:
        """Take what is there already off the front of `view`; when all of it has been offered, it must be the same."""
        assert self._again is not None
        dropped, rest = view[: self._there], view[self._there :]
        self._again.update(dropped)
        self._there -= len(dropped)
        if not self._there:
            if self._again.digest() != self._current.digest():
                raise CheckFailed(
                    f"{self.file.path}: tensor {self.tensors[self._position].name!r}: what an interrupted run had written "
                    "of it is not what is made now: the input was damaged then or is now. It was removed; verify the "
                    "input and run the same command again."
                )
            self._again = None
        return rest

    def close(self) -> FileRecord:
        """Check that every announced byte came; the file's size and digest."""
        if self._position != len(self.tensors):
            raise ValueError(f"tensor {self.tensors[self._position].name!r} lacks {self._left} bytes")
        return FileRecord(size=self._size, digest=self._whole.hexdigest())
