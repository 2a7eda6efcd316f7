"""CUDA sources compiled for the host, once: kept for the other workers of a run and for later runs, under a digest of all
that goes into the library."""

import fcntl
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from duovolt.kernels.build import CSRC

TESTS = Path(__file__).parents[1] / "kernels"
MOST_KEPT = 200


def compiler() -> str:
    """The C++ compiler; skips the test if there is none."""
    found = shutil.which("g++") or shutil.which("clang++")
    if found is None:
        pytest.skip("no C++ compiler (g++ or clang++): the CUDA source cannot be run on the host")
    return found


def build(folder: Path, main: str, flags: Sequence[str]) -> Path:
    """The shared library of `main` (C++ text), which includes files of `folder` and of tests/kernels."""
    digest = hashlib.sha256(_everything())
    for path in sorted(folder.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("\0".join([_version(compiler()), main, *flags]).encode())
    library = _kept() / f"{digest.hexdigest()[:40]}.so"
    with (library.with_suffix(".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it
        if not library.exists():
            (folder / "host.cpp").write_text(main)
            command = [compiler(), "-std=c++17", "-w", "-shared", "-fPIC", *flags, "host.cpp", "-o", "host.so"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:4000]
            whole = library.with_suffix(f".{os.getpid()}")
            shutil.copy(folder / "host.so", whole)
            whole.rename(library)
    return library


@functools.cache
def _everything() -> bytes:
    """Every source that could be included: what a header names may change without the text that names it."""
    digest = hashlib.sha256()
    for path in sorted([*CSRC.rglob("*.cu*"), *TESTS.rglob("*.hpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.digest()


@functools.cache
def _version(command: str) -> str:
    return subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _kept() -> Path:
    """A folder of this user's alone; the oldest libraries go."""
    folder = Path(tempfile.gettempdir()) / f"duovolt-host-builds-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    assert stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077, folder
    kept = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime)
    for path in kept[:-MOST_KEPT]:
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
    return folder
