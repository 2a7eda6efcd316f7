"""The mailbox: small sums between two ranks through memory that both see. This is its CPU form.

A message is pushed into the peer's inbox as 8-byte words, each (float32 payload in the low half, uint32 step in the
high half), so a word is either wholly this step's or not, and no flag or fence is needed. Word 0 of a piece holds the
message's total count of floats. Inboxes are double-buffered by step parity: a rank pushes step s + 2 only after it has
read the peer's step s + 1, which the peer pushed after it had read step s. Sums are taken rank 0 first on both ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...checkpoint.errors import CheckFailed
from .faults import MAILBOX_DOOR, Fault, read_fault
from .region import Region
from .turns import Turns
from .waiting import wait_for

if TYPE_CHECKING:
    from torch import Tensor

LAST_STEP = 2**32 - 1
_HIGH = np.uint64(32)


class MailboxTimeout(CheckFailed):
    """The peer's words did not come in time; the step is poisoned and nothing of it may be used."""


class MailboxMismatch(CheckFailed):
    """The two ranks brought different shapes to one exchange."""


class Mailbox:
    """The exchange of float32 arrays with the one peer. Not safe for threads."""

    def __init__(
        self,
        region: Region,
        rank: int,
        timeout_seconds: float,
        *,
        first_step: int = 1,
        gone: Callable[[], bool] | None = None,
    ) -> None:
        """`gone`: whether the peer's process has ended, asked now and then while this one waits."""
        self.rank = rank
        self._gone = gone
        self.timeout_seconds = timeout_seconds
        self.step = first_step  # number of the next piece, 1 ... 2^32 - 1; 0 marks a word never written
        self._inbox = region.inboxes[rank]
        self._peer_inbox = region.inboxes[1 - rank]
        self._wraps = region.wraps
        self._turns, self._began_ns = Turns(region, rank), 0
        self._generation = 0
        self._slot = self._inbox.shape[1] - 1
        self._fault: Fault | None = read_fault(MAILBOX_DOOR)
        self._broken = False

    def exchange(self, mine: NDArray[np.float32]) -> NDArray[np.float32]:
        """Send the flat float32 array `mine`, return the peer's (its length may differ).

        Raises MailboxTimeout, and does so at once on every later call: a late word must never pass for an answer.
        """
        if self._broken:
            raise MailboxTimeout(f"rank {self.rank}: the mailbox is closed after an earlier timeout")
        bits = np.ascontiguousarray(mine).view(np.uint32)
        theirs: NDArray[np.uint32] | None = None
        sent = received = 0
        while theirs is None or sent < bits.size or received < theirs.size:
            self._begin_step()
            piece = bits[sent : sent + self._slot]
            self._push(bits.size, piece)
            sent += piece.size
            if theirs is None:
                theirs = np.empty(int(self._pull(0, 1)[0]), dtype=np.uint32)
            arriving = min(theirs.size - received, self._slot)
            theirs[received : received + arriving] = self._pull(1, 1 + arriving)
            received += arriving
            self._pull(0, 1)  # the peer's step may carry no words: its header still says that it has come this far
            self.step += 1
        return theirs.view(np.float32)

    def meet(self, seconds: float) -> None:
        """Wait for the peer, up to `seconds`: it may take longer to load than any exchange may last. Raises MailboxTimeout."""
        usual, self.timeout_seconds = self.timeout_seconds, seconds
        try:
            self.exchange(np.zeros(1, np.float32))
        finally:
            self.timeout_seconds = usual

    def _begin_step(self) -> None:
        self._began_ns = time.monotonic_ns()
        self._stale = self._drop = False
        if self._fault is not None and self._fault.due(self.rank, self.step):
            kind = self._fault.kind
            self._stale, self._drop = kind == "stale", kind == "drop"
            if kind == "wrap":
                # The parity stays (LAST_STEP is odd): the peer may still read the other buffer.
                self.step = LAST_STEP - 2 - (self.step + 1) % 2
            if kind.isdecimal():
                time.sleep(int(kind) / 1000)
        if self.step > LAST_STEP:
            self._wrap()

    def _push(self, total: int, piece: NDArray[np.uint32]) -> None:
        if self._drop:
            return
        step = np.uint64((self.step - self._stale) % 2**32) << _HIGH
        buffer = self._peer_inbox[self.step % 2]
        buffer[1 : 1 + piece.size] = piece | step
        buffer[0] = np.uint64(total) | step

    def _pull(self, begin: int, end: int) -> NDArray[np.uint32]:
        """Payloads of the words `begin` to `end` of this step; each word is read once, with its step."""
        inbox = self._inbox[self.step % 2, begin:end]
        if inbox.size == 0:
            return np.empty(0, dtype=np.uint32)
        step = np.uint64(self.step)

        def look() -> NDArray[np.uint64] | None:
            if inbox[-1] >> _HIGH != step:
                return None
            words = inbox.copy()
            return words if bool(np.all(words >> _HIGH == step)) else None

        found = wait_for(look, self.timeout_seconds, self._gone)
        if found is None:
            self._broken = True
            if self._gone is not None and self._gone():
                raise MailboxTimeout(f"rank {self.rank}: rank {1 - self.rank} ended before mailbox step {self.step}")
            self._turns.take(self._began_ns, self.timeout_seconds, self._gone)
            raise MailboxTimeout(
                f"rank {self.rank}: no answer from rank {1 - self.rank} at mailbox step {self.step} "
                f"within {self.timeout_seconds:g} s; its log tells why"
            )
        return found.astype(np.uint32)

    def _wrap(self) -> None:
        """Start again at step 1: clear the own inbox of words that would look new, then meet the peer.

        Both ranks have read every word of the last step, and none pushes before the other has cleared.
        """
        self._inbox[...] = 0
        self._generation += 1
        generation = np.uint64(self._generation)
        self._wraps[1 - self.rank, 0] = generation
        come = wait_for(
            lambda: True if self._wraps[self.rank, 0] == generation else None, self.timeout_seconds, self._gone
        )
        if come is None:
            self._broken = True
            raise MailboxTimeout(f"rank {self.rank}: rank {1 - self.rank} did not come to the wrap of the step counter")
        self.step = 1


class MailboxCollective:
    """Collective of two ranks over a Mailbox, on float32 CPU tensors."""

    size = 2

    def __init__(self, mailbox: Mailbox) -> None:
        self.rank = mailbox.rank
        self._mailbox = mailbox

    def all_reduce(self, x: Tensor) -> Tensor:
        """rank 0's x + rank 1's x in float32, on both ranks in this order. Raises MailboxTimeout, MailboxMismatch."""
        mine = x.detach().contiguous()
        theirs = self._tensor(self._mailbox.exchange(mine.numpy().reshape(-1)))
        if theirs.numel() != mine.numel():
            raise MailboxMismatch(
                f"all_reduce: rank {self.rank} brought {mine.numel()} values, the peer {theirs.numel()}"
            )
        theirs = theirs.reshape(mine.shape)
        return mine + theirs if self.rank == 0 else theirs + mine

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., a] of rank 0 and [..., b] of rank 1 as [..., a + b]; the widths may differ. Raises as all_reduce, and
        ValueError for no rows."""
        import torch

        mine = x.detach().contiguous()
        rows = mine.numel() // mine.shape[-1]
        if not rows:
            raise ValueError("all_gather: no rows, so that the peer's width would be unknown")
        theirs = self._tensor(self._mailbox.exchange(mine.numpy().reshape(-1)))
        if theirs.numel() % rows:
            raise MailboxMismatch(f"all_gather: rank {self.rank} brought {rows} rows, the peer {theirs.numel()} values")
        parts = [mine, theirs.reshape(*mine.shape[:-1], -1)]
        return torch.cat(parts if self.rank == 0 else parts[::-1], dim=-1)

    @staticmethod
    def _tensor(values: NDArray[np.float32]) -> Tensor:
        import torch

        return torch.from_numpy(values)
