"""A file that lies in the hub's cache already is neither fetched nor stored twice."""

import os
import tempfile
from pathlib import Path

import huggingface_hub.constants
import pytest

from duovolt.convert.download import download

REPO = "org/model"
SHARD = "model.safetensors-00001-of-00002.safetensors"


@pytest.fixture
def blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    place = cache / "models--org--model" / "blobs"
    place.mkdir(parents=True)
    return place


def fill(hub, repo: Path, blobs: Path) -> None:
    for name, blob in hub.files(REPO).items():
        (blobs / blob.etag).write_bytes((repo / name).read_bytes())


def test_files_of_the_cache_are_linked(hub, repo, expected, tmp_path, tree, blobs):
    fill(hub, repo, blobs)
    download(REPO, tmp_path / "dst", endpoint=hub.url)
    found = tree(tmp_path / "dst")
    assert {name: raw for name, raw in found.items() if name != "duovolt-download.json"} == expected
    # The index is read first, to know what is needed.
    assert {served.name for served in hub.log if served.body_bytes} == {"api", "model.safetensors.index.json"}
    assert (tmp_path / "dst" / SHARD).stat().st_ino == (blobs / hub.files(REPO)[SHARD].etag).stat().st_ino


@pytest.mark.parametrize("damage", ["flip", "cut", "dangling"])
def test_a_damaged_cache_is_not_trusted(hub, repo, expected, tmp_path, tree, blobs, damage):
    fill(hub, repo, blobs)
    blob = blobs / hub.files(REPO)[SHARD].etag
    raw = bytearray(blob.read_bytes())
    raw[5] ^= 1
    blob.write_bytes(raw[:-1] if damage == "cut" else raw)
    if damage == "dangling":
        blob.unlink()
        blob.symlink_to(tmp_path / "nothing")
    download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert tree(tmp_path / "dst")[SHARD] == expected[SHARD] and hub.bytes_served(SHARD) == len(raw)


def test_a_cache_on_another_file_system_is_copied(hub, repo, expected, tmp_path, tree, blobs):
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK) or shared.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system that can be written to")
    fill(hub, repo, blobs)
    with tempfile.TemporaryDirectory(dir=shared) as place:
        download(REPO, Path(place) / "dst", endpoint=hub.url)
        assert tree(Path(place) / "dst")[SHARD] == expected[SHARD]
    assert hub.bytes_served(SHARD) == 0
