"""The process that tests the way between two cards; its parent kills it if it hangs.

`python -m duovolt.perf.doctor.link_child` with the two cards visible as 0 and 1; prints a JSON object as each part is known,
later ones in place of earlier ones.
"""

import sys
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from ...checkpoint.errors import DuovoltError, one_line
from ...kernels.module import load
from .facts import Link, Way

SOURCE = "link.cu"
ROUNDS = 1000
BUDGET_MS = 2000  # a round trip of 2 ms is of no use
CHECKED_WORDS = (1, 31, 512, 5120, 1 << 17)
SEEDS = (1, 2, 3, 4)
RATE_WORDS = 1 << 23  # 64 MB
_THREADS = 256
_BLOCKS = 64
_FAST_ENOUGH_US = 1000.0


@dataclass(frozen=True)
class Side:
    """A card and the stream on which its kernels run."""

    card: int
    stream: torch.cuda.Stream

    def launch(self, name: str, blocks: int, threads: int, *arguments: Tensor | int) -> None:
        with torch.cuda.stream(self.stream):
            load(SOURCE, self.card).launch(name, blocks, threads, arguments)


def main(first: int = 0, second: int = 1) -> int:
    """Test the host's memory first, then each card's. Twice the same card: two streams of it."""
    found = Link(first, second)
    try:
        one, other = (Side(card, torch.cuda.Stream(card)) for card in (first, second))
        for side in (one, other):
            load(SOURCE, side.card)  # no compiling while the other waits
        pinned = torch.zeros(2, RATE_WORDS, dtype=torch.int64).pin_memory()  # an inbox for each
        found = _tell(found, host=_way(one, other, pinned[1], pinned[0]))
        claimed = first == second or (
            torch.cuda.can_device_access_peer(first, second) and torch.cuda.can_device_access_peer(second, first)
        )
        found = _tell(found, claimed=claimed)
        if not claimed:
            return 0
        inboxes = [torch.zeros(RATE_WORDS, dtype=torch.int64, device=f"cuda:{side.card}") for side in (one, other)]
        inboxes[0][:1].copy_(inboxes[1][:1])  # torch opens the way of each to the other
        inboxes[1][:1].copy_(inboxes[0][:1])
        found = _tell(found, there=_way(one, other, inboxes[1], inboxes[0]))
        found = _tell(found, back=_way(other, one, inboxes[0], inboxes[1]))
    except (DuovoltError, RuntimeError) as error:
        _tell(found, fault=one_line(error).partition("\\n")[0][:300])
    return 0


def _tell(found: Link, **known: object) -> Link:
    found = msgspec.structs.replace(found, **known)
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()
    return found


def _way(writer: Side, reader: Side, to: Tensor, mine: Tensor) -> Way:
    """Stores of `writer` into `to`, the reader's inbox: right words; a ping, answered into `mine`; the rate."""
    if not all(_arrives(writer, reader, to[:count], seed) for count in CHECKED_WORDS for seed in SEEDS):
        return Way(False)
    trip = _round_trip(writer, reader, to, mine)
    if trip is None or trip > _FAST_ENOUGH_US:
        return Way(trip is not None, trip)
    return Way(True, trip, _rate(writer, to))


def _arrives(writer: Side, reader: Side, to: Tensor, seed: int) -> bool:
    to.zero_()
    wrong = torch.zeros(1, dtype=torch.int32, device=f"cuda:{reader.card}")
    _synchronise(writer, reader)
    writer.launch("link_store", _BLOCKS, _THREADS, to, to.numel(), seed)
    _synchronise(writer, reader)
    reader.launch("link_check", _BLOCKS, _THREADS, to, to.numel(), seed, wrong)
    _synchronise(writer, reader)
    return int(wrong) == 0


def _round_trip(writer: Side, reader: Side, to: Tensor, mine: Tensor) -> float | None:
    """Microseconds there and back; None if a word did not come in time."""
    mine[:1].zero_()
    to[:1].zero_()
    results = [torch.zeros(2, dtype=torch.int64, device=f"cuda:{side.card}") for side in (writer, reader)]
    _synchronise(writer, reader)
    reader.launch("link_ping", 1, 1, to, mine, results[1], ROUNDS, 0, BUDGET_MS)
    writer.launch("link_ping", 1, 1, mine, to, results[0], ROUNDS, 1, BUDGET_MS)
    _synchronise(writer, reader)
    rounds, nanoseconds = results[0].tolist()
    return nanoseconds / (ROUNDS - 1) / 1e3 if rounds == ROUNDS else None


def _rate(writer: Side, to: Tensor) -> float:
    """Bytes a second of stores, the best of three."""
    best = 0.0
    for seed in range(4):  # the first warms up
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(writer.stream)
        writer.launch("link_store", 8 * _BLOCKS, _THREADS, to, to.numel(), seed)
        end.record(writer.stream)
        end.synchronize()
        best = max(best, to.nbytes / (begin.elapsed_time(end) * 1e-3) if seed else 0.0)
    return best


def _synchronise(*sides: Side) -> None:
    for side in sides:
        torch.cuda.synchronize(side.card)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
