"""From a choice to a collective at work: the mailbox for small messages, NCCL for large ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels.weights import Weight
from .choice import Choice
from .device import DeviceCollective
from .links import MailboxDevice, open_mailbox
from .mailbox import Mailbox
from .nccl import NcclDevice, obey


class TwoWays:
    """A mailbox that leaves reductions of at least `nccl_from` bytes of fp16 to NCCL."""

    size = 2

    def __init__(self, mailbox: MailboxDevice, nccl: NcclDevice, nccl_from: int) -> None:
        self.rank = mailbox.rank
        self.name = mailbox.name
        self.halves = mailbox.halves
        self._mailbox = mailbox
        self._nccl = nccl
        self._nccl_from = nccl_from

    def reduce(self, part: Tensor, out: Tensor) -> None:
        self._mailbox.reduce(part, out)

    def reduce_norm(
        self,
        part: Tensor,
        x: Tensor,
        weight: Tensor,
        eps: float,
        out: Tensor,
        overflows: Tensor | None,
        then: Sequence[Weight] = (),
    ) -> None:
        self._mailbox.reduce_norm(part, x, weight, eps, out, overflows, then)

    def reduce_large(self, part: Tensor, out: Tensor) -> None:
        way = self._nccl if part.numel() * part.element_size() >= self._nccl_from else self._mailbox
        way.reduce_large(part, out)

    def gather(self, part: Tensor, out: Tensor) -> None:
        self._mailbox.gather(part, out)

    def check(self) -> None:
        self._mailbox.check()

    def close(self) -> None:
        """End both. Nothing of either may be under way on any rank."""
        self._nccl.close()
        self._mailbox.close()


def open_way(choice: Choice, mailbox: Mailbox, device: torch.device, seconds: float) -> DeviceCollective:
    """What `choice` names, for the rank of `mailbox` on `device`; both ranks call it. No wait takes longer than `seconds`.

    Raises EnvironmentFault if it cannot be had, MailboxTimeout if the peer does not come.
    """
    obey(choice.peer_memory)
    if choice.small == "nccl":
        nccl = NcclDevice(mailbox, device, seconds)
        nccl.halves = choice.halves
        return nccl
    link = open_mailbox(choice.small, mailbox, device, seconds)
    link.halves = choice.halves
    if choice.nccl_from is None:
        return link
    return TwoWays(link, NcclDevice(mailbox, device, seconds), choice.nccl_from)
