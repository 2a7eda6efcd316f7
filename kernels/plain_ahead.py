"""Plain weights of a prompt's products, made beside the products before them.

A chunk of a prompt asks for the same matrices in the same order as the one before. `PlainAhead` notes the order of a pass once
and from then on has each matrix made as soon as there is room, on a stream of lower priority than the products': so
it takes the multiprocessors that a product's last wave leaves, and those of what stands between products. The room is a ring of
one piece of memory, in which a matrix waits for the products of those that stood in its place. What is made, and the product of
it, are the same as in turn, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from .plain import Plain


@dataclass(frozen=True)
class Place:
    """Of a matrix in the ring: its first element; the last of the matrices before it whose place it shares, -1 if none."""

    begin: int
    behind: int


def places(sizes: Sequence[int], room: int) -> list[Place]:
    """Where matrices of so many elements stand in turn, one behind the other, at the beginning again where the end is near.

    None may be larger than `room`.
    """
    found: list[Place] = []
    begin = oldest = 0  # of the matrices from `oldest` on no place has been taken again
    for number, size in enumerate(sizes):
        assert size <= room
        if begin + size > room:
            begin = 0
        behind = -1
        for other in range(oldest, number):
            if found[other].begin < begin + size and begin < found[other].begin + sizes[other]:
                behind = other
        if behind >= 0:
            oldest = behind + 1  # those before it were in the way of earlier ones, or are so of this one
        found.append(Place(begin, max(behind, found[-1].behind if found else -1)))
        begin += size
    return found


class PlainAhead:
    """The ring, and the passes that are known. For one thread at a time, whose products are on its current stream."""

    def __init__(self, elements: int, device: torch.device) -> None:
        """elements: of the ring, fp16. Raises torch.OutOfMemoryError."""
        self.memory = torch.empty(elements, dtype=torch.float16, device=device)
        self._side = torch.cuda.Stream(device)  # of torch's usual priority, the lowest
        self._known: dict[Hashable, _Order] = {}
        self._broken = False  # whether a pass ended before it had waited for all that it began to make

    @contextmanager
    def reading(self, kind: Hashable) -> Iterator[None]:
        """Within it products take their weights from here; passes of one `kind` ask for the same ones in the same order.

        One that does not is served in turn from there on, and known anew.
        """
        going, broken = _Pass(self, self._known.get(kind)), self._broken
        if broken:
            main, side = self.streams
            main.wait_stream(side)
        self._broken = True
        token = _current.set(going)
        try:
            yield
            going.join()
            self._broken = False
            if going.strayed:
                self._known[kind] = _Order.of(going.noted, len(self.memory))
        finally:
            _current.reset(token)

    @property
    def streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """The current one, and the one on which matrices are made."""
        return torch.cuda.current_stream(self.memory.device), self._side


@dataclass(frozen=True)
class _Order:
    """Matrices as a pass asked for them, and their places."""

    matrices: tuple[Plain, ...] = ()
    keys: tuple[tuple[int, ...], ...] = ()
    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, matrices: Sequence[Plain], room: int) -> _Order:
        found = places([matrix.elements for matrix in matrices], room)
        return cls(tuple(matrices), tuple(matrix.key for matrix in matrices), tuple(found))


_NONE = _Order()


class _Pass:
    """One pass: how far its products are, and how far what is made for them."""

    def __init__(self, ahead: PlainAhead, order: _Order | None) -> None:
        self._ahead, self._order = ahead, order or _NONE
        self.strayed = False
        self.noted: list[Plain] = []
        self._made = 0  # matrices whose making has been given to the stream beside
        self._forked = False  # whether that stream has something that the current one has not waited for
        self._filled: dict[int, torch.cuda.Event] = {}  # by matrix, where nothing has waited for it
        # By matrix, when its product was through; absent for one before the stream beside was forked.
        self._used: dict[int, torch.cuda.Event] = {}

    @property
    def room(self) -> int:
        """Elements of the largest matrix that there is room for."""
        return len(self._ahead.memory)

    @contextmanager
    def taken(self, matrix: Plain) -> Iterator[Tensor]:
        """The matrix in fp16 for a product that is launched within."""
        number = len(self.noted)
        self.noted.append(matrix)
        if not self.strayed and (number >= len(self._order.keys) or self._order.keys[number] != matrix.key):
            self.join()
            self.strayed = True
        if self.strayed:
            yield matrix.fill(self._ahead.memory)
            return
        self._make(number)
        main, _ = self._ahead.streams
        if number in self._filled:
            main.wait_event(self._filled.pop(number))
        begin = self._order.places[number].begin
        yield self._ahead.memory[begin : begin + matrix.elements].view(-1, matrix.columns)[: matrix.rows]
        self._used[number] = main.record_event()
        self._make(number + 1)

    def join(self) -> None:
        """Let the current stream wait for all that is being made: before it ends, or goes on as another graph."""
        main, side = self._ahead.streams
        if self._forked:
            main.wait_stream(side)
        self._forked = False
        self._filled.clear()
        self._used.clear()

    def _make(self, through: int) -> None:
        """Have every matrix made whose place is free once the products before number `through` have run."""
        order = self._order
        while self._made < len(order.matrices) and order.places[self._made].behind < through:
            main, side = self._ahead.streams
            if not self._forked:
                side.wait_stream(main)
                self._forked = True
            place, matrix = order.places[self._made], order.matrices[self._made]
            if place.behind in self._used:
                side.wait_event(self._used[place.behind])
            with torch.cuda.stream(side):
                matrix.fill(self._ahead.memory[place.begin :])
                self._filled[self._made] = side.record_event()
            self._made += 1


_current: ContextVar[_Pass | None] = ContextVar("plain_ahead", default=None)


def current() -> _Pass | None:
    """The pass that products take their weights from; None: each makes its own, in memory of its own."""
    return _current.get()


def join() -> None:
    """Before work that is being captured goes on in another graph: wait for what the pass has begun to make."""
    going = _current.get()
    if going is not None:
        going.join()
