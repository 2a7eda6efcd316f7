"""The trial of a collective, the child processes that make it, and the choice that follows. No GPU."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault, InputError
from duovolt.kernels import norm
from duovolt.kernels.weights import Weight
from duovolt.runtime.parallel import choice, nccl, trial, twins
from duovolt.runtime.parallel.choice import Choice, Verdict, choose
from duovolt.runtime.parallel.device import CollectiveFault, CpuDeviceCollective
from duovolt.runtime.parallel.faults import MAILBOX_DOOR
from duovolt.runtime.parallel.mailbox import Mailbox, MailboxCollective
from duovolt.runtime.parallel.probe import distrusted
from duovolt.runtime.parallel.region import Region, region_bytes
from duovolt.runtime.parallel.shared import SHARED_DIR
from duovolt.runtime.parallel.trial import LARGE
from duovolt.runtime.parallel.twins import Heard, run_twins

from .conftest import leftovers, wait_gone

CPU = torch.device("cpu")
ROUNDS = 60


class Faulty(CpuDeviceCollective):
    """A link that is right for `good` sums and then loses or spoils what the peer sent."""

    def __init__(self, mailbox: MailboxCollective, good: int, spoil: Callable[[torch.Tensor, torch.Tensor], None]):
        super().__init__(mailbox)
        self.good, self.spoil = good, spoil

    def reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        super().reduce(part, out)
        self.good -= 1
        if self.good < 0:
            self.spoil(part, out)


def dropped(part: torch.Tensor, out: torch.Tensor) -> None:
    out.fill_(float("nan"))  # the words never came: the buffer is as it was


def zeroed(part: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(part)  # the words came as zeros


def last_lost(part: torch.Tensor, out: torch.Tensor) -> None:
    out.view(-1)[-1] = 0


def one_ulp(part: torch.Tensor, out: torch.Tensor) -> None:
    out.view(torch.int32).view(-1)[0] ^= 1


def tried(make: Callable[[MailboxCollective], CpuDeviceCollective], timeout: float = 30) -> list[str | None]:
    region = Region(bytearray(region_bytes()))
    ends = [make(MailboxCollective(Mailbox(region, rank, timeout))) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda end: trial.try_collective(end, CPU, ROUNDS), ends))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "GATHERS", ((1, 1), (4, 3), (1, 513)))
    monkeypatch.setattr(trial, "TOKENS", (2, 4))
    monkeypatch.setattr(trial, "LARGE", ((30, 5120), (60, 5120)))


def test_a_right_link_passes(small: None) -> None:
    assert tried(CpuDeviceCollective) == [None, None]


@pytest.mark.parametrize(("spoil", "good"), [(dropped, 0), (zeroed, 30), (last_lost, 30), (one_ulp, 0)])
def test_a_link_that_spoils_data_is_found(small: None, spoil: Callable, good: int) -> None:
    """R01 R02: peer access is reported, and writes are dropped, zeroed or a bit off."""
    first, second = tried(
        lambda mailbox: Faulty(mailbox, good, spoil) if mailbox.rank else CpuDeviceCollective(mailbox), 1
    )
    assert second is not None and "wrong" in second
    assert first is None or "no answer" in first or "closed" in first  # its own direction was right


def test_parts_that_the_copy_engine_takes_are_tried_too(small: None) -> None:
    """R01: words may arrive where copies do not; a prompt's sums would be wrong on one rank."""
    from duovolt.runtime.parallel.links import WHOLE_FROM

    assert max(2 * rows * columns for rows, columns in LARGE) >= WHOLE_FROM
    assert min(2 * rows * columns for rows, columns in LARGE) < WHOLE_FROM

    class Copying(CpuDeviceCollective):
        def reduce_large(self, part: torch.Tensor, out: torch.Tensor) -> None:
            super().reduce_large(part, out)
            if len(part) == 60:
                out[-1, -1] = part[-1, -1]  # what the peer sent last is not there

    assert tried(Copying) == ["3 exchanges of integers were wrong"] * 2


def test_a_link_that_is_wrong_in_replays_only_is_found(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """R02: eager sums are right, replays are not."""
    replaying = threading.Event()
    monkeypatch.setattr(trial, "replayer", lambda action, device: (replaying.set(), action)[1])

    class Replayed(CpuDeviceCollective):
        def gather(self, part: torch.Tensor, out: torch.Tensor) -> None:
            super().gather(part, out)
            if replaying.is_set():
                out[0, 0] += 1

    assert all(found is not None and "replays" in found for found in tried(Replayed))


class Norming(CpuDeviceCollective):
    """A link with a sum that goes on to residual and norm; `slip` is added to one value of its norm."""

    slip = 0

    def reduce_norm(
        self,
        part: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        overflows: torch.Tensor | None,
        then: Sequence[Weight] = (),
    ) -> None:
        delta = torch.empty_like(x)
        self.reduce(part, delta)
        norm.rms_norm_reference(x, weight, eps, delta=delta, out=out)
        out.view(torch.int16)[0, 7] += self.slip


@pytest.mark.parametrize("slip", [0, 1])
def test_a_sum_that_goes_on_to_the_norm_is_tried_too(small: None, monkeypatch: pytest.MonkeyPatch, slip: int) -> None:
    monkeypatch.setattr(norm, "rms_norm", norm.rms_norm_reference)  # the plain form's kernel needs a card
    monkeypatch.setattr(Norming, "slip", slip)
    expected = [None, None] if not slip else ["3 exchanges of floats were wrong"] * 2
    assert tried(Norming) == expected


def test_a_wait_that_expired_is_a_fault_and_not_an_exception(small: None) -> None:
    class Expired(CpuDeviceCollective):
        def check(self) -> None:
            raise CollectiveFault("no answer from rank 1")

    assert tried(Expired)[0] == "no answer from rank 1"


@pytest.mark.parametrize(("rate", "right"), [(1.0, True), (1.8, True), (0.07, False), (15.0, False)])
def test_a_clock_of_another_rate_is_found(rate: float, right: bool) -> None:
    """R04: 200 ms that became 13 ms. 1.8: two servers that start at once on one card, as measured."""
    found = trial.clock_fault(lambda seconds: seconds * rate)
    assert (found is None) == right
    if not right:
        assert f"takes {20 * rate:.1f} ms for 20 ms" in str(found)


def heard(*finds: dict, exit_code: int | None = 0, errors: str = "") -> Heard:
    return Heard(list(finds), exit_code, errors)


def good(transport: str, microseconds: float | None = None) -> dict:
    return {"tried": transport, "fault": None, "microseconds": microseconds}


def bad(transport: str, fault: str = "7 sums were wrong") -> dict:
    return {"tried": transport, "fault": fault, "microseconds": None}


class Script:
    """Stands in for the children: what both say in each run, and what they were asked."""

    def __init__(self, *runs: tuple[Heard, Heard]) -> None:
        self.runs, self.asked = list(runs), []

    def __call__(self, arguments: Sequence[str], seconds: float) -> list[Heard]:
        self.asked.append(list(arguments))
        return list(self.runs.pop(0))


def twice(*finds: dict) -> tuple[Heard, Heard]:
    return heard(*finds), heard(*finds)


def test_the_faster_mailbox_is_chosen() -> None:
    script = Script(twice(good("ipc", 4.0), good("host", 9.0), good("nccl", 17.0)))
    made = choose("auto", run=script)
    assert (made.small, made.nccl_from, made.peer_memory) == ("ipc", None, True)
    assert str(made) == "ipc, large messages too; found: ipc right, 4.0 us; host right, 9.0 us; nccl right, 17.0 us"
    assert script.asked == [["ipc", "host", "nccl"]]
    slow_link = Script(
        (
            heard(good("ipc", 5.0), good("host", 9.0), good("nccl", 17.0)),
            heard(good("ipc", 49e3), good("host", 9.1), good("nccl", 17.0)),
        )
    )
    assert choose("auto", run=slow_link).small == "host"  # the slower rank counts


def test_both_ranks_on_one_card_have_mailboxes_and_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses a card twice; the children see the card once, and are told that they share it."""
    script = Script(twice(good("ipc"), good("host")))
    made = choose("auto", ["GPU-7", "GPU-7"], run=script)
    assert (made.small, made.nccl_from, made.halves) == ("ipc", None, False)
    assert script.asked == [["ipc", "host", "together"]]
    assert "nccl not used (it takes a card for every rank)" in str(made)
    assert Choice.parse(made.argument) == Choice("ipc", None, True)
    assert choose("auto", ["GPU-7", "GPU-7"], run=Script(twice(bad("ipc"), good("host")))).small == "host"
    script = Script(twice(good("host")))
    assert choose("host", ["GPU-7", "GPU-7"], run=script).small == "host" and script.asked == [["host", "together"]]
    with pytest.raises(EnvironmentFault, match=r"ranks cannot exchange data: ipc not used .*; host not used"):
        choose("auto", ["GPU-7", "GPU-7"], run=Script(twice(bad("ipc"), bad("host"))))
    with pytest.raises(InputError, match=r"--collective nccl, both ranks on one card: .* Use auto, ipc or host"):
        choose("nccl", ["GPU-7", "GPU-7"], run=Script())
    started: list[tuple[Sequence[str], str]] = []

    def run(module: str, devices: Sequence[str], arguments: Sequence[str], seconds: float, environment: dict) -> object:
        started.append((devices, environment["CUDA_VISIBLE_DEVICES"]))
        return twice(good("ipc"), good("host"), good("nccl"))

    monkeypatch.setattr(choice, "run_twins", run)
    for cards in (["GPU-7", "GPU-7"], ["GPU-7", "GPU-2"]):
        choose("auto", cards)
    assert started == [(["0", "0"], "GPU-7"), (["0", "1"], "GPU-7,GPU-2")]


def test_a_wrong_link_is_not_used_and_nccl_is_kept_from_it() -> None:
    """R01 R02: the other way is taken, and the log says so."""
    script = Script(
        (heard(good("ipc", 4.0), good("host", 9.0), good("nccl")), heard(bad("ipc"), good("host", 9.0), good("nccl")))
    )
    made = choose("auto", run=script)
    assert (made.small, made.peer_memory) == ("host", False)
    assert "ipc not used (7 sums were wrong)" in str(made)
    lost = "rank {}: no answer from rank {} at step {}"
    script = Script(
        (
            heard(bad("ipc", lost.format(0, 1, 401)), good("host", 9.0), good("nccl")),
            heard(bad("ipc", lost.format(1, 0, 400)), good("host", 9.0), good("nccl")),
        )
    )
    told = str(choose("auto", run=script))  # what the one lost, the other has to wait for: both are said
    assert all(lost.format(*facts) in told for facts in ((0, 1, 401), (1, 0, 400)))


def test_a_link_that_hangs_costs_its_children_only() -> None:
    """R03: a capture or an exchange without end, say."""
    hung = (heard({"began": "ipc"}, exit_code=None), heard({"began": "ipc"}, exit_code=None))
    script = Script(hung, twice(good("host", 9.0), good("nccl")))
    made = choose("auto", run=script)
    assert (made.small, made.peer_memory) == ("host", False)
    assert script.asked == [["ipc", "host", "nccl"], ["host", "nccl", "distrusted"]]
    assert "ipc not used (rank 0's trial hung)" in str(made)


def test_whatever_dies_is_named_and_the_end_is_an_error_not_a_loop() -> None:
    dead = heard(exit_code=-11, errors="Fatal Python error\nSegmentation fault")
    script = Script((dead, heard()), (heard(good("host")), dead), twice(bad("nccl")))
    with pytest.raises(
        EnvironmentFault, match=r"cannot exchange data: ipc not used .rank 0's trial ended with exit code -11: Seg"
    ) as error:
        choose("auto", run=script)
    assert "host not used" in str(error.value) and "nccl not used" in str(error.value)
    assert [len(asked) for asked in script.asked] == [3, 3, 2]


def test_a_distrusted_link_is_tried_where_it_is_wished_for() -> None:
    script = Script(twice(bad("ipc", "the IOMMU translates"), good("host", 9.0), good("nccl")))
    made = choose("auto", run=script)
    assert (made.small, made.peer_memory) == ("host", False)
    script = Script(twice(good("ipc", 4.0), good("nccl")))
    made = choose("ipc", run=script)
    assert script.asked == [["ipc", "nccl", "trusted"]] and (made.small, made.peer_memory) == ("ipc", True)


def test_nccl_takes_what_it_is_faster_at() -> None:
    def large(transport: str, *times: float) -> dict:
        return good(transport, 5.0) | {"large": dict(zip(("524288", "1048576", "2097152"), times, strict=True))}

    for nccl_times, expected in (
        ((20, 18, 24), 1048576),
        ((7, 9, 9), 524288),
        ((20, 22, 60), None),
        ((20, 22, 38), None),  # not clearly
        ((9, 60, 9), 2097152),
    ):
        made = choose("ipc", run=Script(twice(large("ipc", 10, 24, 40), large("nccl", *nccl_times))))
        assert made.nccl_from == expected
    assert "nccl from 2048 KB" in str(made)


def test_chunks_go_in_halves_where_the_link_is_slow() -> None:
    """Below 40 GB/s of what takes large messages."""
    for transport, microseconds, halves in (("ipc", 200.0, False), ("ipc", 230.0, True), ("host", 900.0, True)):
        finds = [bad(other) for other in choice.TRANSPORTS]
        finds[choice.TRANSPORTS.index(transport)] = good(transport, 5.0) | {"large": {str(8 << 20): microseconds}}
        made = choose("auto", run=Script(twice(*finds)))
        assert (made.small, made.halves) == (transport, halves)
    assert "chunks in halves" in str(made)


def test_what_others_report_of_an_nccl_is_told() -> None:
    """R10: a version with a known fault is named."""
    made = choose("nccl", run=Script(twice(good("nccl", 17.0) | {"note": "illegal memory access"})))
    assert str(made) == "nccl; found: nccl right, 17.0 us, though reported: illegal memory access"


def test_a_wish_that_fails_is_refused_and_not_replaced() -> None:
    with pytest.raises(
        EnvironmentFault, match=r"--collective ipc: ipc not used .7 sums were wrong.*Try --collective auto"
    ):
        choose("ipc", run=Script(twice(bad("ipc"), good("nccl"))))
    only = choose("auto", run=Script(twice(bad("ipc"), bad("host"), good("nccl"))))
    assert (only.small, only.nccl_from) == ("nccl", None)
    without = choose("host", run=Script(twice(good("host"), bad("nccl"))))
    assert (without.small, without.nccl_from) == ("host", None)


@pytest.mark.parametrize(
    "made",
    [
        Choice("ipc", 1 << 20, True),
        Choice("host", None, False, halves=True),
        Choice("nccl", None, True, halves=True),
        Choice("host", 512, False),
    ],
)
def test_a_choice_travels_as_a_word(made: Choice) -> None:
    assert Choice.parse(made.argument) == made


@pytest.mark.parametrize("text", ["", "auto", "ipc,x", "peer", "ipc,nccl=", "ipc,peer,nccl=5", "ipc,nccl=1,nccl=2"])
def test_a_word_that_is_no_choice_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="expected host, ipc or nccl"):
        Choice.parse(text)


def test_an_iommu_that_translates_makes_pcie_peers_distrusted(tmp_path: Path) -> None:
    """R01: what makes writes go astray is seen beforehand."""
    for address, kind in (("0000:3b:00.0", "identity"), ("0000:d8:00.0", "DMA-FQ")):
        (tmp_path / address / "iommu_group").mkdir(parents=True)
        (tmp_path / address / "iommu_group" / "type").write_text(f"{kind}\n")
    assert distrusted(["0000:3B:00.0"], False, tmp_path) is None
    found = distrusted(["0000:3B:00.0", "0000:D8:00.0"], False, tmp_path)
    assert found is not None and "GPU 0000:D8:00.0 (type DMA-FQ)" in found and "iommu=pt" in found
    assert distrusted(["0000:3B:00.0", "0000:D8:00.0"], True, tmp_path) is None  # NVLink does not pass it
    assert distrusted(["0000:00:00.0"], False, tmp_path) is None


def test_an_nccl_without_code_for_the_card_is_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """R10: versions are checked before the first call."""
    monkeypatch.setattr(nccl, "nccl_arches", lambda: None)
    assert nccl.refusal((2, 26, 2), (7, 0)) is None
    assert nccl.refusal((2, 21, 5), (7, 0)) is None
    found = nccl.refusal((2, 28, 9), (7, 0))
    assert found is not None and "NCCL 2.28.9 may hold no code for sm_70" in found and "2.26.2" in found
    assert nccl.refusal((2, 28, 9), (9, 0)) is None
    assert "2418" in str(nccl.warning((2, 26, 2))) and nccl.warning((2, 21, 5)) is None


TWIN = """
import sys, time
from duovolt.runtime.parallel.handshake import exchange_facts
from duovolt.runtime.parallel.twins import be_twin
def main(twin):
    twin.say(met=exchange_facts(twin.mailbox, {"rank": twin.rank})["rank"], arguments=twin.arguments, device=twin.device)
    print("a library's own words")
    if twin.arguments[0] == "hang" and twin.rank == 1:
        time.sleep(600)
    if twin.arguments[0] == "die" and twin.rank == 1:
        time.sleep(600)
    if twin.arguments[0] == "die" and twin.rank == 0:
        sys.exit("last words")
sys.exit(be_twin(main, 20))
"""


@pytest.fixture
def twin_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "twin_of_test.py").write_text(TWIN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    return "twin_of_test"


def test_twins_meet_and_say_what_they_find(twin_module: str) -> None:
    before = set(SHARED_DIR.iterdir())
    first, second = run_twins(twin_module, ["0", "5"], ["x"], 30)
    assert first.lines == [{"met": 1, "arguments": ["x"], "device": "0"}]
    assert second.lines == [{"met": 0, "arguments": ["x"], "device": "5"}]
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert not {path for path in set(SHARED_DIR.iterdir()) - before if f"-{os.getpid()}-" in path.name}


def test_a_twin_that_hangs_is_stopped_and_what_it_said_is_kept(twin_module: str) -> None:
    """R03: bounded in time, and what it held on the card goes with it."""
    begin = time.monotonic()
    first, second = run_twins(twin_module, ["0", "1"], ["hang"], 6)
    assert time.monotonic() - begin < 12
    assert first.exit_code == 0 and second.exit_code is None and second.lines[0]["met"] == 0


def test_a_pause_of_the_whole_machine_is_no_silence_of_the_twins(
    twin_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock finds that twenty seconds have passed."""
    looks = itertools.count()
    monkeypatch.setattr(twins, "time", SimpleNamespace(monotonic=lambda: 20.0 * next(looks)))
    first, second = run_twins(twin_module, ["0", "1"], ["x"], 30)
    assert [one.lines[0]["met"] for one in (first, second)] == [1, 0]


ALONE = """
import sys
from duovolt.runtime.parallel.twins import run_twins
run_twins(sys.argv[1], ["0", "1"], ["hang"], 60)
"""


def test_a_server_that_is_ended_while_it_tries_its_links_leaves_nothing(twin_module: str) -> None:
    server = subprocess.Popen([sys.executable, "-c", ALONE, twin_module])
    try:
        deadline = time.monotonic() + 30
        while not (
            children := list(map(int, Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()))
        ):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert leftovers(server.pid)
        server.terminate()
        assert server.wait(20) == 128 + signal.SIGTERM
        assert leftovers(server.pid) == []
        wait_gone(children, 10)
    finally:
        server.kill()
        server.wait()


def test_a_twin_that_dies_leaves_its_last_words_and_its_twin_does_not_wait_long(
    twin_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins, "_ALONE_SECONDS", 0.5)
    begin = time.monotonic()
    first, second = run_twins(twin_module, ["0", "1"], ["die"], 120)
    assert time.monotonic() - begin < 60
    assert first.exit_code == 1 and first.errors == "last words" and second.exit_code is None


@pytest.mark.slow
@pytest.mark.parametrize("door", [None, "1:200:drop"])
def test_the_probe_of_two_processes(monkeypatch: pytest.MonkeyPatch, door: str | None) -> None:
    if door:
        monkeypatch.setenv(MAILBOX_DOOR, door)
    found = run_twins(choice.PROBE, ["cpu", "cpu"], ["cpu"], 60)
    verdicts = choice.judge(["cpu"], found)
    if door is None:
        assert verdicts == [Verdict("cpu", None)], found
    else:
        assert verdicts[0].fault is not None
