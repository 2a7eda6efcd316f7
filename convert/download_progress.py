"""What a download tells its caller while it works."""

from typing import Protocol


class Progress(Protocol):
    """Called from several threads at once; every call must return quickly."""

    def begin(self, phase: str, total: int, done: int) -> None:
        """A phase (`check`, `fetch`) of `total` bytes starts, `done` of them behind us already."""

    def advance(self, count: int) -> None:
        """`count` more bytes are done; negative when bytes were thrown away."""

    def notice(self, text: str) -> None:
        """One line that the user should see, about something decided or repaired on the way."""

    def close(self) -> None:
        """Nothing more will come."""


class NoProgress:
    """Tells nothing."""

    def begin(self, phase: str, total: int, done: int) -> None:
        return

    def advance(self, count: int) -> None:
        return

    def notice(self, text: str) -> None:
        return

    def close(self) -> None:
        return
