"""The handshake, the comparison of the ranks' streams, and a rank's ties to its parent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec import structs

from duovolt.runtime.messages import TokenEvent
from duovolt.runtime.parallel.choice import Choice
from duovolt.runtime.parallel.region import region_bytes
from duovolt.runtime.parallel.shared import SHARED_DIR, SharedFile
from duovolt.runtime.proxy import group as group_module
from duovolt.runtime.proxy.group import RankFault, RankGroup
from duovolt.runtime.proxy.hub import Hub
from duovolt.runtime.proxy.options import ServeOptions
from duovolt.runtime.proxy.plan import ServePlan, make_plan
from duovolt.runtime.proxy.server import _tell_plan
from duovolt.runtime.proxy.supervisor import Supervisor
from duovolt.runtime.rank.options import RankOptions
from duovolt.runtime.rank.preflight import Settled
from duovolt.runtime.rank.wire import Failed, Hello, Step, decode_to_proxy

from .conftest import gone, leftovers
from .stub_model import make_ranks, write_script


@pytest.fixture
def plan(tmp_path: Path) -> ServePlan:
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
    return make_plan(ServeOptions(ranks=make_ranks(tmp_path / "ranks", 2), backend=f"scripted:{script}", quiet=True))


def test_a_rank_of_another_conversion_is_refused_and_all_are_ended(plan: ServePlan) -> None:
    other = replace(plan, identity=replace(plan.identity, conversion_id="another"))

    async def start() -> list[int]:
        group = RankGroup(other, lambda events: None, start=0)
        with pytest.raises(RankFault, match=r"rank \d refused: its conversion id is none, expected another") as fault:
            await group.start()
        assert fault.value.exit_code == 2
        await group.stop()
        return [process.pid for process in group._processes]

    pids = asyncio.run(start())
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
    assert leftovers(os.getpid()) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rank": 0}, "rank"),
        ({"size": 4}, "size"),
        ({"conversion_id": "another"}, "conversion id"),
        ({"recipe": "another"}, "recipe"),
        ({"tokenizer_digest": "0" * 32}, "tokenizer"),
        ({"config_digest": "0" * 32}, "configuration"),
        ({"versions": {"duovolt": "0.0.1"}}, "versions"),
        ({"backend": "reference"}, "backend"),
    ],
)
def test_the_second_rank_must_be_the_firsts_twin(plan: ServePlan, change: dict[str, Any], named: str) -> None:
    """L09: weights of one conversion, one layout of messages, one build; nothing is loaded before."""
    identity = plan.identity
    first = Hello(0, 2, 1, identity.conversion_id, identity.recipe, identity.tokenizer_digest, identity.config_digest,
                  {"duovolt": "1"}, plan.backend.argument)  # fmt: skip

    async def meet(second: Hello) -> RankFault | None:
        group = RankGroup(plan, lambda events: None, start=0)
        group._take(0, first)
        group._take(1, second)
        fault = group.fault.result() if group.fault.done() else None
        await group.stop()
        return fault

    twin = structs.replace(first, rank=1)
    assert asyncio.run(meet(twin)) is None
    fault = asyncio.run(meet(structs.replace(twin, **change)))
    assert fault is not None and fault.exit_code == 2
    assert f"rank 1 refused: its {named} is {next(iter(change.values()))}, expected" in str(fault)


DEAD = f"duovolt-{2**22 + 5}-1-"  # no process has this number
HOLD = """
import time
from duovolt.runtime.parallel.shared import SHARED_DIR, SharedFile
from duovolt.runtime.proxy import group as group_module
print(SharedFile.create(4096).name, flush=True)
time.sleep(60)
"""


def test_what_a_killed_rank_has_made_goes_with_it(plan: ServePlan) -> None:
    """The inboxes in pinned memory and NCCL's meeting place are rank 0's own, and have names for a while."""

    async def run() -> str:
        group = RankGroup(plan, lambda events: None, start=0)
        rank = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLD, stdout=subprocess.PIPE)
        group._processes = [rank]
        assert rank.stdout is not None
        name = (await rank.stdout.readline()).decode().strip()
        assert (SHARED_DIR / name).exists()
        await group.stop()
        return name

    assert not (SHARED_DIR / asyncio.run(run())).exists()


def test_a_rank_that_no_signal_reaches_is_named_and_not_waited_for(
    plan: ServePlan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(group_module, "_STOP_SECONDS", 0.1)
    monkeypatch.setattr(group_module, "_KILL_SECONDS", 0.1)

    class Held:
        pid, returncode, kills = 4711, None, 0

        async def wait(self) -> int:
            await asyncio.Event().wait()
            return 0

        def kill(self) -> None:
            self.kills += 1

    async def run() -> int:
        group = RankGroup(plan, lambda events: None, start=0)
        held = Held()
        group._processes = [held]  # type: ignore[list-item]
        await asyncio.wait_for(group.stop(), 5)
        return held.kills

    assert asyncio.run(run()) == 1
    assert "rank process 4711 cannot be killed" in capsys.readouterr().err


def test_a_socket_that_cannot_be_had_is_a_fault_and_no_hang(plan: ServePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where files run out: the library says it in an exception of its own, and waits for a socket left open."""
    monkeypatch.setattr(group_module, "_private_folder", lambda: Path("/nowhere/at/all"))

    async def run() -> None:
        with pytest.raises(RankFault, match="cannot open a socket for rank 0: No such file") as fault:
            await asyncio.wait_for(Supervisor(plan, Hub(1, 4), lambda facts: None).run(), 10)
        assert fault.value.exit_code == 3

    asyncio.run(run())


def test_folders_of_dead_owners_go_while_another_server_removes_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    is_dir, seen = Path.is_dir, []

    def removed_meanwhile(path: Path) -> bool:
        found = is_dir(path)
        if path.name.startswith(DEAD):
            seen.append(path)
            if len(seen) == 1:  # the neighbour is faster
                path.rmdir()
        return found

    with tempfile.TemporaryDirectory(dir="/tmp") as base:  # sockets need short paths
        monkeypatch.setenv("XDG_RUNTIME_DIR", base)
        for number in range(3):
            (Path(base) / f"{DEAD}0000000{number}").mkdir()
        monkeypatch.setattr(Path, "is_dir", removed_meanwhile)
        folder = group_module._private_folder()
        assert [path.name for path in Path(base).iterdir()] == [folder.name] and len(seen) == 3


def event(request_id: int, tokens: list[int], finish: str | None = None) -> TokenEvent:
    return TokenEvent(request_id, tokens, [], finish, 0, 0, 1)


def relay(plan: ServePlan, streams: list[list[tuple[int, Step]]]) -> tuple[list[Any], RankFault | None]:
    """Feed steps as (rank, step) in order; what was relayed, and the fault."""

    async def run() -> tuple[list[Any], RankFault | None]:
        relayed: list[Any] = []
        group = RankGroup(plan, relayed.append, start=0)
        for rank, step in (item for stream in streams for item in stream):
            group._take(rank, step)
        fault = group.fault.result() if group.fault.done() else None
        await group.stop()
        return relayed, fault

    return asyncio.run(run())


def test_events_are_relayed_once_both_ranks_have_given_them(plan: ServePlan) -> None:
    steps = [Step(1, [event(1, [5, 6])]), Step(2, [event(1, [7], "stop")])]
    assert relay(plan, [[(0, step) for step in steps]]) == ([], None)
    relayed, fault = relay(plan, [[(0, step) for step in steps], [(1, steps[0])]])
    assert (relayed, fault) == ([steps[0].events], None)
    relayed, fault = relay(plan, [[(1, step) for step in steps], [(0, step) for step in steps]])
    assert (relayed, fault) == ([step.events for step in steps], None)


@pytest.mark.parametrize(
    "other",
    [
        Step(1, [event(1, [5, 7])]),
        Step(1, [event(2, [5, 6])]),
        Step(1, [event(1, [5, 6], "stop")]),
        Step(2, [event(1, [5, 6])]),
        Step(1, []),
    ],
)
def test_a_different_second_stream_stops_everything(
    plan: ServePlan, other: Step, capsys: pytest.CaptureFixture[str]
) -> None:
    relayed, fault = relay(plan, [[(0, Step(1, [event(1, [5, 6])])), (1, other)]])
    assert relayed == []
    assert str(fault) == "the ranks gave different tokens"
    assert "TP2 LOCKSTEP FAILURE" in capsys.readouterr().err


def test_nothing_is_relayed_behind_a_step_that_differs(plan: ServePlan, capsys: pytest.CaptureFixture[str]) -> None:
    """What a proxy that stood still finds in its sockets is read at once, before the ranks are ended."""
    steps = [Step(number, [event(1, [number])]) for number in (1, 2, 3)]
    other = [steps[0], Step(2, [event(1, [9])]), steps[2]]
    relayed, fault = relay(plan, [[(0, step) for step in steps], [(1, step) for step in other]])
    assert relayed == [steps[0].events] and str(fault) == "the ranks gave different tokens"
    assert capsys.readouterr().err.count("TP2 LOCKSTEP FAILURE") == 1


def run_rank(tmp_path: Path, **changes: Any) -> tuple[int, list[Any], str]:
    """Start one rank by hand: exit code, messages, error output."""
    script = write_script(tmp_path / "script.jsonl", {"blocks": [[1]]})
    shared = SharedFile.create(region_bytes())
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    endpoint = f"ipc://{tmp_path}/s"
    socket.bind(endpoint)
    options = RankOptions(
        make_ranks(tmp_path / "ranks", 2) / "rank-1-of-2", 1, 2, endpoint, shared.name, os.getpid(), f"scripted:{script}",
        100, 1, 0, 16, 281, 5.0,
    )  # fmt: skip
    command = [sys.executable, "-m", "duovolt", "rank", *replace(options, **changes).arguments()]
    try:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=30)
        messages = []
        while socket.poll(200):
            messages.append(decode_to_proxy(socket.recv()))
    finally:
        shared.unlink()
        socket.close()
        context.term()
    return done.returncode, messages, done.stderr


def test_a_rank_refuses_weights_that_are_not_its_own(tmp_path: Path) -> None:
    code, messages, errors = run_rank(tmp_path, rank=0)
    (message,) = messages
    assert code == 2
    assert isinstance(message, Failed)
    assert "its weights are rank 1 of 2, asked to serve as rank 0 of 2" in message.message
    assert errors == ""  # the proxy says it


def test_a_rank_without_its_memory_or_its_parent_says_so(tmp_path: Path) -> None:
    code, messages, _ = run_rank(tmp_path, shared="duovolt-1-1-00000000")
    assert code == 3
    assert isinstance(messages[-1], Failed) and "cannot open shared memory" in messages[-1].message
    code, messages, errors = run_rank(tmp_path, parent=1)
    assert (code, messages) == (3, [])
    assert errors.startswith("duovolt: the proxy that started this rank is gone")


def test_a_fault_door_that_makes_no_sense_is_said_before_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOVOLT_LOCKSTEP_FAULT", "nonsense")
    code, messages, _ = run_rank(tmp_path)
    assert code == 2
    assert [type(message) for message in messages] == [Hello, Failed]
    assert "DUOVOLT_LOCKSTEP_FAULT='nonsense': expected RANK:NUMBER:KIND" in messages[1].message


def settled(*cards: int) -> Settled:
    return Settled(
        uuids=[f"GPU-{card}" for card in cards], numbers=list(cards), card="a card", max_context=64, pages=2, planned=1,
        plan=["  weights"], near=[[0] for _ in cards], kept=12345,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cards", "visible", "devices"),
    [((1, 0), "GPU-1,GPU-0", ["cuda:0", "cuda:1"]), ((3, 3), "GPU-3", ["cuda:0", "cuda:0"])],
)
def test_ranks_see_the_cards_in_use_once_each(
    plan: ServePlan, monkeypatch: pytest.MonkeyPatch, cards: tuple[int, int], visible: str, devices: list[str]
) -> None:
    """A card that is named twice to the driver would hide what comes behind it."""
    started: list[tuple[tuple[str, ...], dict[str, str]]] = []

    async def spawn(*command: str, env: dict[str, str], **more: Any) -> None:
        started.append((command, env))

    async def run() -> None:
        group = RankGroup(replace(plan, cards=settled(*cards)), lambda events: None, start=0)
        group._shared = SharedFile.create(region_bytes())
        try:
            for rank in (0, 1):
                await group._spawn(rank)
        finally:
            await group.stop()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
    asyncio.run(run())
    assert [command[command.index("--device") + 1] for command, _ in started] == devices
    assert {env["CUDA_VISIBLE_DEVICES"] for _, env in started} == {visible}
    for command, _ in started:  # what was settled for both
        assert [command[command.index(name) + 1] for name in ("--pages", "--plain-bytes")] == ["2", "12345"]


def test_both_ranks_on_one_card_is_said_with_a_warning(plan: ServePlan, capsys: pytest.CaptureFixture[str]) -> None:
    loud = replace(plan, options=replace(plan.options, quiet=False))
    _tell_plan(replace(loud, cards=settled(2, 2), way=Choice("ipc", None, True)))
    said = capsys.readouterr().err
    assert "both ranks are on card 2, to try two ranks on one card: slow" in said
    assert "card 2: a card; memory a rank" in said and "between the ranks: ipc" in said
    _tell_plan(replace(loud, cards=settled(0, 2), way=Choice("ipc", None, True)))
    said = capsys.readouterr().err
    assert "both ranks are" not in said and "card 0, 2: a card" in said and "between the cards: ipc" in said
