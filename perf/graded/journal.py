"""Answers of an evaluation that is not finished: JSON lines beside the result, a head and then one line an answer.

A server may break off in the midst of hours: the same command goes on with what stands there.
"""

from pathlib import Path
from typing import BinaryIO

import msgspec

from ...checkpoint.errors import EnvironmentFault, InputError, one_line
from ...checkpoint.lock import open_alone
from .result import MAX_BYTES, Outcome

FORMAT = "duovolt-eval-unfinished-1"


class Head(msgspec.Struct, frozen=True):
    """What decides an answer, beside the question: the model, what the server tells of how it computes, settings."""

    model: str
    server: dict[str, str]
    settings: dict[str, str]
    format: str = FORMAT


class Journal:
    """The answers so far of the run whose result will be `out`, in `out` with ".unfinished" added; None: nothing is kept."""

    def __init__(self, out: Path | None, head: Head) -> None:
        """Raises InputError if the file is none of ours, of another run, or held by one that goes on; EnvironmentFault if it
        cannot be written."""
        self.path = None if out is None else out.with_name(out.name + ".unfinished")
        self.done: dict[tuple[str, str], Outcome] = {}
        self._file: BinaryIO | None = None
        if self.path is None:
            return
        try:
            self._file = open_alone(self.path)
            kept = self._read(self.path, self._file, head)
            self._file.truncate(kept)
            self._file.seek(kept)
        except OSError as error:
            self._abandon()
            raise EnvironmentFault(f"{self.path}: {error.strerror or error}.") from None
        except InputError:
            self._abandon()
            raise
        if not kept:
            self._line(head)

    def add(self, outcome: Outcome) -> None:
        self.done[outcome.id, outcome.digest] = outcome
        self._line(outcome)

    def close(self, *, finished: bool) -> None:
        """`finished`: the result is written, so what is kept here may go."""
        if self._file is not None and self.path is not None:
            if finished or not self.done:
                self.path.unlink(missing_ok=True)  # while it is ours
            self._file.close()

    @property
    def hint(self) -> str:
        """What to do with it, for a message; empty if nothing is kept."""
        if self.path is None or not self.done:
            return ""
        return f" {len(self.done)} answers are kept in {self.path}: the same command goes on there."

    def _line(self, value: msgspec.Struct) -> None:
        if self._file is not None:
            try:
                self._file.write(msgspec.json.encode(value) + b"\n")
                self._file.flush()
            except OSError as error:
                raise EnvironmentFault(f"{self.path}: {error.strerror or error}.") from None

    def _abandon(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path, file: BinaryIO, head: Head) -> int:
        """Take over what a file holds; its bytes up to the end of the last whole line, 0 if there is none."""
        content = file.read(MAX_BYTES + 1)
        whole, end, _ = content.rpartition(b"\n")  # what stands behind the last line's end was cut off
        if not end and msgspec.json.encode(head).startswith(content):
            return 0
        if not end or len(content) > MAX_BYTES:
            raise InputError(f"{path}: no unfinished run of `duovolt eval --url`. Remove it, or name another --out.")
        lines = whole.split(b"\n")
        try:
            found = msgspec.json.decode(lines[0], type=Head)
            outcomes = [msgspec.json.decode(line, type=Outcome) for line in lines[1:]]
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise InputError(f"{path}: no unfinished run of `duovolt eval --url`: {one_line(error)}.") from None
        if found != head:
            raise InputError(
                f"{path}: holds an unfinished run of another model or with other settings. Repeat its options, name another "
                "--out, or remove it."
            )
        self.done = {(outcome.id, outcome.digest): outcome for outcome in outcomes}
        return len(whole) + 1
