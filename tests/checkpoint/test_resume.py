"""A large file that was not finished is continued where a mark proves it; a damaged one is mended where it stands."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.checkpoint import stage as stage_module
from duovolt.checkpoint import writer as writer_module
from duovolt.checkpoint.errors import CheckFailed, InputError
from duovolt.checkpoint.stage import AtomicFile, Mark, StageDirectory, temporary
from duovolt.checkpoint.writer import Planned, ShardWriter

NAME = "model.safetensors"
TENSORS = [Planned(f"t{i}", "U8", (size,)) for i, size in enumerate((4000, 0, 50_000, 7, 20_000, 0))]
DATA = {t.name: np.random.default_rng(i).integers(0, 256, t.nbytes, dtype=np.uint8) for i, t in enumerate(TENSORS)}
TOTAL = sum(t.nbytes for t in TENSORS)


class Stop(Exception):
    """Stands for a kill: the file stays as it is."""


def write(
    directory: Path, data: dict[str, np.ndarray], stop_after: int | None = None, piece: int = 999
) -> tuple[int, list[str]]:
    """One run of a stage that writes the file: bytes that went into it, and the tensors that were kept."""
    written, kept = 0, []
    sound = AtomicFile.write

    def counted(file: AtomicFile, view: bytes | memoryview) -> None:
        nonlocal written
        written += len(view)
        sound(file, view)
        if stop_after is not None and written >= stop_after:
            raise Stop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer_module, "MARK_BYTES", 3000)
        patch.setattr(stage_module.AtomicFile, "write", counted)
        with StageDirectory(directory, "test") as stage, stage.create(NAME, kept=True) as handle:
            writer = ShardWriter(
                handle, TENSORS, {}, marks=stage.marks(NAME), mark=lambda size, digest: stage.mark(NAME, size, digest)
            )
            for tensor in TENSORS:
                if writer.is_resumed and writer.keep(tensor.name):
                    kept.append(tensor.name)
                    continue
                for begin in range(0, tensor.nbytes, piece):
                    writer.write(data[tensor.name][begin : begin + piece])
            record = writer.close()
        stage.finished(NAME, record, {"digests": writer.digests})
    return written, kept


def whole(tmp_path_factory_dir: Path) -> bytes:
    write(tmp_path_factory_dir, DATA)
    return (tmp_path_factory_dir / NAME).read_bytes()


@settings(max_examples=15, deadline=None)
@given(stops=st.lists(st.integers(1, TOTAL), min_size=1, max_size=3), piece=st.sampled_from([700, 999, 5000, 50_000]))
def test_any_stop_costs_what_came_after_the_last_mark(
    stops: Sequence[int], piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = tmp_path_factory.mktemp("resume")
    expected = whole(base / "whole")
    for stop in stops:
        if (base / "out" / NAME).exists():
            break
        try:
            write(base / "out", DATA, stop, piece)
        except Stop:
            assert not (base / "out" / NAME).exists()
    if not (base / "out" / NAME).exists():
        left = temporary(base / "out" / NAME)
        before = left.stat().st_size if left.exists() else 0  # nothing is kept that no mark speaks of
        again, _ = write(base / "out", DATA, None, piece)
        # What is lost: up to a mark's distance and a piece, and of the header what is written each time.
        assert again <= len(expected) - before + 3000 + piece + 1000
    assert (base / "out" / NAME).read_bytes() == expected


@pytest.mark.parametrize("at", [3, 200, 3000, 30_000])
def test_what_a_mark_does_not_prove_is_written_anew(tmp_path: Path, at: int) -> None:
    expected = whole(tmp_path / "whole")
    with pytest.raises(Stop):
        write(tmp_path / "out", DATA, 45_000)
    left = temporary(tmp_path / "out" / NAME)
    raw = bytearray(left.read_bytes())
    raw[at] ^= 1
    left.write_bytes(raw)
    write(tmp_path / "out", DATA)
    assert (tmp_path / "out" / NAME).read_bytes() == expected


def test_a_half_file_that_cannot_be_read_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stop):
        write(tmp_path / "out", DATA, 45_000)
    preadv = os.preadv

    def broken(descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        if offset + len(buffers[0]) > 30_000:
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset, *flags)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        write(tmp_path / "out", DATA)
    assert (tmp_path / "out" / NAME).read_bytes() == whole(tmp_path / "whole")


def test_an_input_that_changed_inside_a_tensor_is_found(tmp_path: Path) -> None:
    """The first run saw other bytes: its part of the tensor is compared, refused, and not kept."""
    other = DATA | {"t2": DATA["t2"].copy()}
    other["t2"][10] ^= 1
    with pytest.raises(Stop):
        write(tmp_path / "out", other, 40_000)
    with pytest.raises(CheckFailed, match="tensor 't2': what an interrupted run had written"):
        write(tmp_path / "out", DATA)
    assert not temporary(tmp_path / "out" / NAME).exists()
    write(tmp_path / "out", DATA)
    assert (tmp_path / "out" / NAME).read_bytes() == whole(tmp_path / "whole")


def test_a_refused_run_leaves_the_other_ones_work(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        write(tmp_path / "out", DATA, 45_000)
    left = temporary(tmp_path / "out" / NAME).read_bytes()
    with (
        pytest.raises(InputError, match="interrupted run of something else"),
        StageDirectory(tmp_path / "out", "other"),
    ):
        pass
    assert temporary(tmp_path / "out" / NAME).read_bytes() == left


def test_a_leftover_without_a_mark_goes(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    temporary(tmp_path / "out" / NAME).write_bytes(b"rubbish")
    with StageDirectory(tmp_path / "out", "test"):
        assert not temporary(tmp_path / "out" / NAME).exists()


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("broken", [{"t0"}, {"t2"}, {"t3", "t4"}, {"t0", "t2", "t3", "t4"}])
def test_a_damaged_file_is_mended_where_it_stands(tmp_path: Path, broken: set[str], linked: bool) -> None:
    """Only the damaged tensors are written; a file that has another name too is left alone, and written anew."""
    expected = whole(tmp_path / "out")
    digests = {}
    with AtomicFile(tmp_path / "x") as handle:
        writer = ShardWriter(handle, TENSORS, {})
        for tensor in TENSORS:
            if tensor.nbytes:
                writer.write(DATA[tensor.name])
        digests = writer.digests
    raw, begin = bytearray(expected), len(expected) - TOTAL
    for tensor in TENSORS:
        if tensor.name in broken:
            raw[begin + tensor.nbytes // 2] ^= 0x10
        begin += tensor.nbytes
    path = tmp_path / "out" / NAME
    path.write_bytes(raw)
    if linked:
        os.link(path, tmp_path / "another name")
    mark = Mark(NAME, tensors=digests)
    with StageDirectory(tmp_path / "out", "test") as stage:
        (tmp_path / "out" / stage_module.JOURNAL).unlink()
        stage._append({"identity": "test"})
        stage._append(mark)
    written, kept = write(tmp_path / "out", DATA)
    assert path.read_bytes() == expected
    sizes = {t.name: t.nbytes for t in TENSORS}
    if linked:
        assert (tmp_path / "another name").read_bytes() == bytes(raw)
        return
    assert set(kept) == {name for name, size in sizes.items() if size and name not in broken} | {"t1", "t5"}
    assert written - (len(expected) - TOTAL) == sum(sizes[name] for name in broken)
