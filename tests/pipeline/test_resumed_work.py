"""A resumed stage does again at most a tenth of the work: bytes read and written, counted in both runs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from duovolt.checkpoint import stage as stage_module
from duovolt.checkpoint import writer as writer_module
from duovolt.checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from duovolt.checkpoint.stage import FACTS, AtomicFile
from duovolt.convert.facts import fingerprint
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import Recipe, load_recipe, recorded_recipe
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.reads import note_reads

ALLOWED = 1.10
CONFIG = maker.config(num_hidden_layers=6, full_attention_interval=3, mtp_num_hidden_layers=0, vocab_size=64)
CONFIG["vision_config"] = None


FILES = {"a file a weight": 1, "one file": 1 << 40}  # max_shard_bytes


def recipe(max_shard_bytes: int) -> Recipe:
    return recorded_recipe(load_recipe("v100").resolved() | {"max_shard_bytes": max_shard_bytes}, "test")


def to(source: Path, target: Path, files: str = "a file a weight") -> None:
    convert(source, target, recipe(FILES[files]), 1, lambda count: None, arithmetic="numpy", device="cpu")


class Written:
    """Bytes that went into stage files, and a failure after some of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total, self.limit = 0, 1 << 60
        sound = AtomicFile.write

        def write(file: AtomicFile, data: bytes | memoryview) -> None:
            if self.total >= self.limit:
                raise OSError(5, "Input/output error")
            self.total += memoryview(data).nbytes
            sound(file, data)

        monkeypatch.setattr(stage_module.AtomicFile, "write", write)

    def spent(self, work: Callable[[], object], limit: int = 1 << 60) -> int:
        """Bytes written by `work`, which fails once `limit` are."""
        self.total, self.limit = 0, limit
        work()
        return self.total


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def failing(work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with pytest.raises(EnvironmentFault):
            work()

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    maker.plain_source(tmp_path / "source", CONFIG, max_shard_bytes=100_000)
    return tmp_path / "source"


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_convert(source: Path, tmp_path: Path, share: float, files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O02: what was written is not written again, and the source is not read a second time for its facts."""
    monkeypatch.setattr(writer_module, "MARK_BYTES", 20_000)  # a fiftieth of the work, as 256 MB are of a large model
    written, reads = Written(monkeypatch), note_reads(monkeypatch, in_memory=True)

    def read() -> int:
        return sum(count for path, _, count in reads.seen if path.parent == source)

    unbroken = written.spent(lambda: to(source, tmp_path / "whole", files))
    once = read()
    first = written.spent(failing(lambda: to(source, tmp_path / "out", files)), int(share * unbroken))
    second = written.spent(lambda: to(source, tmp_path / "out", files))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert first + second <= ALLOWED * unbroken
    assert read() - once <= ALLOWED * once


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("share", [0.3, 0.6])
def test_shard(source: Path, tmp_path: Path, share: float, files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O02: files of both ranks that are whole are kept, and of a file that is not, what was written."""
    monkeypatch.setattr(writer_module, "MARK_BYTES", 20_000)
    to(source, tmp_path / "converted", files)
    written, reads = Written(monkeypatch), note_reads(monkeypatch, in_memory=True)

    def read() -> int:
        return sum(count for path, _, count in reads.seen if path.parent == tmp_path / "converted")

    unbroken = written.spent(lambda: shard(tmp_path / "converted", tmp_path / "whole", 2))
    once = read()
    first = written.spent(failing(lambda: shard(tmp_path / "converted", tmp_path / "out", 2)), int(share * unbroken))
    second = written.spent(lambda: shard(tmp_path / "converted", tmp_path / "out", 2))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert first + second <= ALLOWED * unbroken
    assert read() - once <= ALLOWED * once


def interrupted(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        Written(patch).spent(failing(lambda: to(source, target)), 200_000)
    assert (target / FACTS).is_file()


@pytest.mark.parametrize("at", [3, 200, -1, -2000])
def test_damaged_facts_are_read_anew(source: Path, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    to(source, tmp_path / "whole")
    interrupted(source, tmp_path / "out", monkeypatch)
    raw = bytearray((tmp_path / "out" / FACTS).read_bytes())
    raw[at] ^= 1
    (tmp_path / "out" / FACTS).write_bytes(raw)
    to(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_source_that_changed_in_between(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O02: by its time it is read anew and refused; with the old time its bytes give it away."""
    interrupted(source, tmp_path / "out", monkeypatch)
    path = sorted(source.glob("*.safetensors"))[-1]
    before = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    told = fingerprint([source], "facts")
    with pytest.raises(InputError, match="interrupted run of something else"):
        to(source, tmp_path / "out")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert fingerprint([source], "facts") != told
    with pytest.raises(CheckFailed, match="changed between two reads"):
        to(source, tmp_path / "out")
