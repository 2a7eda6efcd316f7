"""verify and shard read every byte once, from the disk in large reads; what is joined on the way is what the ranks hold."""

from pathlib import Path

import numpy as np
import pytest

from duovolt.checkpoint.container import NUMPY_DTYPE, read_header
from duovolt.checkpoint.manifest import read_manifest
from duovolt.checkpoint.stream import PAGE
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.damage import edit_tensor, refit
from duovolt.tests.support.reads import note_reads
from duovolt.tests.verify.conftest import Stages
from duovolt.verify.proofs import verify
from duovolt.verify.ranks import open_ranks
from duovolt.verify.report import Report
from duovolt.verify.scan import scan
from duovolt.verify.stage import open_stage

LARGE = 16 << 20  # bytes: tensors above it are read in large pieces
SMALLEST_MEAN = 4 << 20


def ones(weight: str, part: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.ones(shape, NUMPY_DTYPE[dtype])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Stages:
    base = tmp_path_factory.mktemp("large")
    config = maker.config(num_hidden_layers=1, vocab_size=80_000, hidden_size=512, intermediate_size=32_768)
    maker.converted(base / "converted", config, words=ones, max_shard_bytes=90_000_000)
    shard(base / "converted", base / "ranks", 2)
    return Stages(base / "converted", base / "ranks")


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


@pytest.mark.parametrize("in_memory", [False, True])
def test_verify_reads_every_byte_once(large: Stages, in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F10: big reads, in order, each byte once: a disk with milliseconds a request is no disaster."""
    reads = note_reads(monkeypatch, in_memory)
    assert verify(converted=large.converted, ranks=large.ranks).ok
    files = [path for place in (large.converted, large.rank(0), large.rank(1)) for path in shards(place)]
    assert {path: reads.bytes_of(path) for path in files} == {path: path.stat().st_size for path in files}
    entries = [entry for path in files for entry in read_header(path).tensors.values() if entry.nbytes >= LARGE]
    assert len(entries) >= 6
    assert in_memory or min(reads.mean_within(entry) for entry in entries) >= SMALLEST_MEAN


def test_shard_reads_every_byte_once(large: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F10: as verify does, but for pages at the ends of direct reads, which are read whole."""
    reads = note_reads(monkeypatch, in_memory=False)
    shard(large.converted, tmp_path / "ranks", 2)
    for path in shards(large.converted):
        tensors = read_header(path).tensors.values()
        ends = 2 * (PAGE - 1) * sum(file == path for file, _, _ in reads.seen)
        assert 0 <= reads.bytes_of(path) - sum(entry.nbytes for entry in tensors) <= ends < path.stat().st_size / 100
        for entry in tensors:
            assert entry.nbytes < LARGE or reads.mean_within(entry) >= SMALLEST_MEAN


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_whole_joined_in_step(pristine: Stages, tmp_path: Path, tp: int) -> None:
    """Cut along rows, along columns, in three sections, and with kv heads on two ranks each (tp 4)."""
    shard(pristine.converted, tmp_path / "ranks", tp)
    report = Report()
    ranks = open_ranks(tmp_path / "ranks", report)
    assert ranks is not None
    manifest = read_manifest(pristine.converted)
    joined = scan([], ranks.views, lambda count: None).joined
    cut = {
        name: {record.layout, record.split.whole.layout}
        for name, record in ranks.views[0].manifest.tensors.items()
        if record.split is not None and record.split.axis is not None
    }
    alike = {name for name, layouts in cut.items() if len(layouts) == 1}
    assert joined == {name: manifest.tensors[name].digest for name in alike}
    roles = {name.rpartition("layers.")[2].partition(".")[2] for name in joined}
    assert {"mlp.down_proj.weight", "self_attn.k_proj.weight", "linear_attn.in_proj_qkv.weight"} <= roles


def test_two_holders_that_differ_have_no_whole(pristine: Stages, tmp_path: Path) -> None:
    """A kv head that lies on two of four ranks, one of them damaged: no digest, so that the words are compared."""
    shard(pristine.converted, tmp_path / "ranks", 4)
    name = "model.language_model.layers.3.self_attn.k_proj.weight"
    path = next(p for p in shards(tmp_path / "ranks" / "rank-1-of-4") if name in read_header(p).tensors)
    entry = read_header(path).tensors[name]
    raw = bytearray(path.read_bytes())
    raw[entry.begin] ^= 1
    path.write_bytes(raw)
    ranks = open_ranks(tmp_path / "ranks", Report())
    assert ranks is not None
    joined = scan([], ranks.views, lambda count: None).joined
    assert name not in joined and name.replace("k_proj", "v_proj") in joined
    report = verify(converted=pristine.converted, ranks=tmp_path / "ranks")
    (words,) = [proof for proof in report.proofs if proof.name == "converted -> ranks: words"]
    assert [failure.tensor for failure in words.failures] == [name]
    assert "held by several ranks, and rank-1-of-4 differs" in words.failures[0].message


def test_an_exception_in_one_file_ends_the_scan(pristine: Stages) -> None:
    view = open_stage(pristine.converted, "converted", Report())
    assert view is not None

    class Cancelled(Exception):
        pass

    def cancel(count: int) -> None:
        raise Cancelled

    with pytest.raises(Cancelled):
        scan([view], [], cancel)


def test_what_the_ranks_hold_beside_the_converted_is_searched_once_and_found_all_the_same(stages: Stages) -> None:
    """A NaN code in one rank, its digests made to fit: the joined bytes are not the converted ones, so it is searched."""
    name = "model.language_model.layers.0.linear_attn.out_proj.weight"
    edit_tensor(stages.rank(1), name, lambda data: data.__setitem__(5, 0x7F))
    refit(stages.rank(1))
    report = verify(converted=stages.converted, ranks=stages.ranks)
    failed = {proof.name: proof.failures for proof in report.failed}
    assert set(failed) == {"rank-1-of-2: sane values", "converted -> ranks: words"}
    (failure,) = failed["rank-1-of-2: sane values"]
    assert (failure.tensor, failure.found) == (name, "0x7f")
