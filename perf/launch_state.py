"""What the calls of a round pass on to one another: kept, and put back before each graph that is timed.

Calls that are called again go on from where they left off: lanes move on by tokens, past their limits they rest, and what attends
to a lane that rests does nothing. So each graph starts where the round has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from .launch_record import COLD, Call


class RoundState:
    """Tensors that calls were made with, but matrices, caches and states (`COLD`) and the tables of embeddings."""

    def __init__(self, calls: Iterable[Call]) -> None:
        found = {
            (part.data_ptr(), part.dtype, part.shape, part.stride()): part for call in calls for part in _passed(call)
        }
        self._kept = [(part, part.clone()) for part in found.values()]

    def restore(self) -> None:
        """As it was when this was made."""
        for part, kept in self._kept:
            part.copy_(kept)


def _passed(call: Call) -> Iterator[Tensor]:
    args = (call.args[0], *call.args[2:]) if call.op == "embed" else call.args  # of tokens and a table
    return _tensors([*args, *call.kwargs.values()])


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, list | tuple):
        for one in part:
            yield from _tensors(one)
    elif is_dataclass(part) and not isinstance(part, COLD):
        yield from _tensors([getattr(part, field.name) for field in fields(part)])
