"""Plain weights of a prompt's products that stay in memory which nothing else wants: made once, they cost a chunk nothing.

Their products are those of weights that are made anew for each chunk, on all multiprocessors. Where there is no room for all
matrices, those that are kept are spread evenly over the order in which a chunk asks for them: so the others find products
beside which they can be made (kernels/plain_ahead.py). Or, where a chunk goes through the layers in two halves, which ask for a
matrix one soon after the other, the last ones that were made stay for a while.
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

    def __init__(self, elements: int, of: int, device: torch.device, *, lately: int = 0) -> None:
        """elements: fp16 values that there is room for; of: those of all matrices that will be asked for; lately: of the room,
        where it is not for all, so much is for the last ones that were made. Raises torch.OutOfMemoryError."""
        elements = min(elements, of)
        self.memory = torch.empty(elements, dtype=torch.float16, device=device)
        self.room = elements if elements == of else max(0, elements - lately)  # for those that stay
        self._share = self.room / of if of else 0.0
        self._known: dict[tuple[int, ...], Tensor | None] = {}
        self._seen = 0
        self.used = 0  # elements of those that stay
        self._lately: dict[tuple[int, ...], tuple[int, int, Tensor]] = {}  # first element, the one behind the last
        self._next = self.room

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Within it products look here first."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def of(self, matrix: Plain) -> Tensor | None:
        """float16 [rows, K] on torch's current stream, for a product that is launched there before the next is asked for.

        None: it is not here. What is captured finds what was asked for before and stays.
        """
        plain = self._known.get(matrix.key)
        if plain is not None or (matrix.weights[0].words.is_cuda and torch.cuda.is_current_stream_capturing()):
            return plain
        if matrix.key not in self._known:
            self._known[matrix.key] = plain = self._to_stay(matrix)
        return plain if plain is not None else self._of_late(matrix)

    def _to_stay(self, matrix: Plain) -> Tensor | None:
        """It, made where it stays; None if it is not to."""
        self._seen += matrix.elements
        if self.used + matrix.elements > min(self.room, self._share * self._seen + matrix.elements / 2):
            return None
        self.used += matrix.elements
        return matrix.fill(self.memory[self.used - matrix.elements : self.room])

    def _of_late(self, matrix: Plain) -> Tensor | None:
        """One of the last that were made, or made now in the place of the oldest of them; None where there is no room for it."""
        found = self._lately.get(matrix.key)
        if found is not None:
            return found[2]
        if self.room + matrix.elements > len(self.memory):
            return None
        begin = self._next if self._next + matrix.elements <= len(self.memory) else self.room
        end = self._next = begin + matrix.elements
        self._lately = {key: one for key, one in self._lately.items() if one[1] <= begin or end <= one[0]}
        plain = matrix.fill(self.memory[begin:end])
        self._lately[matrix.key] = begin, end, plain
        return plain


_current: ContextVar[PlainKept | None] = ContextVar("plain_kept", default=None)


def kept(matrix: Plain) -> Tensor | None:
    """The matrix in fp16 where what products look into has it."""
    going = _current.get()
    return None if going is None else going.of(matrix)
