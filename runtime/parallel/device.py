"""The contract of a collective on a device: exchanges that run on a stream, and its forms without a device link.

Every rank makes the same calls with the same shapes in the same order. A wait that expires does not raise where it
happens, in the middle of a stream: it poisons the step, and `check` raises before a token of that step may leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ...checkpoint.errors import CheckFailed, InputError
from .mailbox import MailboxCollective

if TYPE_CHECKING:
    from torch import Tensor

    from ...kernels.weights import Weight

MAX_REDUCE_BYTES = 256 << 10  # of fp16: 24 tokens of 5120 columns and some more


class CollectiveFault(CheckFailed):
    """An exchange between the ranks did not come to its end; nothing of the step may be used."""


class DeviceCollective(Protocol):
    """Exchange between the ranks of one model, for tensors on a device."""

    rank: int
    size: int
    name: str  # "solo", "cpu", "host", "ipc" or "nccl"
    halves: bool  # large sums take so long that a prompt's chunk is better read in two halves, side by side

    def reduce(self, part: Tensor, out: Tensor) -> None:
        """out = every rank's part, added in float32 with rank 0's first: part fp16 [T, H], out float32 [T, H].

        T * H * 2 is at most MAX_REDUCE_BYTES and T * H is even; both contiguous. Runs on the current stream without
        synchronising, and may be captured. Raises InputError where a tensor does not fit.
        """
        ...

    def reduce_large(self, part: Tensor, out: Tensor) -> None:
        """As `reduce`, for a message of any size; never captured."""
        ...

    def gather(self, part: Tensor, out: Tensor) -> None:
        """out = every rank's part side by side, in rank order: part float32 [T, n], out float32 [T, size * n].

        Rows may stand apart. Runs on the current stream without synchronising, and may be captured. Raises InputError
        where a tensor does not fit.
        """
        ...

    def check(self) -> None:
        """Call it after a synchronisation. Raises CollectiveFault if a wait has expired: the step must not leave."""
        ...


@runtime_checkable
class NormingCollective(DeviceCollective, Protocol):
    """A collective that can go on with what follows a sum, in the same launch."""

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
        """`reduce`, then `kernels.norm.rms_norm(x, weight, eps, delta=the sum, out=out)`, with the same bits.

        then: matrices that the next launch reads; they may be asked for meanwhile.
        """
        ...


class SoloDevice:
    """The collective of a single rank: nothing to exchange."""

    rank = 0
    size = 1
    name = "solo"
    halves = False

    def reduce(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out)
        out.copy_(part)

    def reduce_large(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out, limited=False)
        out.copy_(part)

    def gather(self, part: Tensor, out: Tensor) -> None:
        check_gather(part, out, self.size)
        out.copy_(part)

    def check(self) -> None:
        return None


class CpuDeviceCollective:
    """Two ranks over the CPU mailbox. Tensors of a device take the way through the host: right, slow, not captured.

    Waits are made where they are called, so an expired one raises MailboxTimeout there.
    """

    size = 2
    name = "cpu"
    halves = True

    def __init__(self, mailbox: MailboxCollective) -> None:
        self.rank = mailbox.rank
        self._mailbox = mailbox

    def reduce(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out)
        out.copy_(self._mailbox.all_reduce(part.float().cpu()))

    def reduce_large(self, part: Tensor, out: Tensor) -> None:
        check_reduce(part, out, limited=False)
        out.copy_(self._mailbox.all_reduce(part.float().cpu()))

    def gather(self, part: Tensor, out: Tensor) -> None:
        check_gather(part, out, self.size)
        out.copy_(self._mailbox.all_gather(part.cpu()))

    def check(self) -> None:
        return None


def check_reduce(part: Tensor, out: Tensor, *, limited: bool = True) -> None:
    """Refuse what `reduce` cannot take (InputError)."""
    import torch

    _check("part", part, torch.float16, None)
    _check("out", out, torch.float32, tuple(part.shape))
    _check_place(part, out)
    for name, tensor in (("part", part), ("out", out)):
        if not tensor.is_contiguous():
            raise InputError(f"{name} {list(tensor.shape)} is not contiguous (strides {list(tensor.stride())}).")
    if part.numel() % 2:
        raise InputError(f"part {list(part.shape)} has an odd number of values: an exchanged word holds two.")
    if limited and part.numel() * 2 > MAX_REDUCE_BYTES:
        raise InputError(
            f"part {list(part.shape)} is {part.numel() * 2} bytes: a small reduction has at most {MAX_REDUCE_BYTES}; "
            "use reduce_large."
        )


def check_gather(part: Tensor, out: Tensor, size: int) -> None:
    """Refuse what `gather` cannot take (InputError)."""
    import torch

    _check("part", part, torch.float32, None)
    _check("out", out, torch.float32, (part.shape[0], size * part.shape[1]))
    _check_place(part, out)
    for name, tensor in (("part", part), ("out", out)):
        if tensor.shape[1] > 1 and tensor.stride(1) != 1:
            raise InputError(f"{name} {list(tensor.shape)}: rows are not contiguous (strides {list(tensor.stride())}).")


def _check(name: str, tensor: Tensor, dtype: object, shape: tuple[int, ...] | None) -> None:
    if tensor.dim() != 2 or tensor.numel() == 0 or (shape is not None and tuple(tensor.shape) != shape):
        expected = "rows and columns, nothing empty" if shape is None else str(list(shape))
        raise InputError(f"{name} is {list(tensor.shape)}: expected {expected}.")
    if tensor.dtype != dtype:
        raise InputError(f"{name} is {tensor.dtype}: expected {dtype}.")


def _check_place(part: Tensor, out: Tensor) -> None:
    if part.device != out.device:
        raise InputError(f"part is on {part.device}, out on {out.device}: they must share a device.")
