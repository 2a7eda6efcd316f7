"""Faults of a server that goes on: what each does to it, and what must come of it. Several befall one server in turn."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from ..conftest import START_SECONDS, Server, wait_gone
from .invariants import broken_off, left_nothing, logs_agree, refuses_or_serves, serves, whole
from .memory import fill_while_starting
from .mixed import mix
from .reader import Reader
from .trials import RESTARTING, STARTING, ends_with_one_message, enter, pause, wait_loading, wait_ranks
from .world import WATCHDOG_SECONDS, World

_LOCKSTEP = ("hash", "position", "count")
_START = ("never", "twice")
_STAGES = ("hello", "ready")
_PROXY = ("proxy", "all")  # alone, or with its ranks as a container that is frozen
_PHASES = (*STARTING, *RESTARTING, "idle", "queue", "prefill", "decode", "drain")
_LATE_MS = 6000  # a word that is later than a rank waits for one
_LOAD_MS = 4000  # for which a rank that is struck while it loads does so
_SLACK = 10.0  # beyond the time after which a fault is known
_AGAIN, _READY = "Ranks start again in", "ready on"
FORM = (
    "mixed:N, WHO:SIGNAL:PHASE (0, 1, proxy, or all of them for SIGSTOP; SIGKILL or SIGSTOP; idle, queue, prefill, decode, "
    "drain, or in the start start, load, restart, reload), RANK:KIND:ROUND (hash, position, count), RANK:KIND:EXCHANGE (drop, "
    "stale, wrap or milliseconds), RANK:KIND:STAGE (never, twice or milliseconds; hello or ready), or shm:full:restart"
)


@dataclass(frozen=True)
class Strike:
    """`what` befalls `who` in a phase, at a round, an exchange or a stage of the start (`where`)."""

    who: str
    what: str
    where: str

    @staticmethod
    def parse(text: str) -> Strike:
        """Raises ValueError if it is none."""
        words = (f"{text}:all" if text.startswith("mixed:") else text).split(":")
        if len(words) != 3:
            raise ValueError(text)
        strike = Strike(*words)
        who, what, where = words
        if who == "mixed":
            good = what.isdecimal()
        elif who == "shm":
            good = (what, where) == ("full", "restart")
        elif what in ("SIGKILL", "SIGSTOP"):
            good = where in _PHASES and (who in ("0", "1", "proxy") or (who, what) == ("all", "SIGSTOP"))
        else:
            kinds = (*_LOCKSTEP, *_START, "drop", "stale", "wrap")
            good = who in ("0", "1") and (what in kinds or what.isdecimal())
            good = good and (where.isdecimal() or (where in _STAGES and (what in _START or what.isdecimal())))
        if not good:
            raise ValueError(text)
        return strike

    def __str__(self) -> str:
        return f"{self.who}:{self.what}" if self.who == "mixed" else f"{self.who}:{self.what}:{self.where}"

    @property
    def door(self) -> tuple[str, str] | None:
        """The variable that orders it, and its value; None for requests, a full memory file system, and signals but those to
        a rank that loads: it takes its time then."""
        if self.who in ("0", "1") and self.where == "load":
            return "DUOVOLT_START_FAULT", f"{self.who}:1:{_LOAD_MS}"
        if self.who in ("mixed", "shm") or self.what.startswith("SIG"):
            return None
        if self.where in _STAGES:
            return "DUOVOLT_START_FAULT", f"{self.who}:{_STAGES.index(self.where)}:{self.what}"
        name = "DUOVOLT_LOCKSTEP_FAULT" if self.what in _LOCKSTEP else "DUOVOLT_MAILBOX_FAULT"
        return name, f"{self.who}:{self.where}:{self.what}"

    @property
    def in_start(self) -> bool:
        """It befalls ranks that start again, not ranks that serve."""
        return self.where in _STAGES

    @property
    def before_ready(self) -> bool:
        """It befalls a server that has not been ready yet."""
        return self.where in STARTING

    @property
    def needs_answers(self) -> bool:
        """It befalls answers in the making, which must be long enough for it."""
        resting = (*STARTING, *RESTARTING, "idle", *_STAGES)
        return self.who == "mixed" or self.where not in resting

    @property
    def ends_server(self) -> bool:
        if self.who in _PROXY:
            return self.what == "SIGKILL" or self.where == "drain"
        return self.where == "drain" or self.before_ready

    @property
    def starts(self) -> int:
        """How many times the ranks start again because of it."""
        if self.who == "mixed" or self.ends_server:
            return 0
        if self.who in _PROXY:
            return int(self.where in RESTARTING)
        if self.where in RESTARTING:
            return 2
        if self.in_start:
            return 1 if self.what.isdecimal() else 2
        late = self.what.isdecimal() and int(self.what) >= _LATE_MS
        return 1 if late or self.what in ("SIGKILL", "SIGSTOP", "drop", "stale", *_LOCKSTEP) else 0

    @property
    def row(self) -> dict[str, str]:
        """Its names in the campaign's table."""
        words = {"drop": "mailbox word lost", "stale": "mailbox word stale", "wrap": "mailbox counter wraps"}
        words |= {kind: f"wrong {kind} in record" for kind in _LOCKSTEP}
        words |= {"never": "never starts", "twice": "starts twice"}
        if self.who == "mixed":
            return {"fault": f"{self.what} requests, clients leave", "victim": "all", "phase": "all"}
        if self.who == "shm":
            return {"fault": "/dev/shm full", "victim": "all", "phase": self.where}
        victim = {"proxy": "proxy", "all": "proxy and ranks"}.get(self.who, f"rank {self.who}")
        phase = self.where
        if self.what in _LOCKSTEP:
            phase = f"round {self.where}"
        elif self.in_start:
            phase = f"{self.where} of a restart"
        elif self.door is not None and self.where not in _PHASES:
            phase = f"step {self.where}"
        fault = words.get(self.what, self.what)
        if self.what.isdecimal():
            seconds = f"{int(self.what) / 1000:g} s late"
            fault = f"starts {seconds}" if self.in_start else f"mailbox word {seconds}"
        elif self.who in _PROXY and self.what == "SIGSTOP":
            fault = f"SIGSTOP for {WATCHDOG_SECONDS + 1:g} s"
        return {"fault": fault, "victim": victim, "phase": phase}


def befall(world: World, server: Server, strike: Strike, get_ready: Callable[[], None] | None = None) -> None:
    """`server` is ready and idle, or starts if the strike is `before_ready`; afterwards it is the former, unless the strike
    ends it. `get_ready` waits until a server that starts has answered what others are compared with. Raises AssertionError
    if something is not as it must be."""
    if strike.who == "mixed":
        mix(world, server, int(strike.what), most_tokens=12)
    elif strike.who == "shm":
        before = _Before(world, server)
        fill_while_starting(world, server, START_SECONDS)
        left_nothing(server, before.pids)
    elif strike.before_ready:
        _before_ready(world, server, strike, get_ready or (lambda: None))
    elif strike.who in _PROXY:
        _to_proxy(world, server, strike)
    elif strike.door is None:
        _to_rank(world, server, strike)
    elif strike.in_start:
        _in_start(world, server, strike)
    else:
        _in_exchange(world, server, strike)


class _Before:
    """What the server has said so far, and its ranks."""

    def __init__(self, world: World, server: Server) -> None:
        self.pids = wait_ranks(world, server)
        self._world, self._server = world, server
        self._restarts = server.log.count(_AGAIN)
        self._length = len(server.log)

    def wait_restart(self, seconds: float, times: int = 1) -> None:
        self._server.wait_log(_AGAIN, seconds=seconds, count=self._restarts + times)

    def wait_back(self, times: int = 1) -> None:
        """New ranks are there, and right; nothing of the old ones is."""
        refuses_or_serves(self._server)
        self.wait_ready(times)
        left_nothing(self._server, self.pids)
        self.went_on(times)

    def wait_ready(self, times: int = 1) -> None:
        """Not one of before the fault."""
        self._server.wait_log(rf"(?s)(?:{_AGAIN}.*?){{{self._restarts + times}}}{_READY}")

    def went_on(self, restarts: int = 0) -> None:
        """The ranks have started again so many times, a new answer is right, and both logs are equal."""
        assert self._server.metric("restarts_total") == self._restarts + restarts
        serves(self._world, self._server)
        logs_agree(self._world, self._server.pid, self._server.metric("completion_tokens_total"))

    def said(self, words: str) -> None:
        assert re.search(words, self._server.log[self._length :]), self._server.log


def _before_ready(world: World, server: Server, strike: Strike, get_ready: Callable[[], None]) -> None:
    pids = wait_ranks(world, server)
    if strike.where == "load":
        wait_loading(server)
    else:
        time.sleep(random.uniform(0, 0.5))
    if strike.who not in _PROXY:
        number = signal.Signals[strike.what]
        os.kill(pids[int(strike.who)], number)
        ends_with_one_message(server, pids, int(strike.who), number, _SLACK)
    elif strike.what == "SIGKILL":
        server.process.kill()
        server.wait_exit(_SLACK)
        wait_gone(pids, _SLACK)
    else:
        pause(*_frozen(server, strike, pids), seconds=WATCHDOG_SECONDS + 1)
        server.wait_ready()
        get_ready()
        serves(world, server)
        assert server.metric("restarts_total") == 0


def _frozen(server: Server, strike: Strike, ranks: list[int]) -> list[int]:
    return [server.pid, *(ranks if strike.who == "all" else [])]


def _start_again(world: World, server: Server, strike: Strike, before: _Before, victim: int) -> list[int]:
    """Kill rank `victim` and let the new ranks come into the phase; they."""
    os.kill(before.pids[victim], signal.SIGKILL)
    before.wait_restart(_SLACK)
    again = wait_ranks(world, server, before.pids, START_SECONDS)
    if strike.where == "reload":
        wait_loading(server)
    before.pids += again
    return again


def _to_rank(world: World, server: Server, strike: Strike) -> None:
    number, victim = signal.Signals[strike.what], int(strike.who)
    bound = _SLACK + (WATCHDOG_SECONDS if number == signal.SIGSTOP else 0)
    before = _Before(world, server)
    if strike.where in RESTARTING:
        again = _start_again(world, server, strike, before, (1 - victim) % world.size)
        os.kill(again[victim], number)
        before.wait_restart(bound + WATCHDOG_SECONDS, times=2)
        before.wait_back(times=2)
        return
    readers = enter(world, server, strike.where)
    os.kill(before.pids[victim], number)
    _all_broken(world, readers, bound)
    if strike.where == "drain":
        _is_gone(world, server, before.pids)
    else:
        before.wait_restart(bound)
        before.wait_back()


def _to_proxy(world: World, server: Server, strike: Strike) -> None:
    before = _Before(world, server)
    readers: list[Reader] = []
    ranks = before.pids
    if strike.where in RESTARTING:
        ranks = _start_again(world, server, strike, before, 0)
    else:
        readers = enter(world, server, strike.where)
    if strike.what == "SIGKILL":
        server.process.kill()
        server.wait_exit(_SLACK)
        _all_broken(world, readers, _SLACK, ends=("broken",))
        wait_gone(before.pids, _SLACK)
        logs_agree(world, server.pid, None)
        return
    pause(*_frozen(server, strike, ranks), seconds=WATCHDOG_SECONDS + 1)
    for reader in readers:
        reader.join(60)
    if strike.who == "all" and world.cards and any(reader.end == "error" for reader in readers):
        _all_broken(world, readers, 0, ends=("error", "done"))  # a card's clock went on: see docs/reliability.md
        before.wait_restart(_SLACK)
        before.wait_back()
        return
    for reader in readers:
        whole(world, reader, world.long)
    if strike.where == "drain":
        _is_gone(world, server, before.pids)
    elif strike.where in RESTARTING:
        before.wait_ready()
        before.went_on(1)
    else:
        before.went_on()


def _in_exchange(world: World, server: Server, strike: Strike) -> None:
    """The fault was ordered when these ranks started, and comes while an answer is made."""
    before = _Before(world, server)
    reader = Reader(server, world.body())
    reader.join(60)
    if strike.starts == 0:
        whole(world, reader, world.long)
        before.went_on()
        return
    broken_off(world, reader)
    before.wait_restart(_SLACK)
    before.said("TP2 LOCKSTEP FAILURE" if strike.what in _LOCKSTEP else "no answer from rank|no lockstep record")
    before.wait_back()


def _in_start(world: World, server: Server, strike: Strike) -> None:
    """The fault was ordered for the ranks' next start, which a kill brings about."""
    before = _Before(world, server)
    os.kill(before.pids[int(strike.who)], signal.SIGKILL)
    before.wait_restart(_SLACK)
    if strike.starts == 2:
        before.pids += wait_ranks(world, server, before.pids, START_SECONDS)
        before.wait_restart(_SLACK + WATCHDOG_SECONDS + START_SECONDS, times=2)
        before.said("has done nothing for" if strike.what == "never" else "has started twice")
    before.wait_back(times=strike.starts)


def _all_broken(world: World, readers: list[Reader], seconds: float, ends: tuple[str, ...] = ("error",)) -> None:
    for reader in readers:
        reader.join(seconds)
        broken_off(world, reader, ends=ends)


def _is_gone(world: World, server: Server, pids: list[int]) -> None:
    assert server.wait_exit(_SLACK) == 0
    left_nothing(server, pids)
    logs_agree(world, server.pid, None)
