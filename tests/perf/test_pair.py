"""The second rank of a measurement: its own words are told, however many, also where this rank fails of its loss."""

import sys
import time
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.perf.pair import twin


def second(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


LOUD = "i=0; while [ $i -lt 3000 ]; do echo 'a warning of some hundred characters, as libraries print them' >&2; i=$((i+1)); done"


def test_a_second_rank_that_says_much_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    second(monkeypatch, tmp_path, f"{LOUD}\ntouch {tmp_path}/done")
    with twin(["bench"]):
        deadline = time.monotonic() + 20
        while not (tmp_path / "done").exists():  # as this rank waits for the other
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_second_ranks_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    second(
        monkeypatch, tmp_path, f"{LOUD}\necho 'duovolt: the card fell off the bus.' >&2; touch {tmp_path}/done; exit 3"
    )
    with pytest.raises(EnvironmentFault, match="exit code 3: duovolt: the card fell off the bus"), twin(["bench"]):
        pass
    with pytest.raises(EnvironmentFault, match="exit code 3: duovolt: the card fell off the bus"), twin(["bench"]):
        time.sleep(1)
        raise EnvironmentFault("no answer from rank 1.")
    with pytest.raises(EnvironmentFault, match=r"^of its own\.$"), twin(["bench"]):
        raise EnvironmentFault("of its own.")
