"""Reading safetensors files: what is accepted, and that every damaged header is one InputError, fast and small."""

import json
import random
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from duovolt.checkpoint import container, writer
from duovolt.checkpoint.container import blocks, read_header, read_range, read_tensor
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.stage import AtomicFile
from duovolt.checkpoint.writer import Planned, ShardWriter

SOUND = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.uint8)})


def with_header(table: Any, data: bytes = b"") -> bytes:
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def tensor(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def refused(path: Path, raw: bytes, *words: str) -> None:
    path.write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_header(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "sound.safetensors"
    path.write_bytes(SOUND)
    header = read_header(path)
    assert {n: (e.dtype, e.shape) for n, e in header.tensors.items()} == {"a": ("F32", (2, 3)), "b": ("U8", (5,))}
    np.testing.assert_array_equal(read_tensor(header.tensors["a"]), np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(read_range(header.tensors["b"], 1, 3), [1, 2])
    assert b"".join(bytes(block) for block in blocks(header.tensors["b"], 2)) == bytes(range(5))
    with pytest.raises(ValueError, match="outside"):
        read_range(header.tensors["b"], 3, 6)


@pytest.mark.parametrize("metadata", ["absent", {}, None, {"foreign": "kept"}])
def test_metadata_that_is_absent_or_empty(tmp_path: Path, metadata: Any) -> None:
    """F07."""
    table = {"x": tensor()} | ({} if metadata == "absent" else {"__metadata__": metadata})
    (tmp_path / "x").write_bytes(with_header(table, bytes(4)))
    assert read_header(tmp_path / "x").metadata == (metadata if isinstance(metadata, dict) else {})


def test_a_tensor_without_elements_and_one_without_axes(tmp_path: Path) -> None:
    table = {"empty": tensor("F32", [0, 7], [0, 0]), "scalar": tensor("F32", [], [0, 4])}
    (tmp_path / "x").write_bytes(with_header(table, np.float32(2).tobytes()))
    header = read_header(tmp_path / "x")
    assert read_tensor(header.tensors["empty"]).shape == (0, 7)
    assert read_tensor(header.tensors["scalar"]) == np.float32(2)


@pytest.mark.parametrize("cut", [1, 20, len(SOUND) - 40, len(SOUND) - 4, len(SOUND)])
def test_cut_off(tmp_path: Path, cut: int) -> None:
    """F01: file, expected and real size, and what to do."""
    refused(tmp_path / "x", SOUND[: len(SOUND) - cut], str(len(SOUND) - cut), "etch it again")


def test_bytes_too_many(tmp_path: Path) -> None:
    """F02: the same verdict as the reference library's."""
    refused(tmp_path / "x", SOUND + bytes(8), "8 too many")
    with pytest.raises(safetensors.SafetensorError):
        safetensors.deserialize(SOUND + bytes(8))


@pytest.mark.parametrize("length", [2**40, 2**64 - 1, 100_000_001, len(SOUND)])
def test_header_lengths_beyond_file_or_limit(tmp_path: Path, length: int) -> None:
    """F03: refused before anything of that size is allocated."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(tmp_path / "x", length.to_bytes(8, "little") + SOUND[8:], str(length), "header length")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kilobytes


@pytest.mark.parametrize(
    ("raw", "seems"),
    [
        (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
        (b"\n  <html>busy</html>      ", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git-lfs pointer"),
        (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}.", "pickle"),
        (b"PK\x03\x04aaaaaaaaaaaaaaaa", "zip"),
        (b"GGUF\x03\x00\x00\x00\x00\x00", "GGUF"),
    ],
)
def test_what_a_foreign_file_looks_like(tmp_path: Path, raw: bytes, seems: str) -> None:
    """F04."""
    refused(tmp_path / "x", raw, "not a safetensors file", seems)


@pytest.mark.parametrize(
    ("table", "word"),
    [
        (
            b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
            "twice",
        ),
        (b'{"x":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', "twice"),
        (b"[]", "not a JSON object"),
        (b"{", "JSON"),
        (b"\xff\xfe{}", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"x":' * 50_000, "JSON"),
        ({"x": []}, "lacks"),
        ({"x": {"dtype": "U8", "shape": [4]}}, "lacks"),
        ({"x": tensor("U9")}, "dtype"),
        ({"x": tensor(["U8"])}, "dtype"),
        ({"x": tensor("F4")}, "dtype"),
        ({"x": tensor(shape=[-4])}, "shape"),
        ({"x": tensor(shape=[4.0])}, "shape"),
        ({"x": tensor(shape=[True, 4])}, "shape"),
        ({"x": tensor(shape="4")}, "shape"),
        ({"x": tensor(shape=[2**40, 2**40])}, "needed"),
        ({"x": tensor(shape=[1] * 9)}, "shape"),
        ({"x": tensor(offsets=[4, 0])}, "bytes stored"),
        ({"x": tensor(offsets=[0, 4, 8])}, "data_offsets"),
        ({"x": tensor(offsets=[-4, 0])}, "data_offsets"),
        ({"x": tensor(offsets=[0, 4.0])}, "data_offsets"),
        ({"x": tensor(offsets=[2**70, 2**70 + 4])}, "data ends"),
        ({"x": tensor(shape=[3])}, "3 needed"),
        ({"x": tensor(shape=[2], offsets=[2, 4])}, "hole"),
        ({"x": tensor(shape=[3], offsets=[0, 3]), "y": tensor(shape=[2], offsets=[2, 4])}, "overlap"),
        ({"x": tensor(), "y": tensor()}, "overlap"),
        ({"": tensor()}, "name"),
        ({"a\nb": tensor()}, "name"),
        ({"x" * 2000: tensor()}, "name"),
        ({"__metadata__": {"n": 1}, "x": tensor()}, "__metadata__"),
        ({"__metadata__": ["n"], "x": tensor()}, "__metadata__"),
    ],
)
def test_damaged_headers(tmp_path: Path, table: Any, word: str) -> None:
    refused(tmp_path / "x", with_header(table, bytes(4)), word)


def test_no_file_and_a_directory(tmp_path: Path) -> None:
    for path, word in ((tmp_path / "absent", "no such file"), (tmp_path, "a directory")):
        with pytest.raises(InputError, match=word):
            read_header(path)


@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 4),
    kind=st.sampled_from(["flip", "byte", "insert", "delete", "splice"]),
)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_headers(tmp_path: Path, seed: int, count: int, kind: str) -> None:
    """Never another exception than InputError; what is still accepted, the reference library accepts with equal data."""
    rng = random.Random(seed)
    raw = bytearray(SOUND)
    for _ in range(count):
        at = rng.randrange(8 + int.from_bytes(SOUND[:8], "little"))
        if kind == "flip":
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == "byte":
            raw[at] = rng.choice(b'0123456789[]{},:"-.eE \x00')
        elif kind == "insert":
            raw[at:at] = bytes([rng.choice(b'0123456789[]{},:"-')])
        elif kind == "delete":
            del raw[at]
        else:
            raw[at : at + 4] = raw[8 : 8 + rng.randrange(12)]
    path = tmp_path / "x"
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except InputError as error:
        assert str(path) in str(error)
        return
    theirs = {name: bytes(info["data"]) for name, info in safetensors.deserialize(bytes(raw))}
    assert {name: read_tensor(entry).tobytes() for name, entry in header.tensors.items()} == theirs


@given(raw=st.binary(max_size=200))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(raw)
    try:
        header = read_header(path)
    except InputError:
        return
    assert header.size == len(raw)


def test_the_writer_is_read_by_the_reference_library(tmp_path: Path) -> None:
    """Every dtype of one to eight bytes, with compact data and alignment to the element."""
    tensors = [
        Planned("d", "F64", (3,)),
        Planned("f", "F32", (2, 2)),
        Planned("h", "BF16", (5,)),
        Planned("b", "U8", (3,)),
    ]
    data = {t.name: np.random.default_rng(1).integers(0, 255, t.nbytes, dtype=np.uint8) for t in tensors}
    with AtomicFile(tmp_path / "x") as handle:
        shard = ShardWriter(handle, tensors, {"format": "pt", "own": "ours"})
        for planned in tensors:
            shard.write(data[planned.name])
        record = shard.close()
    raw = (tmp_path / "x").read_bytes()
    assert record.size == len(raw) and (int.from_bytes(raw[:8], "little") + 8) % writer.ALIGNMENT == 0
    theirs = dict(safetensors.deserialize(raw))
    assert {n: bytes(info["data"]) for n, info in theirs.items()} == {n: d.tobytes() for n, d in data.items()}
    assert read_header(tmp_path / "x").metadata == {"format": "pt", "own": "ours"}


def test_the_writer_refuses_what_readers_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F03: the reader's limit is the writer's; nothing is left under the final name."""
    monkeypatch.setattr(writer, "MAX_HEADER", 5000)
    tensors = [Planned(f"t{i}", "U8", (1,)) for i in range(100)]
    with pytest.raises(InputError, match="100 tensors give a header"), AtomicFile(tmp_path / "x") as handle:
        ShardWriter(handle, tensors, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32"])
def test_columns_are_written_compact(tmp_path: Path, dtype: str) -> None:
    """F05: a strided slice is stored as its own copy, and the file is its bytes and a header."""
    whole = np.arange(48).reshape(8, 6).astype(container.NUMPY_DTYPE[dtype])
    with AtomicFile(tmp_path / "x") as handle:
        shard = ShardWriter(handle, [Planned("x", dtype, (8, 3))], {})
        shard.write(whole[:, 3:])
        record = shard.close()
    np.testing.assert_array_equal(read_tensor(read_header(tmp_path / "x").tensors["x"]), whole[:, 3:])
    header = 8 + int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")
    assert record.size == header + 24 * whole.itemsize


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """F06: a sparse tensor of 2^31 + 16 bytes, marked at the edges."""
    count = 2**31 + 16
    path = tmp_path / "x"
    head = with_header({"x": tensor(shape=[count], offsets=[0, count])})
    marks = {2**31 - 1: 1, 2**31: 2, count - 1: 3}
    with path.open("wb") as handle:
        handle.write(head)
        handle.truncate(len(head) + count)
        for position, value in marks.items():
            handle.seek(len(head) + position)
            handle.write(bytes([value]))
    entry = read_header(path).tensors["x"]
    assert entry.nbytes == count
    for position, value in marks.items():
        assert read_range(entry, position, position + 1)[0] == value
    np.testing.assert_array_equal(read_range(entry, 2**31 - 2, 2**31 + 2), [0, 1, 2, 0])


def test_a_header_that_no_reader_accepts_is_not_even_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((container.MAX_HEADER + 1).to_bytes(8, "little"))
    with path.open("r+b") as handle:
        handle.truncate(container.MAX_HEADER + 100)  # a hole: it takes no room
    monkeypatch.setattr("duovolt.checkpoint.container.parse_json", lambda *_: pytest.fail("100 MB were read"))
    with pytest.raises(InputError, match="exceeds the limit"):
        read_header(path)
