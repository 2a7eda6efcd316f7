"""A checkpoint directory: the index is the authority, and nothing is filtered out silently."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.errors import InputError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two oddly named shards, an index with empty metadata, side files."""
    path = tmp_path / "model"
    path.mkdir()
    save_file({"a": np.arange(4, dtype=np.uint8), "b": np.zeros(2, np.float32)}, path / "layers-0.safetensors")
    save_file({"m": np.ones(3, np.float16)}, path / "mtp.safetensors")
    weight_map = {"a": "layers-0.safetensors", "b": "layers-0.safetensors", "m": "mtp.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text("{}")
    (path / "foo_config.json").write_text("{}")
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        Checkpoint.open(path)
    for word in words:
        assert word in str(caught.value)


def index(path: Path, **changes: str) -> None:
    file = path / "model.safetensors.index.json"
    value = json.loads(file.read_text())
    value["weight_map"] |= changes
    file.write_text(json.dumps(value))


def test_a_sound_directory(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.tensors.keys() == {"a", "b", "m"} and checkpoint.side_files == ["config.json", "foo_config.json"]
    np.testing.assert_array_equal(checkpoint.read("a"), [0, 1, 2, 3])
    np.testing.assert_array_equal(checkpoint.read_range("a", 1, 3), [1, 2])
    assert b"".join(bytes(block) for block in checkpoint.blocks("a", 3)) == bytes(range(4))


def test_one_file_without_an_index(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.uint8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert Checkpoint.open(tmp_path).tensors.keys() == {"a"}


def test_a_stray_second_set_is_noticed_and_left_alone(directory: Path) -> None:
    """C02."""
    save_file({"a": np.ones(9, np.uint8)}, directory / "model.safetensors")
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.tensors["a"].path.name == "layers-0.safetensors"
    assert checkpoint.notices == ["model.safetensors: not named by model.safetensors.index.json, left alone"]


def test_missing_shards_are_listed(directory: Path) -> None:
    """D05, C03."""
    (directory / "mtp.safetensors").unlink()
    refused(directory, "1 of 2 shards", "mtp.safetensors", "duovolt download")


def test_index_and_headers_must_agree(directory: Path) -> None:
    index(directory, c="mtp.safetensors")
    refused(directory, "'c'", "mtp.safetensors", "does not hold it")
    index(directory, c="layers-0.safetensors", b="mtp.safetensors")
    refused(directory, "'b'")


def test_a_tensor_that_the_index_does_not_name(directory: Path) -> None:
    save_file({"m": np.ones(3, np.float16), "n": np.ones(3, np.float16)}, directory / "mtp.safetensors")
    refused(directory, "mtp.safetensors", "'n'")


@pytest.mark.parametrize(
    "name", ["../up.safetensors", "/etc/passwd", "sub/x.safetensors", ".hidden", "", "..", "a\\b", "a\nb", "\ud800"]
)
def test_shard_names_are_plain(directory: Path, name: str) -> None:
    index(directory, a=name)
    refused(directory, repr(name), "plain file name")


def test_a_dangling_link(directory: Path) -> None:
    """D07: the link and its target are named."""
    (directory / "mtp.safetensors").unlink()
    (directory / "mtp.safetensors").symlink_to("../blobs/abc")
    refused(directory, "mtp.safetensors", "../blobs/abc")
    (directory / "mtp.safetensors").unlink()
    (directory / "tokenizer.json").symlink_to("../blobs/def")
    save_file({"m": np.ones(3, np.float16)}, directory / "mtp.safetensors")
    refused(directory, "tokenizer.json", "../blobs/def")


@pytest.mark.parametrize(
    ("content", "word"),
    [("[]", "weight_map"), ("{}", "weight_map"), ('{"weight_map": {}}', "weight_map"), ("{", "JSON"),
     ('{"weight_map": {"a": 7}}', "7"), ('{"weight_map": {"a": "x"}, "weight_map": {}}', "twice"), ("\xff", "JSON")],
)  # fmt: skip
def test_damaged_index(directory: Path, content: str, word: str) -> None:
    (directory / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    refused(directory, word)


@pytest.mark.timeout(20)
def test_a_pipe_instead_of_a_file(directory: Path) -> None:
    """Refused, not read until the end of time."""
    for name in ("config.json", "mtp.safetensors"):
        content = (directory / name).read_bytes()
        (directory / name).unlink()
        os.mkfifo(directory / name)
        refused(directory, name)
        (directory / name).unlink()
        (directory / name).write_bytes(content)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "not a directory")
    refused(tmp_path, "config.json", "no such file")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "not a safetensors checkpoint")
