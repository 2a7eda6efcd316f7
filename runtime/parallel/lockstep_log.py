"""The test door `DUOVOLT_LOCKSTEP_LOG=FOLDER`: each rank writes what it agreed on, one line of JSON a record.

The file is `FOLDER/NAME.rank-R.jsonl`, NAME the shared file's, which is new with every start of the ranks. A line is
written before anything of its step leaves the process, and goes to the system at once, so it outlives a SIGKILL: two
logs are equal as far as both go, and what a client got stands in both.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ...checkpoint.errors import InputError
from ..messages import StepRecord
from .lockstep import Agreement, Lockstep

LOG_DOOR = "DUOVOLT_LOCKSTEP_LOG"


class LoggedLockstep:
    """Passes agreements on, each once it is written down."""

    def __init__(self, inner: Lockstep, path: Path) -> None:
        """Raises InputError if the file cannot be made."""
        self._inner = inner
        self._sequence = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InputError(f"{LOG_DOOR}: cannot write {path}: {error.strerror}.") from error

    def agree(self, record: StepRecord, received: int, cancel_mask: int) -> Agreement:
        agreement = self._inner.agree(record, received, cancel_mask)
        self._sequence += 1
        line = {
            "sequence": self._sequence,
            **msgspec.structs.asdict(record),
            "admitted": agreement.admitted,
            "cancel_mask": agreement.cancel_mask,
        }
        os.write(self._file, msgspec.json.encode(line) + b"\n")
        return agreement


def logged(lockstep: Lockstep, name: str, rank: int) -> Lockstep:
    """`lockstep`, written down where the door asks for it."""
    folder = os.environ.get(LOG_DOOR)
    return LoggedLockstep(lockstep, Path(folder) / f"{name}.rank-{rank}.jsonl") if folder else lockstep
