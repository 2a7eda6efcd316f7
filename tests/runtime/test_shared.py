"""Shared memory: private, whole from the first moment, and swept by the owner's life alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.runtime.parallel.owner import owner_is_dead, start_time
from duovolt.runtime.parallel.shared import SHARED_DIR, SharedFile, sweep_dead

HOLD = """
import sys, time
from duovolt.runtime.parallel.shared import SharedFile
shared = SharedFile.create(4096)
print(shared.name, flush=True)
time.sleep(60)
"""


def test_a_file_is_private_zeroed_whole_and_nameless_after_unlink() -> None:
    shared = SharedFile.create(12288)
    path = SHARED_DIR / shared.name
    info = path.stat()
    assert stat.S_IMODE(info.st_mode) == 0o600
    assert info.st_size == 12288
    assert not (SHARED_DIR / f".{shared.name}").exists()
    assert bytes(shared.memory) == bytes(12288)
    other = SharedFile.attach(shared.name)
    shared.unlink()
    shared.unlink()
    assert not path.exists()
    other.memory[5:8] = b"abc"
    assert shared.memory[5:8] == b"abc"


def test_a_foreign_or_open_file_is_not_attached() -> None:
    shared = SharedFile.create(4096)
    path = SHARED_DIR / shared.name
    path.chmod(0o644)
    with pytest.raises(EnvironmentFault, match="not a private file"):
        SharedFile.attach(shared.name)
    shared.unlink()
    with pytest.raises(EnvironmentFault, match="cannot open shared memory"):
        SharedFile.attach(shared.name)


def test_the_sweep_takes_dead_owners_files_only() -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    name = child.stdout.readline().strip()
    reused = f"duovolt-{os.getpid()}-{(start_time(os.getpid()) or 0) - 1}-00000000"  # our pid, an earlier process
    unfinished = f".duovolt-{2**22 + 5}-1-00000001"
    strangers = ["duovolt-notes", f"duovolt-{2**22 + 5}-1", "other-1-1-00000000"]
    mine = SharedFile.create(4096)
    made = [SHARED_DIR / entry for entry in (reused, unfinished, *strangers)]
    try:
        for path in made:
            path.write_bytes(b"x")
        removed = sweep_dead()
        assert reused in removed and unfinished in removed
        assert name not in removed and (SHARED_DIR / name).exists()
        assert (SHARED_DIR / mine.name).exists()
        assert all((SHARED_DIR / entry).exists() for entry in strangers)
        child.kill()
        child.wait()
        assert name in sweep_dead()
        assert not (SHARED_DIR / name).exists()
    finally:
        mine.unlink()
        child.kill()
        child.wait()
        child.stdout.close()
        for path in made:
            path.unlink(missing_ok=True)


def test_a_zombie_owner_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    name = f"duovolt-{child.pid}-{start_time(child.pid)}-00000000"
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert owner_is_dead(name)
    child.wait()
    assert owner_is_dead(name)
