"""What a round's exchanges cost between the two cards at hand: each message of a ledger, timed by itself in a graph."""

from collections.abc import Iterable

import torch

from ..runtime.parallel.device import DeviceCollective
from ..runtime.parallel.timing import Meet, gather_seconds, reduce_seconds
from .ledger import Launch, Ledger

Message = tuple[str, int, int]  # reduce or gather, rows, bytes


def messages_of(ledgers: Iterable[Ledger]) -> list[Message]:
    """Every kind and size of message in some rounds, in an order that both ranks have."""
    return sorted({_message(launch) for one in ledgers for launch in one.launches if launch.family == "collective"})


def measure_exchanges(
    messages: Iterable[Message], link: DeviceCollective, meet: Meet, device: torch.device
) -> dict[Message, float]:
    """Seconds of each from one to the next, launch included. Both ranks call it. Raises CollectiveFault."""
    found = {}
    for message in messages:
        name, rows, nbytes = message
        if name == "reduce":
            found[message] = reduce_seconds(link, meet, device, rows, nbytes // (2 * rows))
        else:
            found[message] = gather_seconds(link, meet, device, rows, nbytes // (4 * rows))
    torch.cuda.synchronize(device)
    link.check()
    return found


def seconds_of(launch: Launch, found: dict[Message, float]) -> float:
    """Of a collective of a ledger whose messages were measured: of the exchange alone, where more is in its launch."""
    return found[_message(launch)]


def _message(launch: Launch) -> Message:
    return "gather" if launch.kernel == "gather" else "reduce", launch.tokens, launch.message
