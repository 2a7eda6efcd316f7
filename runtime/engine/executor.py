"""The contract between the scheduler and what computes: one executor a backend.

The Engine decides (queue, lanes, pages, order of chunks and rounds, what to keep for later prompts); an executor owns
the weights, the pools, the states and the sampling. Every call follows from messages and earlier outcomes alone, so the
executors of two ranks get the same calls in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from ..messages import TokenLogprob
from .lane import Lane


@dataclass(frozen=True)
class Outcome:
    """What one lane got.

    tokens    the drafts that stand, then one token of the target's own; empty with a fault
    proposed  drafts judged; `accepted`: those of them that stood
    logprobs  an entry for each of `tokens`, where the request asked for them
    fault     why the answer cannot go on, None if it can
    """

    tokens: list[int]
    proposed: int = 0
    accepted: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    fault: str | None = None


class Executor(Protocol):
    """One rank's model at work.

    pages        pages of each of its pools; the main layers' and the MTP layer's share numbers and tables
    state_bytes  what one saved state takes at most
    overflows    values so far that did not fit fp16 and were cut
    facts        choices for the log line: kv, draft_head, graphs, ...

    A lane's pages are `lane.pages`: those of its first tokens, in order, and always enough for the next two rounds. The
    lanes of several calls may hold a page in common; nothing is ever written into it for tokens that they share.
    """

    @property
    def pages(self) -> int: ...

    @property
    def state_bytes(self) -> int: ...

    @property
    def overflows(self) -> int: ...

    @property
    def facts(self) -> dict[str, str]: ...

    def open(self, lane: Lane) -> None:
        """An admitted request got `lane.index` and pages: its states are zero, its sampling wishes and history set."""
        ...

    def look(self, lane: Lane, start: int, count: int) -> bool:
        """Do a part of the work on the pictures of the prompt tokens that `prefill` is to read next; whether all is done.

        How much follows from the pictures alone. It is asked again until all is done, and no chunk is read in between, of no
        prompt; rounds may run.
        """
        ...

    def prefill(self, lane: Lane, start: int, count: int) -> list[TokenLogprob]:
        """Read prompt tokens start .. start + count - 1 through all layers, and the MTP layer behind them.

        The MTP layer's keys at an index follow from the token after it. They are made when that token is known to be
        this lane's: at the end of a chunk the MTP layer lags by one token. Gives the scores of the tokens after those
        read, where the request echoes them.
        """
        ...

    def first(self, lane: Lane) -> Outcome:
        """The answer's first token, after the last chunk, or after `load` where that was the whole prompt."""
        ...

    def round(self, lanes: list[Lane]) -> list[Outcome]:
        """One decode round of these lanes: drafts (`lane.forced_drafts` where they are given), verification, acceptance.

        It may look ahead: enqueue the lanes' next round before this one's numbers are read, and hand that out when next
        asked. What was computed for a lane that is closed meanwhile is dropped.
        """
        ...

    def grow(self, lane: Lane) -> None:
        """`lane.pages` has got longer."""
        ...

    def close(self, lane: Lane) -> None:
        """The lane has ended: answered, cancelled or at fault."""
        ...

    def save(self, lane: Lane) -> object | None:
        """The recurrent, convolution and MTP state after exactly `lane.length` tokens; it owns what it holds.

        It must not depend on tokens after those (see `prefill`). Keys and values of all but the last of them are final, in
        an answer of all but the last 1 + MAX_DRAFTS: behind stands what `load` or the next chunk writes again.

        None where that state is no longer at hand: after a round that went past the answer's end. Whether it is follows
        from the outcomes, alike on every rank.
        """
        ...

    def load(self, lane: Lane, state: object) -> None:
        """Go on from a saved state, bit for bit, in a lane just opened whose pages hold the keys and values of its tokens."""
        ...

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page of every layer's keys and values, the MTP layer's too."""
        ...

    def seen(self) -> bytes:
        """A digest of the picture embeddings that were read since the last call; empty where there were none."""
        ...
