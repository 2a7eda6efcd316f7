"""A client that reads one streamed answer in a thread and tells how it ended."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

from ..conftest import Server

PATH = "/v1/completions"
PLAIN = httpx.Client(verify=False, trust_env=False, limits=httpx.Limits(max_connections=None))  # a new one costs 30 ms


class Reader:
    """`text`: what came; `end`: "done" ([DONE] came), "error" (an error event was the last), "refused" (a status other
    than 200) or "broken" (the connection went away)."""

    def __init__(self, server: Server, body: dict[str, Any], *, leave_after: int | None = None) -> None:
        self.text = ""
        self.pieces = 0
        self.end = ""
        self.error = ""
        self.status = 0
        self.prompt = body["prompt"]
        self._url, self._body, self._leave_after = server.url + PATH, body, leave_after
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Fails if the answer has not ended by then."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"an answer hangs after {self.pieces} pieces"

    def wait_pieces(self, count: int, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while self.pieces < count:
            assert time.monotonic() < deadline and not self.end, (self.pieces, self.end, self.error)
            time.sleep(0.005)

    def _run(self) -> None:
        try:
            with PLAIN.stream("POST", self._url, json=self._body, timeout=120) as response:
                self.status = response.status_code
                if response.status_code != 200:
                    self.error, self.end = response.read().decode(), "refused"
                    return
                for line in response.iter_lines():
                    if line and self._take(line):
                        return
            self.end = self.end or "broken"
        except httpx.HTTPError as error:
            self.error, self.end = self.error or str(error), self.end or "broken"

    def _take(self, line: str) -> bool:
        """True if nothing more is to be read."""
        if self.end:
            self.end = f"went on after its end: {line}"
            return True
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.end = "done"
        elif line.startswith("data: "):
            event = json.loads(data)
            if "error" in event:
                self.error, self.end = event["error"]["message"], "error"
            elif event["choices"] and (text := event["choices"][0]["text"]):
                self.text += text
                self.pieces += 1
                if self._leave_after is not None and self.pieces >= self._leave_after:
                    self.end = "left"
                    return True
        return False
