"""Writing one safetensors file as a stream: header first, then each tensor's bytes in the announced order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash

from .container import ITEMSIZE, MAX_HEADER
from .errors import InputError
from .manifest import FileRecord
from .stage import AtomicFile
from .stream import PIECE

ALIGNMENT = 64  # bytes: the data starts on a cache line


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


@dataclass
class ShardWriter:
    """Streams `tensors`, in order, into `file`. `digests` maps each finished tensor to its xxh3-128."""

    file: AtomicFile
    tensors: Sequence[Planned]
    metadata: Mapping[str, str]
    digests: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self._size = 0
        self._emit(memoryview(encode_header(self.tensors, self.metadata)))
        self._current = xxhash.xxh3_128()
        self._position = 0  # tensor being written
        self._left = self.tensors[0].nbytes if self.tensors else 0
        self._skip_empty()

    def _emit(self, view: memoryview, *digests: xxhash.xxh3_128) -> None:
        for begin in range(0, len(view), PIECE):  # all digests of a piece while it is in the core's cache
            piece = view[begin : begin + PIECE]
            for digest in (self._whole, *digests):
                digest.update(piece)
        self._size += len(view)
        self.file.write(view)

    def _skip_empty(self) -> None:
        while self._position < len(self.tensors) and not self._left:
            self.digests[self.tensors[self._position].name] = self._current.hexdigest()
            self._current = xxhash.xxh3_128()
            self._position += 1
            self._left = self.tensors[self._position].nbytes if self._position < len(self.tensors) else 0

    def write(self, data: np.ndarray | bytes | memoryview) -> None:
        """The next bytes of the tensor being written; must not cross into the next one. `data` is contiguous."""
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        view = memoryview(data)
        if len(view) > self._left:
            raise ValueError(f"{len(view)} bytes offered, {self._left} left to write")
        self._emit(view, self._current)
        self._left -= len(view)
        self._skip_empty()

    def close(self) -> FileRecord:
        """Check that every announced byte came; the file's size and digest."""
        if self._position != len(self.tensors):
            raise ValueError(f"tensor {self.tensors[self._position].name!r} lacks {self._left} bytes")
        return FileRecord(size=self._size, digest=self._whole.hexdigest())
