"""A few faults of the campaign in every run, side by side; all of them with `-m slow`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from .campaign import run_trials, table, trials
from .memory import can_unshare, full_at_restart
from .mixed import mixed_requests
from .one_server import Report, Striking, doors, most_valuable, servers
from .ordered import door_opens, starts_oddly
from .strikes import Strike
from .trials import everything_dies, everything_pauses, proxy_pauses, rank_dies
from .world import World, real_world, scripted_world


def in_turn(world: World) -> None:
    """Word lost, two kills and a late start befall one server, whose fault doors are told by the start of its ranks."""
    report = Report(world.backend, None)
    strikes = [Strike.parse(text) for text in ("1:drop:12", "0:SIGKILL:idle", "1:300:ready")]
    Striking(world, report, 120).run(strikes)
    assert [entry["error"] for entry in report.entries] == [""] * 3


def first_as_it_starts(world: World) -> None:
    """The server that is to give the answers which others are compared with is struck before it has given them."""
    world.plain, world.long_prompt = Future(), "another"
    report = Report(world.backend, None)
    Striking(world, report, 120).run([Strike.parse("proxy:SIGSTOP:start")])
    assert [entry["error"] for entry in report.entries] == [""] and world.expected


QUICK: dict[str, Callable[[World], None]] = {
    "three faults of one server": in_turn,
    "a fault of a first server's start": first_as_it_starts,
    "rank 1 stands still in decode": rank_dies(1, signal.SIGSTOP, "decode"),
    "the proxy stands still for a while": proxy_pauses("decode"),
    "all stand still for a while": everything_pauses("decode"),
    "everything is killed five times": everything_dies,
    "rank 0 never gets ready": starts_oddly("0:1:never", "has done nothing for"),
    "rank 1 counts a wrong position": door_opens(
        "DUOVOLT_LOCKSTEP_FAULT", "1:2:position", words="TP2 LOCKSTEP FAILURE at record", survives=False, most_tokens=3
    ),
}


def test_a_few_faults_of_each_kind(tmp_path: Path) -> None:
    """O01 R08: see docs/reliability.md for all of them."""
    chosen = QUICK | ({"no shared memory at the restart": full_at_restart} if can_unshare() else {})
    worlds = []
    for number in range(len(chosen)):
        (folder := tmp_path / str(number)).mkdir()
        worlds.append(scripted_world(folder))
    with ThreadPoolExecutor(5) as pool:  # each is three processes, most of whose time is waiting
        running = {name: pool.submit(run, world) for (name, run), world in zip(chosen.items(), worlds, strict=True)}
        failed = {name: error for name, future in running.items() if (error := future.exception()) is not None}
    if failed:
        raise ExceptionGroup("faults that were not survived: " + ", ".join(failed), list(failed.values()))


def test_300_mixed_requests_leave_everything_as_it_was(tmp_path: Path) -> None:
    """A02 A03: clients that stay, leave at any moment, or abort; both ranks' logs agree record for record."""
    kinds = mixed_requests(scripted_world(tmp_path, delay_ms=2))
    assert sum(kinds.values()) == 300 and len(kinds) == 6


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", ["cards", "reference", "scripted"])
def test_every_fault_of_the_list_finds_a_server_that_is_in_time_for_it(size: int, kind: str) -> None:
    strikes = most_valuable(size, cards=kind == "cards", scripted=kind == "scripted")
    parts = list(servers(strikes, first_is_used=kind != "scripted"))
    assert [strike for part in parts for _, strike in part] == strikes and len(set(strikes)) == len(strikes)
    for part in parts:
        assert not any(strike.ends_server for _, strike in part[:-1])
        assert not any(strike.before_ready for _, strike in part[1:])
        orders = [(start, strike.door[0]) for start, strike in part if strike.door is not None]
        assert len(set(orders)) == len(orders), "one fault of a kind a start"
        assert sum(strike.starts for _, strike in part) <= 4, "or the pauses between them grow long"
        for name, text in doors(part).items():
            ordered = {start: strike.door[1] for start, strike in part if strike.door and strike.door[0] == name}
            assert {at: one for at, one in enumerate(text.split(",")) if one} == ordered
    assert {"mixed", "proxy", "0"} <= {strike.who for strike in strikes}


def test_a_prompt_that_was_read_is_no_phase_to_be_struck_in() -> None:
    """It would be found again, in no time; so is an exchange that has passed."""
    strikes = [Strike.parse(text) for text in ("0:drop:41", "proxy:SIGSTOP:prefill", "1:SIGKILL:prefill", "0:hash:3")]
    parts = [[strike for _, strike in part] for part in servers(strikes, first_is_used=True)]
    assert parts == [[], strikes[:2], strikes[2:]]
    strikes = [Strike.parse(text) for text in ("0:SIGKILL:load", "0:drop:41", "proxy:SIGSTOP:start", "1:drop:41")]
    parts = [[strike for _, strike in part] for part in servers(strikes, first_is_used=True)]
    assert parts == [strikes[:1], [], strikes[1:2], strikes[2:3], strikes[3:]], (
        "one that ends before it is ready answers nothing"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1:SIGKILL",
        "2:SIGKILL:decode",
        "proxy:drop:3",
        "0:SIGTERM:idle",
        "0:drop:idle",
        "0:hash:x",
        "shm:full:idle",
        "all:SIGKILL:idle",
    ],
)
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Strike.parse(text)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("1:SIGSTOP:load", ("SIGSTOP", "rank 1", "load")),
        ("0:drop:41", ("mailbox word lost", "rank 0", "step 41")),
        ("all:SIGSTOP:idle", ("SIGSTOP for 6 s", "proxy and ranks", "idle")),
        ("1:never:ready", ("never starts", "rank 1", "ready of a restart")),
    ],
)
def test_the_table_names_who_and_when(text: str, row: tuple[str, str, str]) -> None:
    assert tuple(Strike.parse(text).row[name] for name in ("fault", "victim", "phase")) == row


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("backend", ["scripted", "reference"])
def test_the_whole_campaign(tmp_path: Path, backend: str) -> None:
    world = scripted_world(tmp_path) if backend == "scripted" else real_world(tmp_path)
    report: list[dict[str, object]] = []
    run_trials(world, list(trials(backend)), report)
    print(table(report))
    assert [entry for entry in report if entry["error"]] == []
