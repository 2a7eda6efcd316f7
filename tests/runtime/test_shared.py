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

ODD_NAME = """
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\xff\\xfe) Z 1", 0, 0, 0)
print("there", flush=True)
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


def test_nothing_that_stands_in_the_way_ends_a_sweep() -> None:
    """Anybody may make entries of these names: a folder, or the pid of a process whose name is no text."""
    child = subprocess.Popen([sys.executable, "-c", ODD_NAME], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    folder = SHARED_DIR / f"duovolt-{2**22 + 5}-1-00000002"
    files = [SHARED_DIR / f"duovolt-{number}-1-00000003" for number in (2**22 + 5, child.pid, "9" * 200)]
    try:
        folder.mkdir()
        for path in files:
            path.write_bytes(b"x")
        sweep_dead()
        assert folder.is_dir() and not any(path.exists() for path in files)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        folder.rmdir()
        for path in files:
            path.unlink(missing_ok=True)


def test_an_owner_that_is_hidden_or_numbered_elsewhere_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = SharedFile.create(4096)
    try:
        assert not owner_is_dead(mine.name)
        parts = mine.name.split("-")
        parts[3] = str(int(parts[3]) + 1)  # another container's process of the same number
        parts[2] = "1"
        assert not owner_is_dead("-".join(parts))

        def refused(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", refused)
        assert not owner_is_dead(f"duovolt-{2**22 + 5}-1-00000004")
    finally:
        mine.unlink()


def test_a_container_that_shares_the_folder_keeps_its_files() -> None:
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", HOLD]
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except FileNotFoundError:
        pytest.skip("no unshare")
    assert child.stdout is not None
    try:
        name = child.stdout.readline().strip()
        if not name:
            pytest.skip("no process numbers of one's own here")
        assert name.startswith("duovolt-1-")
        assert name not in sweep_dead() and (SHARED_DIR / name).exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        if name:
            (SHARED_DIR / name).unlink(missing_ok=True)


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
