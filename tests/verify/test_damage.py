"""Each kind of damage is found by the proof made for it, which names tensor, file, index and both values."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duovolt.checkpoint.container import read_header
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.layouts import LAYOUTS
from duovolt.checkpoint.manifest import read_manifest
from duovolt.cli.main import main
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.damage import edit_manifest, edit_tensor, refit
from duovolt.tests.verify.conftest import Stages
from duovolt.verify.proofs import verify
from duovolt.verify.report import Failure, Report

NORM = "model.language_model.norm.weight"
Q_PROJ = "model.language_model.layers.3.self_attn.q_proj.weight"
GATE, UP = (f"model.language_model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
QKV = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"


def failures(report: Report, proof: str) -> list[Failure]:
    """The failures of the one proof of this name; the test fails if there is no such proof."""
    (found,) = [p for p in report.proofs if p.name == proof]
    return found.failures


def status(report: Report) -> dict[str, str]:
    return {proof.name: proof.status for proof in report.proofs}


def flip(position: int, bit: int = 1) -> Callable[[np.ndarray], None]:
    def change(data: np.ndarray) -> None:
        data[position] ^= bit

    return change


def test_sound_directories(stages: Stages) -> None:
    report = verify(converted=stages.converted, ranks=stages.ranks)
    assert report.ok and "failed" not in status(report).values() and "skipped" not in status(report).values()
    assert len(report.proofs) == 20
    alone = verify(ranks=stages.ranks)
    assert alone.ok and status(alone)["ranks: joined whole"] == "proved"


def test_one_bit_of_one_word(stages: Stages) -> None:
    """S13: the canonical index and both words, although the file is tiled; every other proof still runs."""
    edit_tensor(stages.rank(1), Q_PROJ, flip(0, 0x80))
    report = verify(converted=stages.converted, ranks=stages.ranks)
    (failure,) = failures(report, "converted -> ranks: words")
    words = maker.random_words(Q_PROJ, "words", (256, 64), "F8_E4M3")
    assert (failure.tensor, failure.index) == (Q_PROJ, [128, 0])  # rank 1 holds rows 128 to 255
    assert failure.file is not None and "rank-1-of-2" in failure.file
    assert (failure.expected, failure.found) == (f"0x{words[128, 0]:02x}", f"0x{words[128, 0] ^ 0x80:02x}")
    bytes_proof = failures(report, "rank-1-of-2: bytes of files and tensors")
    assert {f.tensor for f in bytes_proof} == {None, Q_PROJ}
    assert status(report)["rank-0-of-2: bytes of files and tensors"] == "proved"
    assert status(report)["ranks: partition"] == "proved"


@pytest.mark.parametrize("with_converted", [True, False])
def test_damage_with_digests_made_to_fit(stages: Stages, with_converted: bool) -> None:
    """Only the join can see it: the rank is consistent in itself."""
    edit_tensor(stages.rank(0), GATE, flip(5))
    refit(stages.rank(0))
    report = verify(converted=stages.converted if with_converted else None, ranks=stages.ranks)
    proof = "converted -> ranks: words" if with_converted else "ranks: joined whole"
    assert [p.name for p in report.failed] == [proof]
    assert [f.tensor for f in failures(report, proof)] == [GATE]


@pytest.mark.parametrize("with_converted", [True, False])
def test_permuted_heads(stages: Stages, with_converted: bool) -> None:
    """Two heads of one rank change places: every value is still there, every shape fits."""

    def swap_heads(data: np.ndarray) -> None:
        heads = data.reshape(2, -1)
        heads[:] = heads[::-1].copy()

    edit_tensor(stages.rank(1), Q_PROJ, swap_heads)
    refit(stages.rank(1))
    report = verify(converted=stages.converted if with_converted else None, ranks=stages.ranks)
    proof = "converted -> ranks: words" if with_converted else "ranks: joined whole"
    assert [f.tensor for f in failures(report, proof)] == [Q_PROJ]


@pytest.mark.parametrize("with_converted", [True, False])
def test_swapped_tensors_of_equal_shape(stages: Stages, with_converted: bool) -> None:
    directory = stages.rank(0)
    entries = {n: read_header(directory / read_manifest(directory).tensors[n].file).tensors[n] for n in (GATE, UP)}
    data = {name: entry.path.read_bytes()[entry.begin : entry.end] for name, entry in entries.items()}
    assert data[GATE] != data[UP]
    for name, other in ((GATE, UP), (UP, GATE)):
        edit_tensor(
            directory, name, lambda bytes_, o=other: bytes_.__setitem__(slice(None), np.frombuffer(data[o], np.uint8))
        )
    refit(directory)
    report = verify(converted=stages.converted if with_converted else None, ranks=stages.ranks)
    proof = "converted -> ranks: words" if with_converted else "ranks: joined whole"
    assert {f.tensor for f in failures(report, proof)} == {GATE, UP}


def test_replicated_tensor_differs(stages: Stages) -> None:
    """S15: the tensor, both ranks, the index and both words."""
    edit_tensor(stages.rank(1), NORM, flip(6))
    refit(stages.rank(1))
    (failure,) = failures(verify(ranks=stages.ranks), "ranks: replicated tensors")
    word = int(maker.random_words(NORM, "plain", (64,), "BF16")[3])
    assert (failure.tensor, failure.index) == (NORM, [3])
    assert "rank-1-of-2 and rank-0-of-2" in failure.message
    assert (failure.found, failure.expected) == (f"0x{word ^ 1:04x}", f"0x{word:04x}")


def test_shared_kv_heads_differ(tmp_path: Path) -> None:
    """A kv head that lies on two ranks must be the same on both."""
    maker.converted(tmp_path / "converted", maker.config(num_key_value_heads=1))
    shard(tmp_path / "converted", tmp_path / "ranks", 2)
    assert verify(ranks=tmp_path / "ranks").ok
    name = "model.language_model.layers.3.self_attn.k_proj.weight"
    edit_tensor(tmp_path / "ranks" / "rank-1-of-2", name, flip(0))
    refit(tmp_path / "ranks" / "rank-1-of-2")
    report = verify(ranks=tmp_path / "ranks")
    (failure,) = failures(report, "ranks: joined whole")
    assert failure.tensor == name and "several ranks" in failure.message


def test_swapped_folders(stages: Stages) -> None:
    stages.rank(0).rename(stages.ranks / "x")
    stages.rank(1).rename(stages.rank(0))
    (stages.ranks / "x").rename(stages.rank(1))
    found = failures(verify(ranks=stages.ranks), "ranks: identity")
    assert len(found) == 2 and "another rank's" in found[0].message


def test_a_rank_given_twice(stages: Stages) -> None:
    shutil.rmtree(stages.rank(1))
    shutil.copytree(stages.rank(0), stages.rank(1))
    report = verify(converted=stages.converted, ranks=stages.ranks)
    messages = " ".join(f.message for f in failures(report, "ranks: identity"))
    assert "rank 0 of 2 is there 2 times" in messages and "rank 1 of 2 is there 0 times" in messages


def test_a_missing_rank(stages: Stages) -> None:
    shutil.rmtree(stages.rank(1))
    report = verify(ranks=stages.ranks)
    assert "rank 1 of 2 is there 0 times" in failures(report, "ranks: identity")[0].message
    assert status(report)["ranks: joined whole"] == "skipped"


def test_ranks_of_different_conversions(stages: Stages, tmp_path: Path) -> None:
    """A stale copy: same shapes, another conversion."""
    maker.converted(tmp_path / "old", maker.config(), max_shard_bytes=200_000, note="old", words=maker.row_marker)
    shutil.rmtree(stages.rank(1))
    shard(tmp_path / "old", stages.ranks, 2, 1)
    report = verify(converted=stages.converted, ranks=stages.ranks)
    assert any("conversion_id" in f.message for f in failures(report, "ranks: identity"))
    assert any("conversion_id" in f.message for f in failures(report, "converted -> ranks: same conversion"))
    assert failures(report, "converted -> ranks: words")


def test_ranks_of_different_widths(stages: Stages) -> None:
    shard(stages.converted, stages.ranks, 4, 3)
    assert any("another number of ranks" in f.message for f in failures(verify(ranks=stages.ranks), "ranks: identity"))


def test_records_that_are_not_the_partition(stages: Stages) -> None:
    """A contiguous half of q | k | v, consistent in itself on both ranks, is no split of the family."""
    for rank in range(2):
        ranges = [(rank * 256, rank * 256 + 256)]
        edit_manifest(stages.rank(rank), lambda m, r=ranges: m["tensors"][QKV]["split"].__setitem__("ranges", r))
    report = verify(ranks=stages.ranks)
    assert {f.tensor for f in failures(report, "ranks: partition")} == {QKV}
    assert [f.tensor for f in failures(report, "ranks: joined whole")] == [QKV]


def test_a_hole_between_the_ranks(stages: Stages) -> None:
    edit_manifest(stages.rank(1), lambda m: m["tensors"]["lm_head.weight"]["split"].__setitem__("ranges", [(0, 64)]))
    report = verify(converted=stages.converted, ranks=stages.ranks)
    (failure,) = failures(report, "converted -> ranks: words")
    assert failure.tensor == "lm_head.weight"
    assert failures(report, "ranks: partition")


@pytest.mark.parametrize("size", [0, 1, 3, 10**15])
def test_a_senseless_number_of_ranks(stages: Stages, size: int) -> None:
    """However the manifest lies, the answer comes at once."""
    edit_manifest(stages.rank(0), lambda m: m.update(tp_size=size))
    assert not verify(ranks=stages.ranks).ok


def test_a_layout_named_wrongly(stages: Stages) -> None:
    """S11: same bytes, same shape, another name of the layout."""

    def relabel(manifest: dict[str, Any]) -> None:
        record = manifest["tensors"][Q_PROJ]
        record.update(layout="canonical", shape=record["canonical_shape"])

    edit_manifest(stages.rank(0), relabel)
    found = failures(verify(ranks=stages.ranks), "rank-0-of-2: headers and index")
    assert [f.tensor for f in found] == [Q_PROJ]


@pytest.mark.parametrize(
    ("tensor", "word", "wanted"),
    [
        (Q_PROJ, b"\x7f", "a finite value"),
        (GATE.removesuffix("weight") + "weight_scale", b"\xff", "a finite value"),
        (GATE.removesuffix("weight") + "weight_scale_2", b"\x00\x00\xc0\x7f", "a finite positive scale"),
        (Q_PROJ.removesuffix("weight") + "weight_scale", b"\x00\x00\x00\x00", "a finite positive scale"),
        (NORM, b"\x80\x7f", "a finite value"),
    ],
)
def test_values_that_must_not_occur(stages: Stages, tensor: str, word: bytes, wanted: str) -> None:
    edit_tensor(
        stages.converted, tensor, lambda data: data.__setitem__(slice(0, len(word)), np.frombuffer(word, np.uint8))
    )
    refit(stages.converted)
    (failure,) = failures(verify(converted=stages.converted), "converted: sane values")
    assert (failure.tensor, failure.expected) == (tensor, wanted)
    assert failure.found == "0x" + word[::-1].hex()
    assert failure.index == [0] * len(read_manifest(stages.converted).tensors[tensor].canonical_shape)


def test_index_of_a_nan_in_a_tile(stages: Stages) -> None:
    """The index counts rows and columns of the matrix, not bytes of the file."""
    words = maker.random_words(Q_PROJ, "words", (256, 64), "F8_E4M3")
    words[77, 41] = 0xFF
    tiles = LAYOUTS["v100-fp8"].apply(words).reshape(-1)
    edit_tensor(stages.converted, Q_PROJ, lambda data: data.__setitem__(slice(None), tiles))
    (failure,) = failures(verify(converted=stages.converted), "converted: sane values")
    assert failure.index == [77, 41] and failure.found == "0xff"


def test_non_finite_words_of_the_source_are_no_fault(tmp_path: Path) -> None:
    """Q12: what the source had goes over word for word and is not held against the conversion."""

    def with_infinity(weight: str, part: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        words = maker.random_words(weight, part, shape, dtype)
        if weight == NORM:
            words[:4] = [0x0001, 0x8000, 0x7FC1, 0xFF80]
        return words

    maker.converted(tmp_path / "converted", maker.config(), words=with_infinity)
    shard(tmp_path / "converted", tmp_path / "ranks", 2)
    assert verify(converted=tmp_path / "converted", ranks=tmp_path / "ranks").ok


def test_inventory_is_closed(stages: Stages) -> None:
    def move(manifest: dict[str, Any]) -> None:
        record = manifest["tensors"].pop(NORM)
        manifest["tensors"]["model.language_model.nrom.weight"] = record | {
            "weight": "model.language_model.nrom.weight"
        }

    edit_manifest(stages.converted, move)
    found = failures(verify(converted=stages.converted), "converted: closed inventory")
    assert {(f.tensor, f.message.split(":")[0]) for f in found} == {
        (NORM, "missing"),
        ("model.language_model.nrom.weight", "extra"),
    }


def test_strange_and_missing_files(stages: Stages) -> None:
    """C02: a stray second set of weights is not merged and not passed over."""
    (stages.rank(0) / "model.safetensors").write_bytes(b"stray")
    (stages.rank(1) / "chat_template.jinja").unlink()
    report = verify(ranks=stages.ranks)
    assert "model.safetensors" in str(failures(report, "rank-0-of-2: headers and index")[0])
    assert "chat_template.jinja" in str(failures(report, "rank-1-of-2: bytes of files and tensors")[0])


def test_shards_of_another_identity(stages: Stages) -> None:
    """The other rank's file under this rank's name: told from the weights' own metadata."""
    name = "model-00001-of-00002.safetensors"
    (stages.rank(0) / name).write_bytes((stages.rank(1) / name).read_bytes())
    found = failures(verify(ranks=stages.ranks), "rank-0-of-2: headers and index")
    assert [(f.message, f.found, f.expected) for f in found] == [("__metadata__ 'duovolt.tp_rank'", "'1'", "'0'")]


def test_one_rank_alone(stages: Stages) -> None:
    """What can be proved is, what cannot is said; beside the converted directory its words are compared too."""
    report = verify(ranks=stages.rank(1))
    assert report.ok and status(report)["ranks: joined whole"] == "skipped" and "1 of 2 ranks" in report.notes[0]
    assert verify(converted=stages.converted, ranks=stages.rank(1)).ok
    edit_tensor(stages.rank(1), QKV, flip(-1))
    refit(stages.rank(1))
    (failure,) = failures(verify(converted=stages.converted, ranks=stages.rank(1)), "converted -> ranks: words")
    assert (failure.tensor, failure.index) == (QKV, [511, 63])


def test_what_is_nothing_to_verify(stages: Stages, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ({}, "nothing to verify"),
        ({"converted": tmp_path / "absent"}, "not a directory"),
        ({"ranks": tmp_path / "empty"}, "no rank-R-of-N"),
        ({"converted": stages.rank(0)}, "--ranks"),
        ({"ranks": stages.converted}, "--converted"),
        ({"source": tmp_path / "empty"}, "proves nothing alone"),
    ):
        with pytest.raises(InputError, match=words):
            verify(**arguments)  # type: ignore[arg-type]
    (stages.rank(0) / "duovolt.json").unlink()
    with pytest.raises(InputError, match="unfinished"):
        verify(ranks=stages.ranks)


def test_command_line(stages: Stages, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--converted", str(stages.converted), "--ranks", str(stages.ranks)]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21 and lines[-1] == "20 of 20 proofs hold"
    assert all(line.startswith("proved ") for line in lines[:-1])
    edit_tensor(stages.rank(1), Q_PROJ, flip(0))
    assert main([*arguments, "--json", str(tmp_path / "report.json"), "--quiet"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and Q_PROJ in captured.err and "index [128, 0]" in captured.err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] is False
    assert {p["name"] for p in report["proofs"] if p["status"] == "failed"} == {
        "rank-1-of-2: bytes of files and tensors",
        "converted -> ranks: words",
    }
    assert main(["verify"]) == 2
