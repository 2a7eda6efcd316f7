"""One fault, in one phase of a server's life, and what must come of it. Every trial starts a server of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..conftest import START_SECONDS, Server, leftovers, wait_gone
from .invariants import (
    broken_off,
    left_nothing,
    logs_agree,
    no_traceback,
    refuses_or_serves,
    serves,
    wait_clean,
    whole,
)
from .reader import Reader
from .world import PREFILL, WATCHDOG_SECONDS, World

SERVING = ("idle", "queue", "prefill", "decode", "drain")
STARTING = ("start", "load")
RESTARTING = ("restart", "reload")
HICCUP_SECONDS = 1.0
_SLACK = 8.0  # what a fault may take to be told, beyond the bound that finds it


@dataclass(frozen=True)
class Trial:
    """`fault` befalls `victim` (rank 0, rank 1, proxy) in `phase`; `run` raises AssertionError if it was not survived."""

    fault: str
    victim: str
    phase: str
    run: Callable[[World], None]


@contextlib.contextmanager
def running(world: World, **options: object) -> Iterator[Server]:
    server = world.server(**options)  # type: ignore[arg-type]
    pids: list[int] = []
    try:
        yield server
        pids = server.rank_pids()
        no_traceback(server)
    finally:
        server.kill()
        if pids:
            wait_gone(pids, 10)


def wait_ranks(world: World, server: Server, old: list[int] | None = None, seconds: float = START_SECONDS) -> list[int]:
    """All ranks' pids, rank 0 first, once all processes are there, and none of them in `old`."""
    deadline = time.monotonic() + seconds
    while len(pids := [pid for pid in server.rank_pids() if pid not in (old or [])]) < world.size:
        assert time.monotonic() < deadline and server.process.poll() is None, server.log
        time.sleep(0.002)
    return pids


def wait_loading(server: Server) -> None:
    """Until both ranks have said hello: the names are gone again, and the ranks not ready."""
    deadline = time.monotonic() + START_SECONDS
    while not leftovers(server.pid):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    while leftovers(server.pid):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def enter(world: World, server: Server, phase: str) -> list[Reader]:
    """Bring a ready server into a phase; the answers that are open in it."""
    if phase == "idle":
        return []
    assert world.expected  # or what times the fault would wait for it
    if phase == "prefill":
        readers = [Reader(server, world.body(PREFILL, long_prompt=True))]
        _wait_open(server, 1)
        time.sleep(random.uniform(0.2, 1.0))
        assert readers[0].pieces == 0, "the prompt was read too fast for this phase"
        return readers
    count = 2
    if phase == "queue":
        with server.client() as client:
            count += int(client.get("/status").json()["server"]["lanes"])
    readers = [Reader(server, world.body()) for _ in range(count)]
    _wait_open(server, count)
    while sum(reader.pieces > 2 for reader in readers) < 2:
        assert not any(reader.end for reader in readers), [reader.error for reader in readers]
        time.sleep(0.005)
    time.sleep(random.uniform(0, 0.2))
    if phase == "drain":
        server.process.send_signal(signal.SIGTERM)
        server.wait_log("stopping: 2 answers")
    return readers


def _wait_open(server: Server, count: int) -> None:
    deadline = time.monotonic() + 20
    with server.client() as client:
        while True:
            picture = client.get("/status").json()
            if picture["running"] + picture["waiting"] == count:
                return
            assert time.monotonic() < deadline, picture
            time.sleep(0.01)


def rank_dies(victim: int, number: signal.Signals, phase: str) -> Callable[[World], None]:
    """SIGKILL, or a SIGSTOP that nobody lifts, to one rank of a server that serves."""
    bound = _SLACK + (WATCHDOG_SECONDS if number == signal.SIGSTOP else 0)

    def run(world: World) -> None:
        began = time.monotonic()
        with running(world) as server:
            server.wait_ready()
            load_seconds = time.monotonic() - began
            readers = enter(world, server, phase)
            old = wait_ranks(world, server)
            struck = time.monotonic()
            os.kill(old[victim], number)
            if phase == "drain":
                for reader in readers:
                    reader.join(bound)
                    broken_off(world, reader)
                assert server.wait_exit(_SLACK) == 0
                left_nothing(server, old)
                logs_agree(world, server.pid, None)
                return
            if phase == "idle" and number == signal.SIGSTOP:
                _turns_red(server)
            for reader in readers:
                reader.join(bound)
                broken_off(world, reader)
            told = server.wait_log("Ranks start again in", seconds=bound)
            assert time.monotonic() - struck < bound and told
            again = time.monotonic()
            refuses_or_serves(server)
            server.wait_log("ready on", count=2)
            assert time.monotonic() - again < load_seconds + 5
            serves(world, server)
            assert server.metric("restarts_total") == 1
            logs_agree(world, server.pid, server.metric("completion_tokens_total"))
            left_nothing(server, old)
            ends_at_once(server)

    return run


def _turns_red(server: Server) -> None:
    """O01: a rank that stands still is seen in /health/ready before the watchdog ends it."""
    deadline = time.monotonic() + WATCHDOG_SECONDS
    with server.client() as client:
        while client.get("/health/ready").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.get("/health/live").status_code == 200


def ends_at_once(server: Server) -> None:
    pids = server.rank_pids()
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(_SLACK) == 0
    left_nothing(server, pids)


def start_again(world: World, server: Server, phase: str) -> list[int]:
    """Bring a server into a phase in which it starts its ranks anew, one of which was killed; the new ones."""
    server.wait_ready()
    old = wait_ranks(world, server)
    os.kill(old[0], signal.SIGKILL)
    server.wait_log("Ranks start again in")
    pids = wait_ranks(world, server, old)
    if phase == "reload":
        wait_loading(server)
    return pids


def rank_pauses(victim: int, phase: str) -> Callable[[World], None]:
    """SIGSTOP and, after a second, SIGCONT: nobody notices."""

    def run(world: World) -> None:
        restarts = int(phase in RESTARTING)
        delay = {"load": f"{victim}:1:1500", "reload": f",{victim}:1:1500"}.get(phase)
        with running(world, **({"DUOVOLT_START_FAULT": delay} if delay else {})) as server:
            readers: list[Reader] = []
            if restarts:
                pids = start_again(world, server, phase)
                pause(pids[victim])
                server.wait_log("ready on", count=2)
            elif phase in STARTING:
                pids = wait_ranks(world, server)
                if phase == "load":
                    wait_loading(server)
                pause(pids[victim])
                server.wait_ready()
            else:
                server.wait_ready()
                pids = wait_ranks(world, server)
                readers = enter(world, server, phase)
                pause(pids[victim])
            for reader in readers:
                reader.join(60)
                whole(world, reader, world.long)
            if phase == "drain":
                assert server.wait_exit(_SLACK) == 0
                left_nothing(server, pids)
                logs_agree(world, server.pid, None)
                return
            serves(world, server)
            assert server.metric("restarts_total") == restarts
            logs_agree(world, server.pid, server.metric("completion_tokens_total"))
            ends_at_once(server)

    return run


def pause(*pids: int, seconds: float = HICCUP_SECONDS) -> None:
    """SIGSTOP to all, and then SIGCONT in any order."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in random.sample(pids, len(pids)):
        os.kill(pid, signal.SIGCONT)


def rank_dies_at_first(victim: int, number: signal.Signals, phase: str) -> Callable[[World], None]:
    """Before the first ready: the server ends with one message and an exit code, and leaves nothing."""

    def run(world: World) -> None:
        delay = {"DUOVOLT_START_FAULT": f"{victim}:1:4000"} if phase == "load" else {}
        with running(world, **delay) as server:
            pids = wait_ranks(world, server)
            if phase == "load":
                wait_loading(server)
            else:
                time.sleep(random.uniform(0, 0.1))
            os.kill(pids[victim], number)
            ends_with_one_message(server, pids, victim, number, _SLACK)

    return run


def ends_with_one_message(server: Server, pids: list[int], victim: int, number: signal.Signals, slack: float) -> None:
    """Of a start in which rank `victim` was struck."""
    bound = slack + (WATCHDOG_SECONDS + 5 if number == signal.SIGSTOP else 0)
    assert server.wait_exit(bound) == 1
    words = "was killed by signal 9" if number == signal.SIGKILL else "has done nothing for"
    assert f"rank {victim} {words}" in server.log, server.log
    assert len([line for line in server.lines if line.startswith("duovolt:")]) == 1
    left_nothing(server, pids)


def rank_dies_again(victim: int, number: signal.Signals, phase: str) -> Callable[[World], None]:
    """While the ranks start again after a fault: they start once more, after a longer pause."""

    def run(world: World) -> None:
        late = {"DUOVOLT_START_FAULT": f",{victim}:1:4000"} if phase == "reload" else {}  # or it may be ready by then
        with running(world, **late) as server:
            server.wait_ready()
            old = wait_ranks(world, server)
            os.kill(old[(1 - victim) % world.size], signal.SIGKILL)
            pids = wait_ranks(world, server, old)
            if phase == "reload":
                wait_loading(server)
            os.kill(pids[victim], number)
            server.wait_log("Ranks start again in 2 s", seconds=WATCHDOG_SECONDS + 2 * _SLACK)
            refuses_or_serves(server)
            assert server.log.count("ready on") == 1, (
                "the ranks were ready before the fault: it struck in another phase"
            )
            server.wait_log("ready on", count=2)
            serves(world, server)
            assert server.metric("restarts_total") == 2
            logs_agree(world, server.pid, server.metric("completion_tokens_total"))
            left_nothing(server, old + pids)
            ends_at_once(server)

    return run


def proxy_dies(phase: str) -> Callable[[World], None]:
    """R09: SIGKILL to the proxy: the ranks go with it, and the next server removes what carries its name."""

    def run(world: World) -> None:
        with running(world) as server:
            readers: list[Reader] = []
            if phase in RESTARTING:
                pids = start_again(world, server, phase)
            elif phase in STARTING:
                pids = wait_ranks(world, server)
                if phase == "load":
                    wait_loading(server)
            else:
                server.wait_ready()
                readers = enter(world, server, phase)
                pids = wait_ranks(world, server)
            server.process.kill()
            server.wait_exit(_SLACK)
            start = time.monotonic()
            for reader in readers:
                reader.join(_SLACK)
                broken_off(world, reader, ends=("broken",))
            with running(world) as other:
                other.wait_ready()
                left_nothing(server, pids)
                assert time.monotonic() - start < 10 + START_SECONDS
                serves(world, other)
                logs_agree(world, server.pid, None)

    return run


def proxy_pauses(phase: str) -> Callable[[World], None]:
    """SIGSTOP to the proxy for longer than the watchdog waits, then SIGCONT: late, and whole."""
    return lambda world: _all_is_late(world, phase, with_ranks=False)


def everything_pauses(phase: str) -> Callable[[World], None]:
    """The same of the proxy and its ranks, as a container that is frozen: they go on one after the other."""
    return lambda world: _all_is_late(world, phase, with_ranks=True)


def _all_is_late(world: World, phase: str, *, with_ranks: bool) -> None:
    with running(world) as server:
        readers: list[Reader] = []
        restarts = int(phase in RESTARTING)
        if restarts:
            start_again(world, server, phase)
        elif phase in STARTING:
            wait_ranks(world, server)
            if phase == "load":
                wait_loading(server)
        else:
            server.wait_ready()
            readers = enter(world, server, phase)
        pids = wait_ranks(world, server)
        pause(*[server.pid, *pids][: None if with_ranks else 1], seconds=WATCHDOG_SECONDS + 1)
        for reader in readers:
            reader.join(60)
            whole(world, reader, world.long)
        if phase == "drain":
            assert server.wait_exit(_SLACK) == 0
            left_nothing(server, pids)
            logs_agree(world, server.pid, None)
            return
        server.wait_log("ready on", count=1 + restarts)
        server.wait_ready()
        serves(world, server)
        assert server.metric("restarts_total") == restarts
        logs_agree(world, server.pid, server.metric("completion_tokens_total"))
        ends_at_once(server)


def everything_dies(world: World, times: int = 5) -> None:
    """R08: proxy and ranks killed at once, at any moment; the next start is none the worse and nothing piles up."""
    dead: list[Server] = []
    for _ in range(times):
        with running(world) as server:
            pids = wait_ranks(world, server)
            time.sleep(random.uniform(0, 1.0))
            for pid in (server.pid, *pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            server.wait_exit(_SLACK)
            left_behind = sum(bool(leftovers(one.pid)) for one in dead)
            assert left_behind == 0, "the start before should have removed it"
            dead.append(server)
    with running(world) as server:
        server.wait_ready()
        assert not any(leftovers(one.pid) for one in dead)
        serves(world, server)
        wait_clean(server)
