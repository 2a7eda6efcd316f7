"""Keeps a generation of ranks alive: start, watch, and after a fault start anew with growing pauses."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from ...checkpoint.errors import DuovoltError
from .errors import unavailable
from .group import RankFault, RankGroup, RankView
from .hub import Hub
from .plan import ServePlan
from .silence import Silence

_FIRST_PAUSE, _LAST_PAUSE = 1.0, 30.0
_STEADY_SECONDS = 60.0  # a generation that lived this long resets the pause
_WATCH_SECONDS = 0.25


class Supervisor:
    """Runs until `stop`. The first start must work; later ones are tried again for ever."""

    def __init__(self, plan: ServePlan, hub: Hub, on_ready: Callable[[dict[str, str]], None]) -> None:
        self._plan = plan
        self._hub = hub
        self._on_ready = on_ready
        self._group: RankGroup | None = None
        self._stopping = asyncio.Event()
        self._unanswered = Silence()
        self._ready_since: float | None = None  # of the current generation
        self._pause = _FIRST_PAUSE  # before the next generation
        self.facts: dict[str, str] = {}

    @property
    def ready(self) -> bool:
        """Ranks are up, and their last step or sign of idleness is recent."""
        age = self.step_age
        return age is not None and age < self._plan.stale_seconds

    @property
    def step_age(self) -> float | None:
        """Seconds since the last step, or since which the ranks idle while answers are open; None without ranks."""
        if self._hub.send is None or self._group is None:
            return None
        return max(self._group.step_age(), self._unanswered_seconds(self._group))

    def _unanswered_seconds(self, group: RankGroup) -> float:
        """How long the ranks have idled with answers open: what was sent to them, or what they gave, went astray."""
        if group.busy or not self._hub.open_count:
            return self._unanswered.look(None)
        return self._unanswered.look(self._hub.last_event, time.monotonic() - self._hub.last_event)

    def views(self) -> list[RankView]:
        """What can be seen of each rank; none while there are no ranks."""
        return [] if self._hub.send is None or self._group is None else self._group.views()

    async def run(self) -> None:
        """Raises the fault of the first start: a server that never worked must say so with its exit code."""
        for start in itertools.count():
            if self._stopping.is_set():
                return
            group = self._group = RankGroup(self._plan, self._hub.relay, start)
            try:
                fault = await self._serve(group)
            finally:
                self._hub.send = None
                await group.stop()
            if fault is None:
                return
            if start == 0 and not self.facts:
                raise fault
            self._hub.counters.restarts += 1
            self._hub.retry_after = round(self._pause) + 1
            print(f"duovolt serve: {fault} Ranks start again in {self._pause:g} s.", file=sys.stderr, flush=True)
            await self._sleep(self._pause)
            self._pause = min(2 * self._pause, _LAST_PAUSE)

    async def _serve(self, group: RankGroup) -> RankFault | None:
        """One generation from start to fault (returned) or stop (None)."""
        self._ready_since, self._unanswered = None, Silence()
        stop = asyncio.create_task(self._stopping.wait())
        start = asyncio.create_task(group.start())
        either: list[asyncio.Future[Any]] = [stop, group.fault]
        try:
            await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                return None
            start.result()
            self.facts = group.facts()
            self._hub.send = group.send
            self._hub.retry_after = 1
            self._ready_since = time.monotonic()
            self._on_ready(self.facts)
            while not self._stopping.is_set() and not group.fault.done():
                await asyncio.wait(either, timeout=_WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                age = max(group.silence(), self._unanswered_seconds(group))
                if age > self._plan.options.watchdog_seconds:
                    group.report_hang(age)
            if not group.fault.done():
                return None
            fault = group.fault.result()
            self._hub.send = None
            if time.monotonic() - self._ready_since > _STEADY_SECONDS:
                self._pause = _FIRST_PAUSE
            self._hub.retry_after = round(self._pause) + 1
            self._hub.fail_all(unavailable(f"the answer was broken off: {fault}", self._hub.retry_after))
            return fault
        except RankFault as fault:
            return fault
        except DuovoltError as error:  # memory file system full, no folder for sockets
            return RankFault(str(error), error.exit_code)
        except OSError as error:  # no more processes, no more open files
            return RankFault(f"cannot start the ranks: {error}.", 3)
        finally:
            for task in (stop, start):
                task.cancel()
            await asyncio.gather(stop, start, return_exceptions=True)

    async def _sleep(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return

    def stop(self) -> None:
        """End the current generation and do not start another."""
        self._stopping.set()
