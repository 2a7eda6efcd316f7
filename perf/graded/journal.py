"""Answers of an evaluation that is not finished: JSON lines beside the result, a head and then one line an answer.

A server may break off in the midst of hours: the same command goes on with what stands there.
"""

from pathlib import Path
from typing import BinaryIO

import msgspec

from ...checkpoint.errors import EnvironmentFault, InputError, one_line
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
        """Raises InputError if the file is of another run, or none of ours, EnvironmentFault if it cannot be written."""
        self.path = None if out is None else out.with_name(out.name + ".unfinished")
        self.done: dict[tuple[str, str], Outcome] = {}
        self._file: BinaryIO | None = None
        if self.path is None:
            return
        kept = self._read(self.path, head)
        try:
            self._file = self.path.open("r+b" if kept else "wb")
            self._file.truncate(kept)
            self._file.seek(kept)
            if not kept:
                self._line(head)
        except OSError as error:
            raise EnvironmentFault(f"{self.path}: {error.strerror or error}.") from None

    def add(self, outcome: Outcome) -> None:
        self.done[outcome.id, outcome.digest] = outcome
        self._line(outcome)

    def close(self, *, finished: bool) -> None:
        """`finished`: the result is written, so what is kept here may go."""
        if self._file is not None and self.path is not None:
            self._file.close()
            if finished or not self.done:
                self.path.unlink(missing_ok=True)

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

    def _read(self, path: Path, head: Head) -> int:
        """Take over what a file holds; its bytes up to the end of the last whole line, 0 if there is none."""
        if not path.exists():
            return 0
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise InputError(f"{path}: no unfinished run of `duovolt eval --url`. Remove it, or name another --out.")
        whole, end, _ = path.read_bytes().rpartition(b"\n")  # what stands behind the last line's end was cut off
        lines = whole.split(b"\n")
        if not end:
            return 0
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
