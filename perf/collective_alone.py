"""Both ranks of an exchange on one card: what the kernels and the host's memory cost where there is no second card.

The two sides run at once, in two branches of one captured graph. `card`: inboxes in the card's memory, so no link is
crossed; `host`: in pinned host memory, whose bus both sides share, which two cards would not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from ..checkpoint.errors import CheckFailed, EnvironmentFault
from ..kernels import mailbox as ops
from ..kernels import norm
from ..kernels.peer import PinnedBlock
from ..runtime.parallel.links import GATHER_WORDS, MailboxDevice
from ..runtime.parallel.shared import SharedFile
from .collective import BUDGET_SECONDS, CANDIDATES, COLUMNS, HIDDEN, LARGE, TOKENS, Report, Row, sum_name
from .machine import facts_of
from .streams import streams

WAYS = ("card", "host")
IN_A_GRAPH = 100
REPLAYS = 15
WARM = 3
Action = Callable[[MailboxDevice], Callable[[], object]]  # what one side does, over buffers of its own


def measure() -> Report:
    """Every message over both memories. Raises EnvironmentFault without a card, CheckFailed where a sum is wrong."""
    if not torch.cuda.is_available():
        raise EnvironmentFault("no CUDA card is seen: `duovolt doctor` says what is missing.")
    device = torch.device("cuda", torch.cuda.current_device())
    rows: dict[str, dict[str, float]] = {}
    for way in WAYS:
        ends, memory = _pair(way, device)
        _check_sum(way, ends, device)
        for message, action, count in _messages(device):
            rows.setdefault(message, {})[way] = _seconds(ends, action, device, count) * 1e6
            for end in ends:
                end.check()
        if isinstance(memory, PinnedBlock):
            memory.close()
    facts = facts_of(device) | {"sides": "both on one card"}
    return Report([Row(message, row) for message, row in rows.items()], facts, {})


def _pair(way: str, device: torch.device) -> tuple[list[MailboxDevice], PinnedBlock | torch.Tensor]:
    """Both ends, and the memory that they meet in."""
    half = 2 * GATHER_WORDS * ops.WORD_BYTES
    memory: PinnedBlock | torch.Tensor
    if way == "host":
        shared = SharedFile.create(2 * half)
        shared.unlink()
        memory = PinnedBlock(device.index, shared.memory)
        address = memory.address
    else:
        memory = torch.zeros(2 * half, dtype=torch.uint8, device=device)
        address = memory.data_ptr()
    inboxes = (address, address + half)
    ends = []
    for rank in (0, 1):
        expired = torch.zeros(1, dtype=torch.int32).pin_memory()
        own = (inboxes[rank], inboxes[1 - rank], ops.new_state(device), expired)
        link = ops.Link(*own, BUDGET_SECONDS, GATHER_WORDS, rank, far=way == "host")
        ends.append(MailboxDevice("host" if way == "host" else "ipc", link, []))
    torch.cuda.synchronize(device)
    return ends, memory


def _messages(device: torch.device) -> list[tuple[str, Action, int]]:
    """Name, what a side does, and how often a graph holds it."""
    found: list[tuple[str, Action, int]] = [
        (sum_name(tokens), partial(_sum, device=device, tokens=tokens), IN_A_GRAPH) for tokens in TOKENS
    ]
    for tokens in (1, 4):
        for fused in (False, True):
            name = f"sum of {tokens}, residual, norm{' fused' * fused}"
            found.append((name, partial(_normed, device=device, tokens=tokens, fused=fused), IN_A_GRAPH))
    for rows, columns in ((4, CANDIDATES), (1, COLUMNS), (2, COLUMNS), (4, COLUMNS)):
        name = f"{'candidates' if columns == CANDIDATES else 'logits'} {rows} x {columns}"
        found.append((name, partial(_gather, device=device, rows=rows, columns=columns), 20))
    found += [(f"sum {size >> 20} MB", partial(_large, device=device, nbytes=size), 5) for size in LARGE]
    return found


def _sum(end: MailboxDevice, device: torch.device, tokens: int) -> Callable[[], object]:
    part, out = torch.zeros(tokens, HIDDEN, device=device).half(), torch.empty(tokens, HIDDEN, device=device)
    return lambda: end.reduce(part, out)


def _large(end: MailboxDevice, device: torch.device, nbytes: int) -> Callable[[], object]:
    part = torch.zeros(nbytes // 2048, 1024, device=device).half()
    out = torch.empty(nbytes // 2048, 1024, device=device)
    return lambda: end.reduce_large(part, out)


def _gather(end: MailboxDevice, device: torch.device, rows: int, columns: int) -> Callable[[], object]:
    part, out = torch.zeros(rows, columns, device=device), torch.empty(rows, 2 * columns, device=device)
    return lambda: end.gather(part, out)


def _normed(end: MailboxDevice, device: torch.device, tokens: int, fused: bool) -> Callable[[], object]:
    part, x = torch.zeros(tokens, HIDDEN, device=device).half(), torch.zeros(tokens, HIDDEN, device=device)
    weight, delta, out = torch.zeros(HIDDEN, device=device), torch.zeros_like(x), torch.empty_like(part)

    def apart() -> None:
        end.reduce(part, delta)
        norm.rms_norm(x, weight, 1e-6, delta=delta, out=out)

    return (lambda: ops.reduce_norm(end.link, part, x, weight, 1e-6, out)) if fused else apart


def _seconds(ends: list[MailboxDevice], action: Action, device: torch.device, count: int) -> float:
    """Median seconds from one exchange to the next, of a graph of `count` on each side."""
    acts = [action(end) for end in ends]
    # Were one side's stream that of the capture, the other side would begin after its end, for which it waits.
    start, *sides = streams(device, 1 + len(ends))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=start):
        for act, stream in zip(acts, sides, strict=True):
            stream.wait_stream(start)
            with torch.cuda.stream(stream):
                for _ in range(count):
                    act()
        for stream in sides:
            start.wait_stream(stream)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for number in range(REPLAYS + WARM):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if number >= WARM:
            times.append(begin.elapsed_time(end) * 1e-3 / count)
    return statistics.median(times)


def _check_sum(way: str, ends: list[MailboxDevice], device: torch.device) -> None:
    norm.rms_norm(torch.zeros(1, 8, device=device), torch.zeros(8, device=device), 1e-6)  # a capture must not load it
    parts = [torch.arange(rank, HIDDEN + rank, device=device).half().view(1, HIDDEN) / 4 for rank in (0, 1)]
    outs = [torch.empty(1, HIDDEN, device=device) for _ in ends]
    torch.cuda.synchronize(device)
    for end, part, out, stream in zip(ends, parts, outs, streams(device, len(ends)), strict=True):
        with torch.cuda.stream(stream):
            end.reduce(part, out)
    torch.cuda.synchronize(device)
    expected = parts[0].float() + parts[1].float()
    if not all(torch.equal(out, expected) for out in outs):
        raise CheckFailed(f"{way}: a sum is wrong.")
