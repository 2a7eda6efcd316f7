"""The device mailbox: a collective of two ranks whose GPUs push into each other's inbox, in host or in peer memory.

`host`: both inboxes lie in one pinned file of the memory file system. `ipc`: each lies on its owner's card, and the peer
maps it. What the ranks must tell each other first (the file's name, the handle) goes through the CPU mailbox.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...checkpoint.errors import DuovoltError, EnvironmentFault
from ...kernels import mailbox as ops
from ...kernels.peer import DeviceBlock, PeerBlock, PinnedBlock
from ...kernels.weights import Weight
from .device import MAX_REDUCE_BYTES, CollectiveFault, check_gather, check_reduce
from .faults import MAILBOX_DOOR, read_fault
from .handshake import attempt, exchange_bytes
from .mailbox import Mailbox
from .shared import SharedFile

Transport = Literal["host", "ipc"]
GATHER_WORDS = 4 * 124160  # whole logits of four rows of half a vocabulary of the 27B
WHOLE_BYTES = 20 << 20  # of fp16 parts that are copied in whole: 2048 tokens of the 27B
WHOLE_FROM = 4 << 20  # below, words are sooner there (docs/benchmarks.md)


@dataclass(frozen=True)
class Whole:
    """Room for whole parts, by the parity of the turn: the peer's, that is copied to, and one's own, by its address."""

    peer: PeerBlock
    offset: int
    own: int


class MailboxDevice:
    """DeviceCollective over one link. `close` it before the memory of the peer goes.

    Large parts are copied in whole, where there is room for them, by the card's copy engine: it leaves the processors to
    whatever computes beside it, and a word each way says when both copies are there.
    """

    size = 2
    halves = False

    def __init__(self, name: Transport, link: ops.Link, resources: list[Any], whole: Whole | None = None) -> None:
        self.name: str = name
        self.rank = link.rank
        self.link = link
        self._resources = resources
        self._whole, self._turn = whole, 0
        self._expired = link.expired.numpy()
        self._budget = link.budget_seconds
        ops.prepare(link.state.device)

    def reduce(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out)
        ops.reduce(self.link, part, out)

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
        ops.reduce_norm(self.link, part, x, weight, eps, out, overflows, then)

    def reduce_large(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out, limited=False)
        flat, into = part.view(-1), out.view(-1)
        whole = self._whole if flat.numel() * flat.element_size() >= WHOLE_FROM else None
        most = 2 * self.link.slot if whole is None else WHOLE_BYTES // 2
        for begin in range(0, flat.numel(), most):
            piece, sums = flat[begin : begin + most], into[begin : begin + most]
            if whole is None:
                ops.reduce(self.link, piece, sums)
            else:
                self._reduce_whole(whole, piece, sums)

    def _reduce_whole(self, whole: Whole, part: Tensor, out: Tensor) -> None:
        """Room is used in turn: the peer has added what stood there, since it met this rank once more after that."""
        room = self._turn % 2 * WHOLE_BYTES
        self._turn += 1
        stream = torch.cuda.current_stream(part.device).cuda_stream
        whole.peer.put(part.data_ptr(), part.numel() * 2, whole.offset + room, stream)
        ops.meet(self.link)
        ops.join(self.link, part, whole.own + room, out)

    def gather(self, part: Tensor, out: Tensor) -> None:
        check_gather(part, out, self.size)
        columns = part.shape[1]
        rows = max(1, self.link.slot // columns)
        for begin in range(0, len(part), rows):
            ops.gather(self.link, part[begin : begin + rows], out[begin : begin + rows])

    def check(self) -> None:
        if step := int(self._expired[0]):
            raise CollectiveFault(
                f"rank {self.rank}: no answer from rank {1 - self.rank} at step {step & 0xFFFFFFFF} of the {self.name} "
                f"mailbox within {self._budget:g} s, or after an earlier one; nothing of this round is used"
            )

    def close(self) -> None:
        """Give the memory back. Kernels of this link must have ended on both ranks."""
        for resource in reversed(self._resources):
            with contextlib.suppress(EnvironmentFault):
                resource.close()
        self._resources.clear()


def open_mailbox(
    name: Transport, mailbox: Mailbox, device: torch.device, budget_seconds: float, slot: int = GATHER_WORDS
) -> MailboxDevice:
    """Both ranks call it with the same arguments, each with its own device.

    Raises EnvironmentFault on both if either cannot make its end, MailboxTimeout if the peer does not come.
    """
    assert slot >= MAX_REDUCE_BYTES // 4, slot  # a word holds two values
    resources: list[Any] = []
    try:
        if name == "host":
            addresses, whole = _open_host(mailbox, device.index or 0, slot, resources), None
        else:
            addresses, whole = _open_ipc(mailbox, device.index or 0, slot, resources)
    except DuovoltError:
        for resource in reversed(resources):
            resource.close()
        raise
    fault = read_fault(MAILBOX_DOOR)
    first, door = 1, None
    if fault is not None and fault.kind == "wrap":
        first = ops.LAST_STEP - fault.at + 1
    elif fault is not None and fault.rank == mailbox.rank:
        door = "delay" if fault.kind.isdecimal() else fault.kind
    state = ops.new_state(
        device,
        first_step=first,
        door=door,
        door_step=fault.at if fault is not None else 0,
        delay_ms=int(fault.kind) if fault is not None and fault.kind.isdecimal() else 0,
    )
    expired = torch.zeros(1, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize(device)
    link = ops.Link(*addresses, state, expired, budget_seconds, slot, mailbox.rank, far=name == "host")
    made = MailboxDevice(name, link, resources, whole)
    exchange_bytes(mailbox, b"")  # both are ready before either pushes
    return made


def _open_host(mailbox: Mailbox, device: int, slot: int, resources: list[Any]) -> tuple[int, int]:
    half = 2 * slot * ops.WORD_BYTES

    def create() -> tuple[SharedFile | None, dict[str, Any]]:
        if mailbox.rank == 1:
            return None, {}
        shared = SharedFile.create(2 * half)
        return shared, {"file": shared.name}

    shared, theirs = attempt(mailbox, create)

    def pin() -> tuple[PinnedBlock, dict[str, Any]]:
        mapped = shared or SharedFile.attach(str(theirs["file"]))
        resources.append(PinnedBlock(device, mapped.memory))
        return resources[-1], {}

    try:
        block, _ = attempt(mailbox, pin)
    finally:
        if shared is not None:
            shared.unlink()  # mapped once, nameless from now on
    return block.address + mailbox.rank * half, block.address + (1 - mailbox.rank) * half


def _open_ipc(mailbox: Mailbox, device: int, slot: int, resources: list[Any]) -> tuple[tuple[int, int], Whole]:
    inbox = -(-2 * slot * ops.WORD_BYTES // 256) * 256

    def allocate() -> tuple[DeviceBlock, dict[str, Any]]:
        block = DeviceBlock(device, inbox + 2 * WHOLE_BYTES)
        resources.append(block)
        return block, {"handle": block.handle.hex()}

    own, theirs = attempt(mailbox, allocate)

    def attach() -> tuple[PeerBlock, dict[str, Any]]:
        peer = PeerBlock(device, bytes.fromhex(str(theirs["handle"])))
        resources.append(peer)
        return peer, {}

    peer, _ = attempt(mailbox, attach)
    return (own.address, peer.address), Whole(peer, inbox, own.address + inbox)
