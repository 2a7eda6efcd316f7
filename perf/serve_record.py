"""What `bench serve` leaves: a file of JSON lines, a head that says what was measured, then one line an answer."""

import datetime
import secrets
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from .. import __version__
from ..checkpoint.errors import InputError, one_line
from ..checkpoint.lock import open_alone
from .counts import Count

FORMAT = "duovolt-bench-serve-1"
MAX_BYTES = 256 << 20
Mode = Literal["cold", "cached"]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decides the requests. A file is only gone on with under the same ones."""

    contexts: list[Count]
    materials: list[str]
    lanes: list[Count]
    seeds: Count
    cold_seeds: Count
    tokens: Count
    temperature: float
    ignore_eos: bool = True


class Head(msgspec.Struct, frozen=True):
    """The first line. `run` marks this run's prompts; `server` and `machine`: what was told of them, as words.

    `materials`: tokens of as many blocks as published figures are of, by the server's count; empty if it does not tell.
    """

    run: str
    date: str
    version: str
    model: str
    settings: Settings
    server: dict[str, str]
    machine: dict[str, str]
    format: str = FORMAT
    materials: dict[str, Count] = {}

    @staticmethod
    def new(
        model: str,
        settings: Settings,
        server: dict[str, str],
        machine: dict[str, str],
        materials: dict[str, int] | None = None,
    ) -> "Head":
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return Head(secrets.token_hex(4), now, __version__, model, settings, server, machine, materials=materials or {})


class Answer(msgspec.Struct, frozen=True):
    """One answer: where in the matrix it stands, and what was measured (see serve_stream.Streamed)."""

    context: Count
    material: str
    lanes: Count
    mode: Mode
    seed: Count
    lane: Count
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count | None
    first_ms: float
    decode_ms: float
    proposed: Count | None
    accepted: Count | None

    @property
    def step(self) -> tuple[int, str, int, str, int]:
        return self.context, self.material, self.lanes, self.mode, self.seed

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first; None for answers too short to tell."""
        return (self.completion_tokens - 1) / self.decode_ms * 1e3 if self.decode_ms > 0 else None

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.proposed if self.proposed and self.accepted is not None else None

    @property
    def round_ms(self) -> float | None:
        """Every round gives a token beside the drafts that stand, the first token excepted."""
        rounds = self.completion_tokens - 1 - (self.accepted or 0)
        return self.decode_ms / rounds if self.accepted is not None and rounds > 0 and self.decode_ms > 0 else None


class Record(msgspec.Struct, frozen=True):
    """A run so far."""

    head: Head
    answers: list[Answer]

    @property
    def done(self) -> set[tuple[int, str, int, str, int]]:
        """Steps of which every lane has its answer."""
        counts: dict[tuple[int, str, int, str, int], int] = {}
        for answer in self.answers:
            counts[answer.step] = counts.get(answer.step, 0) + 1
        return {step for step, count in counts.items() if count >= step[2]}


def read_record(path: Path) -> Record:
    """A file of `bench serve`; a last line that was cut off by a kill is left out. Raises InputError."""
    if not path.is_file():
        raise InputError(f"{path}: no such file, or not a regular one.")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES >> 20} MB: not a file of `duovolt bench serve`.")
    lines = path.read_bytes().split(b"\n")
    whole = lines[:-1]  # what stands behind the last line's end was cut off
    try:
        head = msgspec.json.decode(whole[0] if whole else b"", type=Head)
        answers = [msgspec.json.decode(line, type=Answer) for line in whole[1:] if line]
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InputError(f"{path}: not a file of `duovolt bench serve`: {one_line(error)}.") from None
    if head.format != FORMAT:
        raise InputError(f"{path}: format {head.format!r:.40}, this duovolt reads {FORMAT}.")
    return Record(head, answers)


class Journal:
    """The file that a run appends to."""

    def __init__(self, path: Path | None, head: Head, resumed: bool) -> None:
        """Raises InputError if another process writes to the file, or has begun what was to be a new one, OSError."""
        self.head = head
        self._file: BinaryIO | None = None
        if path is None:
            return
        self._file = open_alone(path)
        content = self._file.read()
        if content and not resumed:
            self._file.close()
            raise InputError(
                f"{path}: another run has begun it meanwhile. Repeat the command to go on with it, or name another."
            )
        kept = content.rfind(b"\n") + 1
        self._file.truncate(kept)
        self._file.seek(kept)
        if not resumed:
            self._write(head)

    def add(self, answers: list[Answer]) -> None:
        for answer in answers:
            self._write(answer)

    def _write(self, line: Any) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
