"""A file that one process at a time goes on with."""

import fcntl
import os
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.lock import open_alone


def test_a_second_is_refused_until_the_first_closes_and_content_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with open_alone(path) as file:
        file.write(b"one\n")
        file.flush()
        with pytest.raises(InputError, match=r"run\.jsonl: another process is writing here"):
            open_alone(path)
    with open_alone(path) as file:
        assert file.read() == b"one\n"


def test_a_file_that_its_last_owner_removed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between open and lock: what is written then would have no name."""
    path, lock, removed = tmp_path / "run.jsonl", fcntl.flock, []

    def late(file: object, how: int) -> None:
        if not removed:
            removed.append(path.unlink())
        lock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", late)
    with open_alone(path) as file:
        assert removed and os.path.samestat(os.fstat(file.fileno()), path.stat())


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, make) -> None:
    make(tmp_path / "x")
    with pytest.raises(InputError, match="not a regular file"):
        open_alone(tmp_path / "x")
