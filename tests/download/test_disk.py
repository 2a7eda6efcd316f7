"""The disk: too small, filling up, forbidden; modes of files."""

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from duovolt.checkpoint.errors import EnvironmentFault
from duovolt.convert.download import download

REPO = "org/model"
SHARD = "model.safetensors-00001-of-00002.safetensors"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no mount here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def test_too_small_a_disk_stops_before_the_first_byte(make_repo, hub, small_disk):
    """D04: need and free are said, nothing is written."""
    make_repo("org/big", (3_000_000, 2_500_000))
    with pytest.raises(EnvironmentFault, match=r"0\.00\d+ GB needed, 0\.004 GB free") as caught:
        download("org/big", small_disk / "dst", endpoint=hub.url)
    assert caught.value.exit_code == 3
    assert list((small_disk / "dst").iterdir()) == []
    assert hub.bytes_served("*.safetensors") == 0


def test_what_is_there_already_is_not_needed_again(make_repo, hub, small_disk):
    """2.5 of 4 MB are taken by the finished half: the rest still fits."""
    folder = make_repo("org/big", (2_500_000,))
    download("org/big", small_disk / "dst", endpoint=hub.url)
    (folder / "chat_template.jinja").write_text("changed")
    report = download("org/big", small_disk / "dst", endpoint=hub.url)
    assert report.needed == len("changed")


def test_disk_that_fills_in_mid_write(make_repo, hub, small_disk, recorder):
    make_repo("org/big", (2_000_000,))

    def fill(count: int) -> None:
        if not (small_disk / "dst" / f".{SHARD}.part").exists():
            return
        with (small_disk / "filler").open("ab", buffering=0) as handle:
            try:
                while handle.write(bytes(4096)):
                    pass
            except OSError:
                return

    recorder.on_advance = fill
    with pytest.raises(EnvironmentFault, match=r"disk is full.*free") as caught:
        download("org/big", small_disk / "dst", endpoint=hub.url, progress=recorder, workers=1)
    assert caught.value.exit_code == 3
    assert not (small_disk / "dst" / SHARD).exists() and not (small_disk / "dst/duovolt-download.json").exists()
    recorder.on_advance = lambda count: None
    (small_disk / "filler").unlink()
    download("org/big", small_disk / "dst", endpoint=hub.url)
    assert (small_disk / "dst" / SHARD).stat().st_size > 2_000_000


@pytest.mark.parametrize("mask", [0o022, 0o027])
def test_modes_follow_the_umask(hub, repo, tmp_path, mask):
    before = os.umask(mask)
    try:
        download(REPO, tmp_path / "dst", endpoint=hub.url)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "dst").rglob("*") if path.is_file()}
    assert modes == {0o666 & ~mask}


def test_replaced_file_keeps_its_mode(hub, repo, tmp_path):
    dst = tmp_path / "dst"
    download(REPO, dst, endpoint=hub.url)
    (dst / SHARD).write_bytes(b"bad")
    (dst / SHARD).chmod(0o640)
    download(REPO, dst, endpoint=hub.url)
    assert stat.S_IMODE((dst / SHARD).stat().st_mode) == 0o640 and (dst / SHARD).stat().st_size > 3


def test_temporary_folder_elsewhere_plays_no_part(hub, repo, tmp_path, monkeypatch):
    """D08: partials stand beside their target."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    download(REPO, tmp_path / "dst", endpoint=hub.url)
    assert (tmp_path / "dst/duovolt-download.json").exists() and not (tmp_path / "nowhere").exists()


def test_name_longer_than_the_file_system_takes(hub, repo, tmp_path):
    (repo / ("x" * 254)).write_text("fits here, but its partial does not")
    with pytest.raises(EnvironmentFault, match="File name too long"):
        download(REPO, tmp_path / "dst", endpoint=hub.url)
