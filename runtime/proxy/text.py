"""Tokens to text, piece by piece: whole characters only, and nothing that may belong to a stop string."""

from __future__ import annotations

import codecs


class Utf8Stream:
    """Bytes in any cut to text; the joined pieces equal the decoding of the whole (invalid bytes become U+FFFD)."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def end(self) -> str:
        """What an unfinished character decodes to."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Cuts a text at the stop string that is complete first, holding back what may be the start of one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped: str | None = None  # the stop string that was found

    def feed(self, text: str) -> str:
        """The text that is safe to show now; nothing after the stop."""
        if not self._stops:
            return text
        self._held += text
        matches = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := self._held.find(stop)) >= 0]
        if matches:
            _, begin, self.stopped = min(matches)
            shown = self._held[:begin]
            self._held = ""
            return shown
        keep = max(self._overlap(stop) for stop in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def end(self) -> str:
        """What only looked like the start of a stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
