"""The second rank of a measurement: its own words are told, however many, also where this rank fails of its loss."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.perf.pair import Partner, twin
from duovolt.runtime.parallel.mailbox import MailboxTimeout
from duovolt.runtime.parallel.shared import SHARED_DIR
from duovolt.runtime.parallel.waiting import wait_for


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


@pytest.mark.parametrize(
    ("end", "wanted", "words"),
    [
        ("echo 'duovolt: no such tensor.' >&2; exit 2", EnvironmentFault, "exit code 2: duovolt: no such tensor"),
        ("kill -9 $$", EnvironmentFault, "exit code -9"),
        ("exit 0", MailboxTimeout, "rank 1 ended before mailbox step 1"),
    ],
)
def test_a_second_rank_that_ends_before_it_meets_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str, wanted: type[Exception], words: str
) -> None:
    second(monkeypatch, tmp_path, f"sleep 0.3; {end}")
    began = time.monotonic()
    with pytest.raises(wanted, match=words), twin(["bench"]) as partner:
        partner.meet(0, 20.0)
    assert time.monotonic() - began < 10


def test_the_second_rank_notices_the_end_of_the_first() -> None:
    """The first is killed and cannot say so; the memory's name tells whose it is."""
    script = (
        "import time; from duovolt.runtime.parallel.region import region_bytes;"
        "from duovolt.runtime.parallel.shared import SharedFile;"
        "print(SharedFile.create(region_bytes()).name, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        name = first.stdout.readline().strip()
        timer = threading.Timer(0.3, first.kill)
        timer.start()
        began = time.monotonic()
        try:
            with pytest.raises(MailboxTimeout, match="rank 0 ended before mailbox step 1"):
                Partner.first(name).meet(1, 20.0)
            assert time.monotonic() - began < 10
        finally:
            timer.cancel()
            first.kill()
            (SHARED_DIR / name).unlink(missing_ok=True)


def test_last_words_of_one_that_has_ended_are_heard() -> None:
    said: list[str] = []

    def gone() -> bool:
        said.append("a word, and then the end")
        return True

    assert wait_for(lambda: said[0] if said else None, 20.0, gone) == "a word, and then the end"
