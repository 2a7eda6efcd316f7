"""What `shard` refuses, with which words and exit code; and what it leaves untouched."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint import stage as stage_module
from duovolt.checkpoint.errors import CheckFailed, DuovoltError, EnvironmentFault, InputError
from duovolt.checkpoint.lock import DirectoryLock
from duovolt.checkpoint.manifest import read_manifest
from duovolt.cli.main import main
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.damage import edit_tensor
from duovolt.verify.proofs import verify


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    maker.converted(tmp_path / "converted", maker.config())
    return tmp_path / "converted"


def refused(error: type[DuovoltError], *words: str, **arguments: Any) -> None:
    with pytest.raises(error) as caught:
        shard(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_widths_that_do_not_divide(converted: Path, tmp_path: Path) -> None:
    """S07: the numbers are in the message, and nothing is written."""
    refused(InputError, "4 linear key heads", "3 ranks", converted=converted, dst=tmp_path / "ranks", tp=3)
    refused(InputError, "--tp 0", converted=converted, dst=tmp_path / "ranks", tp=0)
    refused(InputError, "--tp 65", converted=converted, dst=tmp_path / "ranks", tp=65)
    refused(InputError, "--rank 2", "0 to 1", converted=converted, dst=tmp_path / "ranks", tp=2, rank=2)
    assert not (tmp_path / "ranks").exists()


@pytest.mark.parametrize("heads", [1, 3])
def test_kv_heads_that_do_not_divide(tmp_path: Path, heads: int) -> None:
    config = maker.config(num_key_value_heads=heads, num_attention_heads=12)
    maker.converted(tmp_path / "converted", config)
    if heads == 1:  # replicated on every rank
        shard(tmp_path / "converted", tmp_path / "ranks", 2)
        record = read_manifest(tmp_path / "ranks" / "rank-1-of-2").tensors["mtp.layers.0.self_attn.k_proj.weight"]
        assert record.split is not None and record.split.ranges == [(0, 32)]
    else:
        refused(InputError, "3 kv heads", "2 ranks", converted=tmp_path / "converted", dst=tmp_path / "ranks", tp=2)


def test_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    """S08: no row is lost and none is padded: refused."""
    maker.converted(tmp_path / "converted", maker.config(vocab_size=101))
    refused(InputError, "101 vocabulary rows", converted=tmp_path / "converted", dst=tmp_path / "ranks", tp=2)


def test_a_cut_inside_a_group_of_16(tmp_path: Path) -> None:
    maker.converted(tmp_path / "converted", maker.config(intermediate_size=16 * 5))
    refused(InputError, "down_proj", "40 = 2 x 16 + 8", converted=tmp_path / "converted", dst=tmp_path / "ranks", tp=2)


def test_unfinished_and_wrong_stages(converted: Path, tmp_path: Path) -> None:
    shard(converted, tmp_path / "ranks", 2)
    refused(InputError, "already split", converted=tmp_path / "ranks" / "rank-0-of-2", dst=tmp_path / "x", tp=2)
    (converted / "duovolt.json").unlink()
    refused(InputError, "unfinished", converted=converted, dst=tmp_path / "x", tp=2)
    refused(InputError, "not a directory", converted=tmp_path / "absent", dst=tmp_path / "x", tp=2)


def test_targets_that_are_taken(converted: Path, tmp_path: Path) -> None:
    """F08: never into the input, by whatever path; never over another conversion."""
    refused(InputError, "lies in", converted=converted, dst=converted, tp=2)
    (tmp_path / "link").symlink_to(converted)
    refused(InputError, "lies in", converted=converted, dst=tmp_path / "link" / "below", tp=2)
    maker.converted(tmp_path / "other", maker.config(), note="another")
    shard(tmp_path / "other", tmp_path / "ranks", 2)
    before = {p.name: p.read_bytes() for p in (tmp_path / "ranks" / "rank-1-of-2").iterdir()}
    refused(InputError, "already holds rank 0 of 2", converted=converted, dst=tmp_path / "ranks", tp=2)
    assert {p.name: p.read_bytes() for p in (tmp_path / "ranks" / "rank-1-of-2").iterdir()} == before
    (tmp_path / "mine" / "rank-0-of-2").mkdir(parents=True)
    (tmp_path / "mine" / "rank-0-of-2" / "thesis.txt").write_text("keep")
    refused(InputError, "not empty (thesis.txt)", converted=converted, dst=tmp_path / "mine", tp=2)


def test_running_twice_changes_nothing(converted: Path, tmp_path: Path) -> None:
    shard(converted, tmp_path / "ranks", 2)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "ranks").rglob("*") if p.is_file()}
    report = shard(converted, tmp_path / "ranks", 2)
    assert all(rank.already_done for rank in report.ranks)
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "ranks").rglob("*") if p.is_file()} == before


def test_a_damaged_finished_rank_is_named(converted: Path, tmp_path: Path) -> None:
    shard(converted, tmp_path / "ranks", 2)
    edit_tensor(tmp_path / "ranks" / "rank-1-of-2", "lm_head.weight", lambda data: data.__setitem__(0, data[0] ^ 1))
    refused(CheckFailed, "rank-1-of-2", "damaged", converted=converted, dst=tmp_path / "ranks", tp=2)


def test_a_damaged_converted_tensor_is_found_while_splitting(converted: Path, tmp_path: Path) -> None:
    """Tensor and file are named, also when only the other rank would hold the bad word; no final name appears."""
    edit_tensor(converted, "lm_head.weight", lambda data: data.__setitem__(-1, data[-1] ^ 1))
    refused(CheckFailed, "lm_head.weight", "model-00001", converted=converted, dst=tmp_path / "ranks", tp=2, rank=0)
    assert not list((tmp_path / "ranks").rglob("*.safetensors"))


def test_a_damaged_side_file_is_found(converted: Path, tmp_path: Path) -> None:
    (converted / "chat_template.jinja").write_bytes(b"{{ massages }}")
    refused(CheckFailed, "chat_template.jinja", "changed", converted=converted, dst=tmp_path / "ranks", tp=2)
    assert not list((tmp_path / "ranks").rglob("chat_template.jinja"))


def test_files_of_two_conversions(tmp_path: Path) -> None:
    """D10: equal shapes, different words; found from the headers."""
    for note in ("a", "b"):
        maker.converted(tmp_path / note, maker.config(), note=note, max_shard_bytes=100_000)
    name = sorted(p.name for p in (tmp_path / "a").glob("*.safetensors"))[1]
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    refused(CheckFailed, name, "__metadata__", converted=tmp_path / "a", dst=tmp_path / "ranks", tp=2)


def test_header_that_differs_from_the_manifest(converted: Path, tmp_path: Path) -> None:
    """S12: found before any data is read, every tensor listed."""
    path = converted / "model-00001-of-00001.safetensors"
    raw = path.read_bytes()
    turned = raw.replace(b'"shape":[128,64]', b'"shape":[64,128]').replace(b'"shape":[96,32]', b'"shape":[32,96]')
    path.write_bytes(turned)
    refused(
        CheckFailed, "2 headers differ", "embed_tokens", "attn.qkv", converted=converted, dst=tmp_path / "ranks", tp=2
    )
    assert not (tmp_path / "ranks").exists()


def test_full_disk(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D04: need and free are printed before the first byte."""

    def almost_full(path: Path) -> Any:
        return type("Usage", (), {"free": 1000})

    monkeypatch.setattr(stage_module.shutil, "disk_usage", almost_full)
    refused(EnvironmentFault, "needed", "free", converted=converted, dst=tmp_path / "ranks", tp=2)
    assert not (tmp_path / "ranks").exists()


def test_a_disk_that_fills_up_in_mid_write(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D04: exit code 3, no half file under a final name; once there is room, the same run goes on and is right."""
    sound, count = stage_module.AtomicFile.write, [0]

    def write(self: stage_module.AtomicFile, data: bytes | memoryview) -> None:
        count[0] += 1
        if count[0] == 150:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sound(self, data)

    monkeypatch.setattr(stage_module.AtomicFile, "write", write)
    refused(EnvironmentFault, "the disk is full", "resumes", converted=converted, dst=tmp_path / "ranks", tp=2)
    assert not list((tmp_path / "ranks").rglob("*.safetensors")) and not list((tmp_path / "ranks").rglob("*tmp*"))
    shard(converted, tmp_path / "ranks", 2)
    assert verify(converted=converted, ranks=tmp_path / "ranks").ok


def test_two_runs_at_once(converted: Path, tmp_path: Path) -> None:
    """O03: the second stops and says who holds the directory."""
    (tmp_path / "ranks" / "rank-1-of-2").mkdir(parents=True)
    with DirectoryLock(tmp_path / "ranks" / "rank-1-of-2"):
        refused(InputError, f"process {os.getpid()} is writing here", converted=converted, dst=tmp_path / "ranks", tp=2)
    shard(converted, tmp_path / "ranks", 2)


def test_side_files_and_modes(converted: Path, tmp_path: Path) -> None:
    """C01, D09: all side files byte-equal on both ranks; modes follow the umask."""
    old = os.umask(0o027)
    try:
        shard(converted, tmp_path / "ranks", 2)
    finally:
        os.umask(old)
    for rank in range(2):
        directory = tmp_path / "ranks" / f"rank-{rank}-of-2"
        for name in ("config.json", "chat_template.jinja", "foo_config.json"):
            assert (directory / name).read_bytes() == (converted / name).read_bytes()
        assert {stat.S_IMODE(p.stat().st_mode) for p in directory.iterdir()} == {0o640}
        assert not [p.name for p in directory.iterdir() if p.name.startswith(".")]


def test_one_rank_alone_is_the_same_bytes(converted: Path, tmp_path: Path) -> None:
    shard(converted, tmp_path / "both", 2)
    for rank in range(2):
        shard(converted, tmp_path / "alone", 2, rank)
        one, other = tmp_path / "alone" / f"rank-{rank}-of-2", tmp_path / "both" / f"rank-{rank}-of-2"
        assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in other.iterdir()}


def test_command_line(converted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks, report = str(tmp_path / "ranks"), tmp_path / "report.json"
    assert main(["shard", str(converted), ranks, "--tp", "2", "--json", str(report)]) == 0
    out = capsys.readouterr().out
    assert "rank-0-of-2:" in out and "peak memory" in out
    assert [rank["rank"] for rank in json.loads(report.read_text())["ranks"]] == [0, 1]
    assert main(["shard", str(converted), ranks, "--tp", "3"]) == 2
    assert capsys.readouterr().err.startswith("duovolt: ")
    assert main(["shard", str(converted), ranks, "--tp", "2", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["shard", str(converted), ranks]) == 2  # no default N
    assert "--tp" in capsys.readouterr().err
