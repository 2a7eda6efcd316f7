"""The device collective without a device: one rank, and two over the CPU mailbox."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.runtime.parallel import ways
from duovolt.runtime.parallel.choice import Choice
from duovolt.runtime.parallel.device import CpuDeviceCollective, DeviceCollective, SoloDevice
from duovolt.runtime.parallel.mailbox import Mailbox, MailboxCollective, MailboxTimeout
from duovolt.runtime.parallel.nccl import P2P_SWITCH
from duovolt.runtime.parallel.region import Region, region_bytes
from duovolt.runtime.parallel.ways import TwoWays, open_way

SLOT = 64


def pair(timeout: float = 20) -> list[CpuDeviceCollective]:
    """Both ranks in this process, over one piece of memory."""
    region = Region(bytearray(region_bytes(SLOT)), SLOT)
    return [CpuDeviceCollective(MailboxCollective(Mailbox(region, rank, timeout))) for rank in (0, 1)]


def together(action: Callable[[CpuDeviceCollective], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(action, pair()))


def parts(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * columns)
    return [torch.randn(rows, columns, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("method", ["reduce", "reduce_large"])
def test_sums_of_halves_in_float32_are_the_same_on_both_ranks(method: str) -> None:
    mine = parts(3, 96, torch.float16)

    def run(collective: CpuDeviceCollective) -> torch.Tensor:
        out = torch.full((3, 96), float("nan"))
        getattr(collective, method)(mine[collective.rank], out)
        collective.check()
        return out

    first, second = together(run)
    assert torch.equal(first, mine[0].float() + mine[1].float())
    assert torch.equal(first, second)


def test_rows_that_stand_apart_are_gathered_in_rank_order() -> None:
    mine = parts(3, 40, torch.float32)
    wide = torch.zeros(2, 3, 96)

    def run(collective: CpuDeviceCollective) -> torch.Tensor:
        out = wide[collective.rank, :, :60]
        collective.gather(mine[collective.rank][:, :30], out)
        return out

    first, second = together(run)
    assert torch.equal(first, torch.cat([part[:, :30] for part in mine], dim=1))
    assert torch.equal(first, second)
    assert not wide[:, :, 60:].any()


def test_a_silent_peer_is_an_error() -> None:
    with pytest.raises(MailboxTimeout):
        pair(timeout=0.05)[0].reduce(torch.zeros(1, 8, dtype=torch.float16), torch.zeros(1, 8))


def test_one_rank_keeps_its_values() -> None:
    solo: DeviceCollective = SoloDevice()
    part, out = torch.randn(2, 8).half(), torch.zeros(2, 8)
    solo.reduce(part, out)
    assert torch.equal(out, part.float())
    solo.reduce_large(2 * part, out)
    assert torch.equal(out, (2 * part).float())
    solo.gather(part.float(), out)
    assert torch.equal(out, part.float())
    solo.check()


HALF = torch.zeros(2, 8, dtype=torch.float16)
REFUSED = {
    "one dimension": ("reduce", HALF[0], torch.zeros(8), r"part is \[8\]: expected rows and columns"),
    "nothing": ("reduce", HALF[:0], torch.zeros(0, 8), "nothing empty"),
    "wide part": ("reduce", HALF.float(), torch.zeros(2, 8), "part is torch.float32: expected torch.float16"),
    "narrow out": ("reduce", HALF, HALF, "out is torch.float16: expected torch.float32"),
    "other shape": ("reduce", HALF, torch.zeros(8, 2), r"out is \[8, 2\]: expected \[2, 8\]"),
    "columns apart": ("reduce", HALF[:, ::2], torch.zeros(2, 4), "part .* is not contiguous"),
    "odd": ("reduce", HALF[:1, :7].contiguous(), torch.zeros(1, 7), "odd number of values"),
    "too large": ("reduce", HALF.new_zeros(26, 5120), torch.zeros(26, 5120), "use reduce_large"),
    "gather halves": ("gather", HALF, torch.zeros(2, 16), "part is torch.float16"),
    "gather width": ("gather", HALF.float(), torch.zeros(2, 8), r"out is \[2, 8\]: expected \[2, 16\]"),
    "gather apart": ("gather", torch.zeros(8, 2).t(), torch.zeros(2, 16), "rows are not contiguous"),
    "elsewhere": ("gather", torch.zeros(2, 8, device="meta"), torch.zeros(2, 16), "must share a device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_calls_are_refused(case: str) -> None:
    method, part, out, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        getattr(pair()[0], method)(part, out)


class Recorder:
    """Stands in for an opened way."""

    rank, name = 0, "ipc"

    def __init__(self, calls: list[str], label: str) -> None:
        self.calls, self.label = calls, label

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append(f"{self.label}.{method}")


def test_large_sums_go_to_nccl_from_its_size_on() -> None:
    calls: list[str] = []
    both = TwoWays(cast(Any, Recorder(calls, "mailbox")), cast(Any, Recorder(calls, "nccl")), nccl_from=4096)
    half, wide = torch.zeros(1, 2048, dtype=torch.float16), torch.zeros(1, 2048)
    both.reduce_large(half, wide)
    both.reduce_large(half[:, :2046], wide[:, :2046])
    both.reduce(half, wide)
    both.gather(wide, torch.zeros(1, 4096))
    both.check()
    both.close()
    assert calls == [
        "nccl.reduce_large",
        "mailbox.reduce_large",
        "mailbox.reduce",
        "mailbox.gather",
        "mailbox.check",
        "nccl.close",
        "mailbox.close",
    ]
    assert (both.name, both.rank, both.size) == ("ipc", 0, 2)


@pytest.mark.parametrize(
    ("choice", "opened", "switch"),
    [
        (Choice("ipc", None, True), ["ipc"], None),
        (Choice("host", 1 << 20, False), ["host", "nccl"], "1"),
        (Choice("nccl", None, False), ["nccl"], "1"),
    ],
)
def test_a_choice_opens_what_it_names_and_nccl_obeys(
    monkeypatch: pytest.MonkeyPatch, choice: Choice, opened: list[str], switch: str | None
) -> None:
    calls: list[str] = []
    monkeypatch.setenv(P2P_SWITCH, "placeholder")
    monkeypatch.delenv(P2P_SWITCH)
    monkeypatch.setattr(ways, "open_mailbox", lambda name, *rest: calls.append(name) or Recorder(calls, name))
    monkeypatch.setattr(ways, "NcclDevice", lambda *rest: calls.append("nccl") or Recorder(calls, "nccl"))
    open_way(choice, cast(Any, None), torch.device("cpu"), 5.0)
    assert calls == opened
    assert os.environ.get(P2P_SWITCH) == switch
