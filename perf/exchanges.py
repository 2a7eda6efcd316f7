"""What a round's exchanges cost between the two cards at hand: each message of a ledger, timed by itself in a graph."""

from collections.abc import Iterable

import torch

from ..runtime.parallel.device import DeviceCollective
from ..runtime.parallel.links import GATHER_WORDS
from ..runtime.parallel.timing import Meet, gather_seconds, reduce_seconds
from .ledger import Launch, Ledger

Message = tuple[str, int]  # the collective's name and bytes


def messages_of(ledgers: Iterable[Ledger]) -> list[Message]:
    """Every kind and size of message in some rounds, in an order that both ranks have."""
    return sorted({_message(launch) for one in ledgers for launch in one.launches if launch.family == "collective"})


def measure_exchanges(
    messages: Iterable[Message], link: DeviceCollective, meet: Meet, device: torch.device, hidden: int
) -> dict[Message, float]:
    """Seconds of each from one to the next, launch included. Both ranks call it. Raises CollectiveFault."""
    found = {}
    for name, nbytes in messages:
        if name == "reduce":
            found[name, nbytes] = reduce_seconds(link, meet, device, nbytes // (2 * hidden), hidden)
        else:
            rows, columns = _rows(nbytes // 4)
            found[name, nbytes] = gather_seconds(link, meet, device, rows, columns)
    torch.cuda.synchronize(device)
    link.check()
    return found


def seconds_of(launch: Launch, found: dict[Message, float]) -> float:
    """Of a collective of a ledger whose messages were measured."""
    return found[_message(launch)]


def _message(launch: Launch) -> Message:
    return launch.kernel, launch.message


def _rows(words: int) -> tuple[int, int]:
    """As few rows as a message of the mailbox may have at this size, and their columns."""
    rows = next(rows for rows in range(1, words + 1) if words % rows == 0 and words // rows <= GATHER_WORDS)
    return rows, words // rows
