"""What the supervisor decides: pauses of a crash loop, ranks that idle over open answers, ranks that are not alike."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import asdict

from duovolt.checkpoint.errors import InputError
from duovolt.runtime.messages import CancelRequest, GenerateRequest, SamplingParams, StepRecord, TokenEvent
from duovolt.runtime.parallel.lockstep import SharedLockstep, SoloLockstep
from duovolt.runtime.parallel.lockstep_log import LOG_DOOR, logged
from duovolt.runtime.parallel.region import Region, region_bytes
from duovolt.runtime.proxy import hub as hub_module
from duovolt.runtime.proxy import silence as silence_module
from duovolt.runtime.proxy import supervisor as supervisor_module
from duovolt.runtime.proxy.errors import ApiError
from duovolt.runtime.proxy.group import RankFault, RankGroup
from duovolt.runtime.proxy.hub import Hub
from duovolt.runtime.proxy.load_watch import LoadWatch
from duovolt.runtime.proxy.options import ServeOptions
from duovolt.runtime.proxy.plan import ServePlan, make_plan
from duovolt.runtime.proxy.silence import MOST_A_LOOK, Silence, within
from duovolt.runtime.proxy.supervisor import Supervisor
from duovolt.runtime.rank.wire import Hello, Ready

from .stub_model import make_ranks, write_script


@pytest.fixture
def plan(tmp_path: Path) -> ServePlan:
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
    return make_plan(
        ServeOptions(make_ranks(tmp_path / "ranks", 2), backend=f"scripted:{script}", quiet=True, watchdog_seconds=0.6)
    )


def request() -> GenerateRequest:
    return GenerateRequest(0, [1], 5, [], False, SamplingParams())


class FakeGroup:
    """A generation without processes: its start fails as `failures` say, then it serves until `fault`."""

    failures: list[BaseException | None] = []
    made: list[FakeGroup] = []

    def __init__(self, plan: ServePlan, relay: Any, start: int) -> None:
        self.number = start
        self.fault: asyncio.Future[RankFault] = asyncio.get_running_loop().create_future()
        self.busy = False
        self.stopped = False
        FakeGroup.made.append(self)

    async def start(self) -> None:
        failure = FakeGroup.failures.pop(0) if FakeGroup.failures else None
        if failure is not None:
            raise failure

    async def stop(self) -> None:
        self.stopped = True

    def send(self, message: Any) -> None: ...

    def facts(self) -> dict[str, str]:
        return {"kv": "none"}

    def step_age(self) -> float:
        return 0.0

    def silence(self) -> float:
        return 0.0

    def report_hang(self, seconds: float) -> None:
        if not self.fault.done():
            self.fault.set_result(RankFault(f"hang of {seconds:.1f} s"))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> type[FakeGroup]:
    FakeGroup.failures, FakeGroup.made = [], []
    monkeypatch.setattr(supervisor_module, "RankGroup", FakeGroup)
    return FakeGroup


def test_a_crash_loop_backs_off_and_says_when_to_come_again(
    plan: ServePlan, fakes: type[FakeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses double up to 30 s, also when a load takes long; a generation that served for a minute begins anew."""
    pauses: list[float] = []
    retries: list[int] = []
    told: list[Any] = []
    lived = 0.0

    async def run() -> None:
        nonlocal lived
        hub = Hub(1, 4)
        supervisor = Supervisor(plan, hub, lambda facts: None)

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            retries.append(hub.retry_after)
            if len(pauses) == 8:
                monkeypatch.setattr(supervisor_module, "_STEADY_SECONDS", 0.0)
            if len(pauses) == 9:
                supervisor.stop()

        monkeypatch.setattr(supervisor, "_sleep", sleep)
        running = asyncio.create_task(supervisor.run())
        fakes.failures = [None, *[RankFault("again")] * 3, OSError(11, "no more processes"), *[RankFault("again")] * 3]
        while not running.done():
            await asyncio.sleep(0.01)
            for group in fakes.made:
                if hub.send == group.send and not group.fault.done():
                    assert hub.retry_after == 1, "the ranks are there: nothing of an earlier fault is left"
                    opened = hub.submit([GenerateRequest(0, [1], 1, [], False, SamplingParams())])[0]
                    group.fault.set_result(RankFault("gone"))
                    told.append((await opened.events.get()).headers["Retry-After"])  # type: ignore[union-attr]
        await running
        assert hub.counters.restarts == 9
        assert all(group.stopped for group in fakes.made)
        assert [group.number for group in fakes.made] == list(range(9))

    asyncio.run(run())
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 1]
    assert retries == [pause + 1 for pause in pauses]
    assert told == ["2", "2"], "the answers that were broken off: as long as the pause that follows"


def test_a_first_start_that_fails_ends_the_server(plan: ServePlan, fakes: type[FakeGroup]) -> None:
    async def run(failure: BaseException) -> RankFault:
        fakes.failures = [failure]
        with pytest.raises(RankFault) as raised:
            await Supervisor(plan, Hub(1, 4), lambda facts: None).run()
        return raised.value

    assert asyncio.run(run(RankFault("no", 2))).exit_code == 2
    fault = asyncio.run(run(OSError(24, "Too many open files")))
    assert fault.exit_code == 3 and "cannot start the ranks: [Errno 24] Too many open files" in str(fault)


def test_ranks_that_idle_over_an_open_answer_are_not_ready_and_taken_to_hang(
    plan: ServePlan, fakes: type[FakeGroup]
) -> None:
    """A message that went astray: the ranks show signs of life, and nobody will ever answer."""

    async def run() -> None:
        hub = Hub(1, 4)
        supervisor = Supervisor(plan, hub, lambda facts: None)
        running = asyncio.create_task(supervisor.run())
        while hub.send is None:
            await asyncio.sleep(0.01)
        (opened,) = hub.submit([request()])
        fakes.made[0].busy = True
        await asyncio.sleep(0.5)
        assert supervisor.ready and supervisor.step_age == 0.0
        fakes.made[0].busy = False
        assert supervisor.ready
        hub.relay([TokenEvent(opened.request.request_id, [1], [], None, 0, 0, 1)])
        await asyncio.sleep(0.4)
        assert not supervisor.ready  # half of the watchdog's time
        error = None
        while not isinstance(error, ApiError):
            error = await asyncio.wait_for(opened.events.get(), 5)
        assert "hang of 0." in str(error) and error.status == 503
        supervisor.stop()
        await running

    asyncio.run(run())


def test_a_pause_of_the_server_is_no_silence_of_its_ranks(plan: ServePlan, fakes: type[FakeGroup]) -> None:
    """SIGSTOP between the send of a request and the ranks' first step for it: at SIGCONT the answer waits to be read."""

    async def run() -> None:
        hub = Hub(1, 4)
        supervisor = Supervisor(plan, hub, lambda facts: None)
        running = asyncio.create_task(supervisor.run())
        while hub.send is None:
            await asyncio.sleep(0.01)
        (opened,) = hub.submit([request()])
        assert supervisor.step_age == 0.0  # the look that finds an answer open and nobody busy with it
        time.sleep(3 * plan.options.watchdog_seconds)
        assert supervisor.step_age == MOST_A_LOOK
        await asyncio.sleep(0.02)  # the watch has looked, too
        hub.relay([TokenEvent(opened.request.request_id, [1], [], "stop", 0, 0, 1)])
        await asyncio.sleep(0.4)
        assert not fakes.made[0].fault.done() and supervisor.ready and hub.counters.restarts == 0
        supervisor.stop()
        await running

    asyncio.run(run())


def test_silence_is_counted_from_look_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(silence_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    silence = Silence()

    def look(seconds: float, sign: int | None, age: float = 0.0) -> float:
        now[0] += seconds
        return silence.look(sign, age)

    assert [look(0.25, 7, 9.0), look(0.25, 7), look(0.25, 7), look(60, 7)] == [0, 0.25, 0.5, 0.5 + MOST_A_LOOK]
    assert [look(0.25, 8, 0.125), look(0.25, 8), look(0.25, 9, 5.0)] == [0.125, 0.375, 0.25]
    assert [look(0.25, None), look(1, None), look(1, 9), look(0.25, 9)] == [0, 0, 0, 0.25]


def test_what_comes_behind_a_pause_is_still_waited_for() -> None:
    async def late(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "here"

    async def run() -> None:
        async def paused() -> str:
            await asyncio.sleep(0.02)
            time.sleep(2.0)
            return await late(0.2)

        assert await within(paused(), 1.2) == "here"
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await within(late(60.0), 0.6)
        assert 0.5 < time.monotonic() - began < 5
        with pytest.raises(KeyError):
            await within(asyncio.wait_for(_fail(), 1), 1)

    asyncio.run(run())


async def _fail() -> None:
    raise KeyError("x")


def test_an_idle_server_without_answers_stays_ready(plan: ServePlan, fakes: type[FakeGroup]) -> None:
    async def run() -> None:
        hub = Hub(1, 4)
        supervisor = Supervisor(plan, hub, lambda facts: None)
        running = asyncio.create_task(supervisor.run())
        await asyncio.sleep(1.0)
        assert supervisor.ready and len(fakes.made) == 1
        supervisor.stop()
        await running

    asyncio.run(run())


def group_of(plan: ServePlan, pids: list[int]) -> RankGroup:
    """A group whose processes are said to be there."""
    group = RankGroup(plan, lambda events: None, start=0)
    group._processes = [type("Process", (), {"pid": pid, "returncode": 0})() for pid in pids]
    return group


def hello(plan: ServePlan, rank: int, pid: int) -> Hello:
    identity = plan.identity
    return Hello(
        *(rank, 2, pid, identity.conversion_id, identity.recipe, identity.tokenizer_digest, identity.config_digest, {}),
        plan.backend.argument,
    )


@pytest.mark.parametrize(
    ("pids", "facts", "words"),
    [
        ([7, 9], [{}, {}], "rank 1 is process 9, not 8"),
        ([7, 8], [{"kv_pages": "10"}, {"kv_pages": "9"}], "differ in kv_pages: rank 0 has 10, rank 1 has 9"),
        (
            [7, 8],
            [{"prompts": "plain"}, {"prompts": "wide:49-256"}],
            "differ in prompts: rank 0 has plain, rank 1 has wide",
        ),
        (
            [7, 8],
            [{"attention": "split"}, {"attention": "plain"}],
            "differ in attention: rank 0 has split, rank 1 has plain",
        ),
        ([7, 8], [{"head_split": "on"}, {"head_split": "off"}], "differ in head_split: rank 0 has on, rank 1 has off"),
        ([7, 8], [{"collective": "host"}, {}], "differ in collective: rank 0 has host, rank 1 has None"),
        ([7, 8], [{"kv": "int8"}, {"kv": "int8"}], None),
    ],
)
def test_ranks_that_are_not_alike_never_serve(
    plan: ServePlan, pids: list[int], facts: list[dict[str, str]], words: str | None
) -> None:
    async def run() -> None:
        group = group_of(plan, [7, 8])
        for rank in (0, 1):
            group._take(rank, hello(plan, rank, pids[rank]))
            group._take(rank, Ready(rank, facts[rank]))
        assert not group.fault.done()
        if words is None:
            group._check_ready()
        else:
            with pytest.raises(RankFault, match=words):
                group._check_ready()

    asyncio.run(run())


@pytest.mark.parametrize("twice", ["hello", "ready"])
def test_a_rank_that_comes_twice_is_a_fault(plan: ServePlan, twice: str) -> None:
    async def run() -> None:
        group = group_of(plan, [7, 8])
        messages: list[Any] = [hello(plan, 1, 8), Ready(1, {})]
        group._take(1, messages[0])
        group._take(1, messages[1])
        assert not group.fault.done()
        group._take(1, messages[twice == "ready"])
        assert str(group.fault.result()) == "rank 1 has started twice."

    asyncio.run(run())


def test_a_process_that_stands_still_is_seen_by_its_processor_time() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watch = LoadWatch([busy.pid])
        watch.look(busy.pid)
        deadline = time.monotonic() + 20
        time.sleep(0.2)
        while watch.look(busy.pid) >= 0.1:  # it has taken none since: the machine may be busy
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(busy.pid, signal.SIGSTOP)
        time.sleep(0.1)
        watch.look(busy.pid)
        time.sleep(0.3)
        assert 0.3 <= watch.look(busy.pid) < 5
    finally:
        busy.kill()
        busy.wait()
    assert watch.look(busy.pid) >= 0


def test_clients_that_come_and_go_cannot_fill_the_ranks_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """While ranks are in a long step, what was sent and cancelled still waits in their sockets: it counts."""
    monkeypatch.setattr(hub_module, "_MOST_LEAVING", 3)

    async def run() -> None:
        hub = Hub(lanes=1, max_waiting=4)
        sent: list[Any] = []
        hub.send = sent.append
        for _ in range(4):
            (opened,) = hub.submit([request()])
            hub.release(opened, complete=False)
        with pytest.raises(ApiError, match="4 answers whose clients have left are being ended") as refused:
            hub.submit([request()])
        assert refused.value.status == 429 and len(sent) == 8
        number = next(message.request_id for message in sent if isinstance(message, CancelRequest))
        hub.relay([TokenEvent(number, [], [], "cancelled", 0, 0, 1)])
        hub.submit([request()])
        hub.fail_all(ApiError(503, "gone"))
        for _ in range(4):
            hub.release(hub.submit([request()])[0], complete=False)
        assert hub.counters.cancelled == 8 and hub.counters.rejected == 1

    asyncio.run(run())


def test_the_log_of_records_is_the_same_on_both_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region(bytearray(region_bytes(4)), 4)
    plain = SoloLockstep()
    assert logged(plain, "name", 0) is plain
    monkeypatch.setenv(LOG_DOOR, str(tmp_path))
    ranks = [logged(SharedLockstep(region, rank, 10), "name", rank) for rank in (0, 1)]
    records = [StepRecord("prefill", 1, 2**64 - 1, 3, 4, 5), StepRecord("round", 2, 0, 4, 4, 0)]

    def work(rank: int) -> None:
        for number, record in enumerate(records):
            ranks[rank].agree(record, 1 + rank + number, 1 << (rank + number))

    thread = threading.Thread(target=work, args=(1,))
    thread.start()
    work(0)
    thread.join(10)
    first, second = (tmp_path / f"name.rank-{rank}.jsonl" for rank in (0, 1))
    assert first.read_bytes() == second.read_bytes()
    assert [json.loads(line) for line in first.read_text().splitlines()] == [
        {"sequence": 1, **asdict(records[0]), "admitted": 1, "cancel_mask": 3},
        {"sequence": 2, **asdict(records[1]), "admitted": 2, "cancel_mask": 6},
    ]
    with pytest.raises(InputError, match="cannot write"):
        logged(plain, "name", 0)
