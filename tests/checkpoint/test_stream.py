"""The stream gives a file's bytes in order, whatever is taken, and says so if the file is shorter than it was."""

import errno
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from duovolt.checkpoint import mapping
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.stream import LARGEST, ByteStream


def flaky_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then nothing, or less than was asked for, is in memory; and a read of the disk is cut short."""
    rng, preadv = random.Random(2), os.preadv

    def some(descriptor: int, buffers: list[np.ndarray], offset: int, flags: int) -> int:
        if flags and rng.random() < 0.3:
            raise OSError(errno.EAGAIN, "not in memory")
        if rng.random() < 0.3:
            buffers = [buffers[0][: rng.randrange(1, len(buffers[0]) + 1)]]
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", some)


def no_such_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def refuse(descriptor: int, buffers: list[np.ndarray], offset: int, flags: int) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("cache", [None, flaky_cache, no_such_flag])
def test_pieces_of_any_size(
    tmp_path: Path, cache: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cache is not None:
        cache(monkeypatch)
    path, rng = tmp_path / "file", random.Random(1)
    content = np.random.default_rng(1).integers(0, 256, 11_000_003, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    with ByteStream(path, block_bytes=1) as stream:  # the smallest block, LARGEST: every take may cross its edge
        at = 0
        while at < len(content):
            count = min(rng.choice((0, 1, 7, 4096, 1_000_000, LARGEST)), len(content) - at)
            assert np.array_equal(stream.take(count), content[at : at + count])
            at += count


def test_a_file_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with ByteStream(path) as stream:
        assert bytes(stream.take(3)) == b"123"
        with pytest.raises(InputError, match=r"file: ends at byte 5"):
            stream.take(3)


@pytest.mark.parametrize("refused", ["all reads", "those of the disk"])
def test_a_disk_that_gives_an_error(tmp_path: Path, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))

    def fail(descriptor: int, buffers: list[np.ndarray], offset: int, flags: int) -> int:
        raise OSError(errno.EAGAIN if flags and refused != "all reads" else errno.EIO, "fault")

    monkeypatch.setattr(os, "preadv", fail)
    with ByteStream(path) as stream, pytest.raises(OSError, match="fault") as found:
        stream.take(3)
    assert (found.value.errno, found.value.filename) == (errno.EIO, str(path))


def test_what_is_in_memory_is_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = np.random.default_rng(3).integers(0, 256, 3 * LARGEST, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    with ByteStream(path) as stream:
        pieces = [stream.take(count) for count in (5, LARGEST, 4096)]
        address = pieces[0].ctypes.data
        assert [piece.ctypes.data - address for piece in pieces] == [0, 5, 5 + LARGEST], "one mapping, in a row"
        assert not any(piece.flags.writeable for piece in pieces)
        assert np.array_equal(np.concatenate(pieces), content[: 5 + LARGEST + 4096])


@pytest.mark.parametrize("cold_from", [0, 1, 2, 3])
def test_a_file_of_which_only_the_beginning_is_in_memory(
    tmp_path: Path, cold_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, preadv = 1 << 20, os.preadv
    monkeypatch.setattr(mapping, "WINDOW", window)

    def half_there(descriptor: int, buffers: list[np.ndarray], offset: int, flags: int) -> int:
        if flags and offset >= cold_from * window:
            raise OSError(errno.EAGAIN, "not in memory")
        return preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", half_there)
    path, rng = tmp_path / "file", random.Random(4)
    content = np.random.default_rng(4).integers(0, 256, 3 * window + 12345, dtype=np.uint8)
    path.write_bytes(content.tobytes())
    with ByteStream(path) as stream:
        at = 0
        while at < len(content):
            count = min(rng.choice((1, 7, 4096, 300_000, LARGEST)), len(content) - at)
            assert np.array_equal(stream.take(count), content[at : at + count])
            at += count
        with pytest.raises(InputError, match="it changed while being read"):
            stream.take(1)


def test_a_file_cut_short_while_it_is_read_ends_in_one_line(tmp_path: Path) -> None:
    """The pages are gone, and the processor faults: no core dump, no hang, whichever thread it was."""
    path = tmp_path / "weights of the model"
    path.write_bytes(bytes(8 << 20))
    program = (
        "import sys, threading, xxhash\n"
        "from pathlib import Path\n"
        "from duovolt.checkpoint.stream import ByteStream\n"
        "def work():\n"
        "    stream = ByteStream(Path(sys.argv[1]))\n"
        "    piece = stream.take(1 << 20)\n"
        "    open(sys.argv[1], 'r+b').truncate(4096)\n"
        "    xxhash.xxh3_128(piece.data)\n"
        "    print('not reached')\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "thread.join()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(
        r"duovolt: .*weights of the model: became shorter, .* while it was being read\. .*\n", ended.stderr
    )
