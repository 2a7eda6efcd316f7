"""Plain weights of a prompt's products that stay in memory which nothing else wants: made once, they cost a chunk nothing.

Their products are those of weights that are made anew for each chunk, on all multiprocessors. Where there is no room for all
matrices, those that are kept are spread evenly over the order in which a chunk asks for them: so the others find products
beside which they can be made (kernels/plain_ahead.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from .plain import Plain


class PlainKept:
    """Memory for some of a model's matrices; weights that it has seen must live as long as it does.

    For one thread at a time. What is kept is made on the stream that first asks; streams that ask later are behind it.
    """

    def __init__(self, elements: int, of: int, device: torch.device) -> None:
        """elements: fp16 values that there is room for; of: those of all matrices that will be asked for. Raises
        torch.OutOfMemoryError."""
        self.memory = torch.empty(min(elements, of), dtype=torch.float16, device=device)
        self._share = len(self.memory) / of if of else 0.0
        self._known: dict[tuple[int, ...], Tensor | None] = {}
        self._seen = 0
        self.used = 0  # elements

    @property
    def matrices(self) -> int:
        """How many are kept."""
        return sum(plain is not None for plain in self._known.values())

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within it products look here first."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def of(self, matrix: Plain) -> Tensor | None:
        """float16 [rows, K] on torch's current stream; None: it is not kept. What is captured finds what was asked for before."""
        if matrix.key in self._known:
            return self._known[matrix.key]
        if matrix.weights[0].words.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        self._seen += matrix.elements
        plain = None
        if self.used + matrix.elements <= min(len(self.memory), self._share * self._seen + matrix.elements / 2):
            plain = matrix.fill(self.memory[self.used :])
            self.used += matrix.elements
        self._known[matrix.key] = plain
        return plain


_current: ContextVar[PlainKept | None] = ContextVar("plain_kept", default=None)


def kept(matrix: Plain) -> Tensor | None:
    """The matrix in fp16 where what products look into has it."""
    going = _current.get()
    return None if going is None else going.of(matrix)
