"""Reads past the page cache give the file's bytes, wherever they begin and end, whatever is in memory and can be done."""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.direct import SLACK, SMALL, DirectFile
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.stream import PAGE, page_aligned

SIZE = (4 << 20) + 1234
GUARD = 0xA5


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("direct") / "file"
    path.write_bytes(np.random.default_rng(1).integers(0, 256, SIZE, np.uint8).tobytes())
    yield path


def forget(path: Path, begin: int = 0, count: int = 0) -> None:
    """Drop a file's pages from memory."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, begin, count, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def read(path: Path, position: int, count: int) -> bytes:
    """Through a DirectFile, into a room of just the size that it asks for, behind which nothing may be written."""
    room = page_aligned(count + SLACK + PAGE)
    room[count + SLACK :] = GUARD
    with DirectFile(path) as opened:
        found = opened.read(position, count, room[: count + SLACK])
    assert (not count or np.shares_memory(found, room)) and (room[count + SLACK :] == GUARD).all()
    return found.tobytes()


spans = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted) | st.tuples(
    st.integers(0, 3 * PAGE), st.integers(SIZE - 3 * PAGE, SIZE)
)


@settings(max_examples=60, deadline=None)
@given(spans, spans, st.booleans())
def test_the_bytes_of_any_span(file: Path, span: tuple[int, int], kept: tuple[int, int], cold: bool) -> None:
    """With nothing in memory, with a part of the file there, with all."""
    if cold:
        forget(file)
        with file.open("rb") as handle:
            os.preadv(handle.fileno(), [bytearray(min(kept[1] - kept[0], 100_000))], kept[0])
    begin, end = span
    assert read(file, begin, end - begin) == file.read_bytes()[begin:end]


@pytest.mark.parametrize("begin", [0, 1, PAGE - 1, PAGE, PAGE + 64])
@pytest.mark.parametrize("count", [0, 1, SMALL - 1, SMALL, SMALL + 1, 8 * PAGE + SMALL])
def test_edges(file: Path, begin: int, count: int) -> None:
    whole = file.read_bytes()
    for at in (begin, SIZE - begin - count):
        forget(file)
        assert read(file, at, count) == whole[at : at + count]


@pytest.mark.parametrize("errors", [("open",), ("read",), ("cached",), ("read", "cached")])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_systems_that_cannot(
    file: Path, errors: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No direct reads, or no reads of what is in memory only: the plain way, the same bytes."""
    opened, preadv = os.open, os.preadv
    refused: list[str] = []

    def refuse(what: str) -> None:
        refused.append(what)
        raise OSError(code, os.strerror(code))

    def fake_open(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if "open" in errors and flags & os.O_DIRECT:
            refuse("open")
        return opened(path, flags, *more, **options)

    def fake_preadv(descriptor: int, buffers: Any, position: int, flags: int = 0) -> int:
        status = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        if "read" in errors and int(status.partition("flags:")[2].split()[0], 8) & os.O_DIRECT:
            refuse("read")
        if "cached" in errors and flags:
            refuse("cached")
        return preadv(descriptor, buffers, position, flags)

    whole = file.read_bytes()
    forget(file)
    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(os, "preadv", fake_preadv)
    assert read(file, 777, 2 << 20) == whole[777 : 777 + (2 << 20)]
    assert set(refused) == set(errors)


def test_what_is_not_in_memory_stays_out_of_it(file: Path) -> None:
    """Large reads leave no pages behind; without a way to tell (a file system in memory) there is nothing to test."""
    forget(file)
    with file.open("rb") as handle:

        def cached(position: int) -> bool:
            try:
                return os.preadv(handle.fileno(), [bytearray(PAGE)], position, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                return False

        if cached(SIZE - 1):
            pytest.skip("the file's pages cannot be dropped here")
        with DirectFile(file) as opened:
            if opened._direct is None:
                pytest.skip("no direct reads here")
        forget(file)
        read(file, 100, 3 << 20)
        assert sum(cached(position) for position in range(64 << 10, 3 << 20, 256 << 10)) == 0


def test_a_file_cut_short(file: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(file.read_bytes()[: 1 << 20])
    for position in (0, (1 << 20) - 5, 1 << 20, 2 << 20):
        for count in (SMALL - 1, 2 << 20):
            forget(short)
            if position + count > 1 << 20:
                with pytest.raises(InputError, match=r"short: ends at byte \d+; it changed while being read\."):
                    read(short, position, count)


@pytest.mark.parametrize("count", [100, 2 << 20])
def test_a_dying_disk_is_named(file: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError) as caught:
        read(file, 10, count)
    assert caught.value.errno == errno.EIO and caught.value.filename == str(file)


def test_threads_share_a_file(file: Path) -> None:
    whole = file.read_bytes()
    forget(file)
    with DirectFile(file) as opened, ThreadPoolExecutor(4) as pool:
        step = 300_007
        places = [(at, min(step, SIZE - at)) for at in range(0, SIZE, step)] * 3
        found = pool.map(lambda p: opened.read(*p, page_aligned(p[1] + SLACK)).tobytes(), places)
        assert all(raw == whole[at : at + count] for raw, (at, count) in zip(found, places, strict=True))


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_every_descriptor_is_closed(file: Path) -> None:
    before = descriptors()
    with DirectFile(file):
        assert descriptors() > before
    assert descriptors() == before
