"""Faults of a server that goes on: what each does to it, and what must come of it. Several befall one server in turn."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass

from ..conftest import START_SECONDS, Server, wait_gone
from .invariants import broken_off, left_nothing, logs_agree, refuses_or_serves, serves, whole
from .mixed import mix
from .reader import Reader
from .trials import enter, pause, wait_loading, wait_ranks
from .world import WATCHDOG_SECONDS, World

_LOCKSTEP = ("hash", "position", "count")
_START = ("never", "twice")
_STAGES = ("hello", "ready")
_PHASES = ("idle", "queue", "prefill", "decode", "drain", "reload")
_LATE_MS = 6000  # a word that is later than a rank waits for one
_SLACK = 10.0  # beyond the time after which a fault is known
_AGAIN, _READY = "Ranks start again in", "ready on"
FORM = (
    "mixed:N, WHO:SIGNAL:PHASE (0, 1 or proxy; SIGKILL or SIGSTOP; idle, queue, prefill, decode, drain or reload), "
    "RANK:KIND:ROUND (hash, position, count), RANK:KIND:EXCHANGE (drop, stale, wrap or milliseconds), or "
    "RANK:KIND:STAGE (never, twice or milliseconds; hello or ready)"
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
        elif what in ("SIGKILL", "SIGSTOP"):
            good = where in _PHASES and who in ("0", "1", "proxy") and not (who == "proxy" and where == "reload")
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
        """The variable that orders it, and its value; None for signals and requests."""
        if self.who == "mixed" or self.what.startswith("SIG"):
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
    def ends_server(self) -> bool:
        return self.where == "drain" or (self.who == "proxy" and self.what == "SIGKILL")

    @property
    def starts(self) -> int:
        """How many times the ranks start again because of it."""
        if self.who in ("mixed", "proxy") or self.ends_server:
            return 0
        if self.where == "reload":
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
        victim = "proxy" if self.who == "proxy" else f"rank {self.who}"
        phase = self.where
        if self.what in _LOCKSTEP:
            phase = f"round {self.where}"
        elif self.in_start:
            phase = f"{self.where} of a restart"
        elif self.door is not None:
            phase = f"step {self.where}"
        fault = words.get(self.what, self.what)
        if self.what.isdecimal():
            seconds = f"{int(self.what) / 1000:g} s late"
            fault = f"starts {seconds}" if self.in_start else f"mailbox word {seconds}"
        elif (self.who, self.what) == ("proxy", "SIGSTOP"):
            fault = f"SIGSTOP for {WATCHDOG_SECONDS + 1:g} s"
        return {"fault": fault, "victim": victim, "phase": phase}


def befall(world: World, server: Server, strike: Strike) -> None:
    """`server` is ready and idle; afterwards it is so again, unless the strike ends it. Raises AssertionError if something
    is not as it must be."""
    if strike.who == "mixed":
        mix(world, server, int(strike.what), most_tokens=12)
    elif strike.who == "proxy":
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
        self._server.wait_log(
            rf"(?s)(?:{_AGAIN}.*?){{{self._restarts + times}}}{_READY}"
        )  # not one of before the fault
        left_nothing(self._server, self.pids)
        self.went_on(times)

    def went_on(self, restarts: int = 0) -> None:
        """The ranks have started again so many times, a new answer is right, and both logs are equal."""
        assert self._server.metric("restarts_total") == self._restarts + restarts
        serves(self._world, self._server)
        logs_agree(self._world, self._server.pid, self._server.metric("completion_tokens_total"))

    def said(self, words: str) -> None:
        assert re.search(words, self._server.log[self._length :]), self._server.log


def _to_rank(world: World, server: Server, strike: Strike) -> None:
    number, victim = signal.Signals[strike.what], int(strike.who)
    bound = _SLACK + (WATCHDOG_SECONDS if number == signal.SIGSTOP else 0)
    before = _Before(world, server)
    if strike.where == "reload":
        os.kill(before.pids[(1 - victim) % world.size], signal.SIGKILL)
        before.wait_restart(bound)
        again = wait_ranks(world, server, before.pids, START_SECONDS)
        wait_loading(server)
        os.kill(again[victim], number)
        before.pids += again
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
    readers = enter(world, server, strike.where)
    if strike.what == "SIGKILL":
        server.process.kill()
        server.wait_exit(_SLACK)
        _all_broken(world, readers, _SLACK, ends=("broken",))
        wait_gone(before.pids, _SLACK)
        logs_agree(world, server.pid, None)
        return
    pause(server.pid, WATCHDOG_SECONDS + 1)
    for reader in readers:
        reader.join(60)
        whole(world, reader, world.long)
    if strike.where == "drain":
        _is_gone(world, server, before.pids)
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
