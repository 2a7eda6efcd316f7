"""Exchanges between two ranks on their GPUs: sums of fp16 parts, and columns side by side. docs/collectives.md.

Both ranks make the same calls in the same order over a `Link` each, whose inboxes are each other's outboxes. All
functions run on torch's current stream, do not synchronise, and may be captured in a graph once `prepare` has loaded the
kernels. They raise InputError where a message does not fit the link.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.errors import InputError
from . import checks, norm
from .ahead import BLOCKS as ASKING
from .ahead import ahead
from .tuning import asked_bytes, choice_on
from .weights import Weight

SOURCE = "mailbox.cu"
WORD_BYTES = 8
MAX_BLOCKS = 512  # counters of the step
LAST_STEP = 2**32 - 1
HEADER = 8  # uint32 before the counters
DOORS = {"delay": 1, "drop": 2, "stale": 3}
_KERNELS = ("mailbox_reduce", "mailbox_reduce_norm", "mailbox_gather", "mailbox_add", "mailbox_join", "mailbox_meet")
_THREADS = 256  # with at most MAX_BLOCKS blocks, all of a kernel's are at work at once on a V100
_ONE_EACH = 128 * _THREADS  # words up to which a thread takes one, for the shortest wait; beyond, four


class LinkStruct(ctypes.Structure):
    """`Link` of mailbox.cu, passed by value."""

    _fields_ = (
        ("inbox", ctypes.c_uint64),
        ("outbox", ctypes.c_uint64),
        ("state", ctypes.c_uint64),
        ("expired", ctypes.c_uint64),
        ("budget", ctypes.c_uint64),
        ("slot", ctypes.c_uint32),
        ("rank", ctypes.c_int32),
        ("far", ctypes.c_int32),
        ("early", ctypes.c_int32),
    )


@dataclass
class Link:
    """One rank's end. `inbox` and `outbox` are addresses of 2 * slot words that the device sees, zeroed before any use.

    state: int32 [8 + 512] on the device, from `new_state`; expired: int32 [1], pinned, 0: the step whose wait expired;
    far: the inbox lies in host memory.
    """

    inbox: int
    outbox: int
    state: Tensor
    expired: Tensor
    budget_seconds: float
    slot: int
    rank: int
    far: bool

    @property
    def struct(self) -> LinkStruct:
        return LinkStruct(
            self.inbox,
            self.outbox,
            self.state.data_ptr(),
            self.expired.data_ptr(),
            int(self.budget_seconds * 1e9),
            self.slot,
            self.rank,
            int(self.far),
            int(self.early),
        )

    @property
    def early(self) -> bool:
        """Whether the next launch may begin while words travel, where launches overlap: the card's choice."""
        return "exchange" in choice_on(self.state.device).early


def new_state(
    device: torch.device, *, first_step: int = 1, door: str | None = None, door_step: int = 0, delay_ms: int = 0
) -> Tensor:
    """The counters at `first_step` (1 to 2^32 - 1, the same on both ranks); `door`: a fault for a test, once."""
    state = torch.zeros(HEADER + MAX_BLOCKS, dtype=torch.int64)
    state[HEADER:] = first_step
    if door is not None:
        state[1:4] = torch.tensor([DOORS[door], door_step, delay_ms])
    state[state >= 2**31] -= 2**32
    return state.to(torch.int32).to(device)


def reduce(link: Link, part: Tensor, out: Tensor) -> None:
    """out = rank 0's part + rank 1's in float32: part fp16, out float32 of its shape, contiguous, an even number."""
    checks.check("part", part, torch.float16, tuple(part.shape), link.state.device)
    checks.check("out", out, torch.float32, tuple(part.shape), link.state.device)
    words = _words(link, part.numel(), 2)
    _launch(link, "mailbox_reduce", words, (part, out, words))


def reduce_norm(
    link: Link,
    part: Tensor,
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    overflows: Tensor | None = None,
    then: Sequence[Weight] = (),
) -> None:
    """`reduce` and `norm.rms_norm(x, weight, eps, delta=...)` in one kernel, with the same bits.

    part fp16 [T, H] contiguous, H a multiple of 8 up to 8192; x float32 [T, H] and out fp16 [T, H], whose rows may stand
    apart; weight float32 [H]; overflows int32 [T]. `then`: matrices that the next launch reads, whose first bytes are asked
    for into the second-level cache while words travel, as many as the card's choice says; keep them until the kernel has run.
    """
    rows, columns = part.shape
    device = link.state.device
    if columns % 8 or columns > norm.MAX_COLUMNS or rows > MAX_BLOCKS:
        raise InputError(
            f"part is {list(part.shape)}: expected a multiple of 8 columns, at most {norm.MAX_COLUMNS}, and at most "
            f"{MAX_BLOCKS} rows."
        )
    checks.check("part", part, torch.float16, (rows, columns), device)
    checks.check("weight", weight, torch.float32, (columns,), device)
    strides = [
        checks.check_rows(name, tensor, dtype, (rows, columns), device)
        for name, tensor, dtype in (("x", x, torch.float32), ("out", out, torch.float16))
    ]
    if overflows is not None:
        checks.check("overflows", overflows, torch.int32, (rows,), device)
    _words(link, part.numel(), 2)
    for one in then:
        if one.words.device != device:
            raise InputError(f"a matrix of `then` is on {one.words.device}, the link on {device}.")
    free = rows + ASKING <= MAX_BLOCKS  # each block has its counter
    asked = ahead(then, asked_bytes(device) if free else 0)
    arguments = (
        *(link.struct, part, x, strides[0], weight, out, strides[1], overflows, rows, columns, float(eps)),
        asked,
    )
    threads = norm.row_threads(columns)
    checks.launch(SOURCE, "mailbox_reduce_norm", rows + asked.blocks, threads, arguments, device, overlap=link.early)


def gather(link: Link, part: Tensor, out: Tensor) -> None:
    """out [T, 2n] = rank 0's part | rank 1's, float32 [T, n]; rows may stand apart."""
    rows, columns = part.shape
    for name, tensor, width in (("part", part, columns), ("out", out, 2 * columns)):
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != (rows, width) or tensor.device != link.state.device:
            raise InputError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: expected torch.float32 "
                f"{[rows, width]} on {link.state.device}."
            )
    words = _words(link, part.numel(), 1)
    arguments = (part, part.stride(0), out, out.stride(0), rows, columns)
    _launch(link, "mailbox_gather", words, arguments)


def add(first: Tensor, second: Tensor, out: Tensor) -> None:
    """out = first + second in float32, of fp16 tensors of one shape with an even number of values."""
    for name, tensor, dtype in (("first", first, torch.float16), ("second", second, torch.float16)):
        checks.check(name, tensor, dtype, tuple(out.shape), out.device)
    checks.check("out", out, torch.float32, tuple(out.shape), out.device)
    words = out.numel() // 2
    checks.launch(SOURCE, "mailbox_add", _adding(words), 256, (first, second, out, words), out.device)


def meet(link: Link) -> None:
    """Wait until the peer is here too: what it had put on its stream before, copies to this card too, has been done."""
    checks.launch(SOURCE, "mailbox_meet", 1, 32, (link.struct,), link.state.device)


def join(link: Link, part: Tensor, other: int, out: Tensor) -> None:
    """`reduce` of a part of the peer's that stands at address `other` (a multiple of 16) since a `meet`; any even size."""
    checks.check("part", part, torch.float16, tuple(part.shape), link.state.device)
    checks.check("out", out, torch.float32, tuple(part.shape), link.state.device)
    words = out.numel() // 2
    arguments = (link.struct, part, ctypes.c_void_p(other), out, words)
    checks.launch(SOURCE, "mailbox_join", _adding(words), 256, arguments, link.state.device)


def _adding(words: int) -> int:
    return max(1, min(512, -(-words // 1024)))


def linger(seconds: float, device: torch.device) -> None:
    """Keep the current stream busy for up to two seconds of wall time: a rank that comes late, for a measurement."""
    checks.launch(SOURCE, "mailbox_linger", 1, 32, (int(seconds * 1e9),), device)


def prepare(device: torch.device) -> None:
    """Load the kernels: a capture must not be the first to ask for them, nor a stream beside one that waits for its peer, for
    a driver may load a kernel only when those that run have ended."""
    module = checks.module_on(SOURCE, device)
    for name in _KERNELS:
        module.attribute(name, "NUM_REGS")


def _words(link: Link, values: int, values_a_word: int) -> int:
    if values % values_a_word or not 0 < values <= values_a_word * link.slot:
        raise InputError(
            f"a message of {values} values: expected a multiple of {values_a_word}, at most {values_a_word * link.slot}."
        )
    return values // values_a_word


def _launch(link: Link, name: str, words: int, arguments: tuple[checks.Argument, ...]) -> None:
    share = _THREADS if words <= _ONE_EACH else 4 * _THREADS
    blocks = min(MAX_BLOCKS, -(-words // share))
    checks.launch(SOURCE, name, blocks, _THREADS, (link.struct, *arguments), link.state.device, overlap=link.early)
