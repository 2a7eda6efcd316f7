"""Keeps a generation of ranks alive: start, watch, and after a fault start anew with growing pauses."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any

from ...checkpoint.errors import DuovoltError
from .errors import unavailable
from .group import RankFault, RankGroup, RankView
from .hub import Hub
from .plan import ServePlan

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
        self.facts: dict[str, str] = {}

    @property
    def ready(self) -> bool:
        """Ranks are up, and their last step or sign of idleness is recent."""
        group = self._group
        return self._hub.send is not None and group is not None and group.step_age() < self._plan.stale_seconds

    @property
    def step_age(self) -> float | None:
        """Seconds since the last step; None while there are no ranks."""
        return None if self._hub.send is None or self._group is None else self._group.step_age()

    def views(self) -> list[RankView]:
        """What can be seen of each rank; none while there are no ranks."""
        return [] if self._hub.send is None or self._group is None else self._group.views()

    async def run(self) -> None:
        """Raises the fault of the first start: a server that never worked must say so with its exit code."""
        pause, first = _FIRST_PAUSE, True
        while not self._stopping.is_set():
            started = time.monotonic()
            group = self._group = RankGroup(self._plan, self._hub.relay, first)
            try:
                fault = await self._serve(group)
            finally:
                self._hub.send = None
                await group.stop()
            if fault is None:
                return
            if first and not self.facts:
                raise fault
            first = False
            self._hub.counters.restarts += 1
            if time.monotonic() - started > _STEADY_SECONDS:
                pause = _FIRST_PAUSE
            self._hub.retry_after = round(pause) + 1
            print(f"duovolt serve: {fault} Ranks start again in {pause:g} s.", file=sys.stderr, flush=True)
            await self._sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    async def _serve(self, group: RankGroup) -> RankFault | None:
        """One generation from start to fault (returned) or stop (None)."""
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
            self._on_ready(self.facts)
            while not self._stopping.is_set() and not group.fault.done():
                await asyncio.wait(either, timeout=_WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if (age := group.step_age()) > self._plan.options.watchdog_seconds:
                    group.report_hang(age)
            if not group.fault.done():
                return None
            fault = group.fault.result()
            self._hub.send = None
            self._hub.fail_all(unavailable(f"the answer was broken off: {fault}", self._hub.retry_after))
            return fault
        except RankFault as fault:
            return fault
        except DuovoltError as error:  # memory file system full, no folder for sockets
            return RankFault(str(error), error.exit_code)
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
