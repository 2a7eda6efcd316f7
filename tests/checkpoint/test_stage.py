"""Stage directories: finished and right, or visibly unfinished; and the manifest that says so."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duovolt.checkpoint.directory import MANIFEST
from duovolt.checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from duovolt.checkpoint.lock import LOCK, DirectoryLock
from duovolt.checkpoint.manifest import Manifest, read_manifest
from duovolt.checkpoint.stage import JOURNAL, AtomicFile, StageDirectory, disk_errors
from duovolt.tests.support import maker


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    maker.converted(tmp_path / "finished", maker.config(num_hidden_layers=1))
    return tmp_path / "finished"


def rewrite(directory: Path, change: Any) -> None:
    """Change the manifest's JSON without sealing it again."""
    value = json.loads((directory / MANIFEST).read_text())
    change(value)
    (directory / MANIFEST).write_text(json.dumps(value))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_modes_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    """D09; a file that is replaced keeps its mode."""
    old = os.umask(umask)
    try:
        with AtomicFile(tmp_path / "x") as handle:
            handle.write(b"1")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode
    (tmp_path / "x").chmod(0o604)
    with AtomicFile(tmp_path / "x") as handle:
        handle.write(b"2")
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o604 and (tmp_path / "x").read_bytes() == b"2"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(RuntimeError), AtomicFile(tmp_path / "x") as handle:
        handle.write(b"new")
        raise RuntimeError
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"old")]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
def test_disk_faults_are_explained(tmp_path: Path, number: int) -> None:
    """D04: a full disk in mid-write is exit code 3, with the free space."""
    with pytest.raises(EnvironmentFault) as caught, disk_errors(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "x"))
    assert str(tmp_path) in str(caught.value) and caught.value.exit_code == 3
    assert ("free" in str(caught.value)) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_lock_is_held_and_taken_over(tmp_path: Path) -> None:
    """O03: a live owner is named; a dead one's lock is no obstacle."""
    code = (
        "import sys, pathlib; from duovolt.checkpoint.lock import DirectoryLock\n"
        "lock = DirectoryLock(pathlib.Path(sys.argv[1])).__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {owner.pid} is writing here"), DirectoryLock(tmp_path):
            pass
    finally:
        owner.kill()
        owner.communicate()
    assert (tmp_path / LOCK).exists()
    with DirectoryLock(tmp_path):
        assert (tmp_path / LOCK).read_text().split()[0] == str(os.getpid())
    assert not (tmp_path / LOCK).exists()


def test_a_lock_whose_file_was_removed_in_the_meantime_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last owner removes the file between our open and our lock: whoever comes next would lock another one."""
    sound, removed = fcntl.flock, []

    def late(handle: object, how: int) -> None:
        if not removed:
            removed.append((tmp_path / LOCK).unlink())
        sound(handle, how)  # type: ignore[arg-type]

    monkeypatch.setattr("duovolt.checkpoint.lock.fcntl.flock", late)
    with DirectoryLock(tmp_path):
        assert (tmp_path / LOCK).read_text().split()[0] == str(os.getpid())
        with pytest.raises(InputError, match="is writing here"), DirectoryLock(tmp_path):
            pass


def test_a_journal_of_another_identity(tmp_path: Path) -> None:
    with StageDirectory(tmp_path / "d", "first") as stage:
        stage.put("x", b"1")
    with (
        pytest.raises(InputError, match=r"something else \(first; now second\)"),
        StageDirectory(tmp_path / "d", "second"),
    ):
        pass
    with StageDirectory(tmp_path / "d", "first") as stage:
        assert stage.resume("x") == {} and stage.resume("y") is None


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_journal_cut_off(tmp_path: Path, cut: int) -> None:
    """A half-written last line is dropped, and does not spoil the line that comes after it."""
    with StageDirectory(tmp_path / "d", "first") as stage:
        stage.put("x", b"1")
        stage.put("y", b"2")
    journal = tmp_path / "d" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-cut])
    with StageDirectory(tmp_path / "d", "first") as stage:
        assert stage.resume("x") == {} and stage.resume("y") is None
        stage.put("y", b"2")
    with StageDirectory(tmp_path / "d", "first") as stage:
        assert stage.resume("x") == {} and stage.resume("y") == {}


def test_a_journal_cut_off_in_its_first_line(tmp_path: Path) -> None:
    with StageDirectory(tmp_path / "d", "first"):
        pass
    (tmp_path / "d" / JOURNAL).write_bytes(b'{"ident')
    with StageDirectory(tmp_path / "d", "second") as stage:
        stage.put("x", b"1")
    with StageDirectory(tmp_path / "d", "second") as stage:
        assert stage.resume("x") == {}


@pytest.mark.parametrize(
    "line",
    [
        b'{"part": "/"}', b'{"part": ""}', b'{"part": "../x"}', b'{"part": "a\\u0000b"}', b'{"part": "."}', b'{"part": "..."}',
        b'{"name": "x", "record": {"size": -1, "digest": ""}, "note": {}}', b'{"part": "x", "bytes": -5}', b"7", b"[" * 9000,
    ],
)  # fmt: skip
def test_a_journal_of_rubbish_is_passed_over(tmp_path: Path, line: bytes) -> None:
    with StageDirectory(tmp_path / "d", "first"):
        pass
    with (tmp_path / "d" / JOURNAL).open("ab") as handle:
        handle.write(line + b"\n")
    with StageDirectory(tmp_path / "d", "first") as stage:
        stage.put("x", b"1")
        assert stage.resume("x") is None, "an entry of this run is not an earlier one's"
    assert (tmp_path / "d" / "x").read_bytes() == b"1" and not (tmp_path / "x").exists()


def test_unfinished_is_refused_with_that_word(finished: Path) -> None:
    (finished / MANIFEST).unlink()
    with pytest.raises(InputError, match="unfinished"):
        read_manifest(finished)


def test_an_edited_manifest(finished: Path) -> None:
    rewrite(finished, lambda value: value["recipe"].update(name="better"))
    with pytest.raises(CheckFailed, match="changed after it was written"):
        read_manifest(finished)


def test_a_manifest_comes_back_byte_for_byte(finished: Path) -> None:
    manifest = read_manifest(finished)
    assert manifest.encode() == (finished / MANIFEST).read_bytes()
    assert manifest.sealed() == manifest


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda v: v.update(format_version=2), "format version 2"),
        (lambda v: v.update(extra=1), "extra"),
        (lambda v: v.pop("source"), "source"),
        (lambda v: v.update(tensors=[]), "tensors"),
        (lambda v: v.update(stage="other"), "other"),
        (lambda v: v["files"].update({"../x": {"size": 1, "digest": "0"}}), "plain file name"),
        (lambda v: v["tensors"]["lm_head.weight"].update(file="absent"), "absent"),
        (lambda v: v["tensors"]["lm_head.weight"].update(dtype="U9"), "U9"),
        (lambda v: v["tensors"]["lm_head.weight"].update(shape=[-1]), "make no sense"),
        (lambda v: v.update(stage="rank"), "split record"),
    ],
)
def test_malformed_manifests(finished: Path, change: Any, word: str) -> None:
    rewrite(finished, change)
    with pytest.raises(InputError) as caught:
        read_manifest(finished)
    assert word in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b'{"format_version":1}', b"null"])
def test_no_manifest_at_all(finished: Path, raw: bytes) -> None:
    (finished / MANIFEST).write_bytes(raw)
    with pytest.raises(InputError, match=MANIFEST):
        read_manifest(finished)


def test_manifests_are_strict_records(finished: Path) -> None:
    value = msgspec.to_builtins(read_manifest(finished))
    value["tensors"]["lm_head.weight"]["surprise"] = 1
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.convert(value, Manifest)
