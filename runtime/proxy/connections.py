"""HTTP connections whose clients must get to the point: a request's head that does not come whole is not waited for."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """uvicorn's own protocol with an end to its patience (its limit of 64 KiB for a head stands).

    Idle connections between requests are closed by its keep-alive timeout, bodies that stop by the reader of bodies.
    """

    head_seconds = 20.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_since: float | None = time.monotonic()
        self._watch = self._next_look()

    def data_received(self, data: bytes) -> None:
        if self._head_since is None and self._between_requests():
            self._head_since = time.monotonic()
        super().data_received(data)
        if not self._between_requests():
            self._head_since = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _next_look(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self.head_seconds / 4, self._look)

    def _look(self) -> None:
        late = self._head_since is not None and time.monotonic() - self._head_since > self.head_seconds
        if late and not self.transport.is_closing():
            self.transport.close()
        else:
            self._watch = self._next_look()
