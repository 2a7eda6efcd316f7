"""Every word lands on the rank that the table says, for every rule, encoding and layout; nothing is decoded on the way."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings import part_of
from duovolt.checkpoint.encodings.weights import canonical, read_weight
from duovolt.checkpoint.layouts import LAYOUTS
from duovolt.checkpoint.manifest import read_manifest
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory
from duovolt.model.partition import TABLE
from duovolt.shard.split import shard
from duovolt.tests.support import maker
from duovolt.tests.support.heads import rank_part


def follows_its_weight(encoding: str, part: str, role: str) -> bool:
    """True if a stored part has an extent along the axis that its weight is cut on."""
    rule = TABLE.get(role)
    described = part_of(encoding, part)
    return rule is not None and rule.axis is not None and (described is None or described.unit[rule.axis] is not None)


def check_ranks(converted: Path, ranks: Path, tp: int) -> int:
    """Compare every stored tensor of every rank with the oracle; how many were compared."""
    whole, manifest = Checkpoint.open(converted), read_manifest(converted)
    config = ModelConfig.read(converted)
    specs, compared = inventory(config), 0
    for rank in range(tp):
        directory = ranks / f"rank-{rank}-of-{tp}"
        mine, records = Checkpoint.open(directory), read_manifest(directory)
        assert records.tensors.keys() == manifest.tensors.keys()
        for name, record in records.tensors.items():
            spec = specs[record.weight]
            words = canonical(whole, name, manifest.tensors[name])
            role = spec.role if follows_its_weight(record.encoding, record.part, spec.role) else ""
            expected = rank_part(role, words, config.text, tp, rank, spec.group)
            np.testing.assert_array_equal(canonical(mine, name, record), expected, err_msg=f"{name} on rank {rank}")
            assert record.split is not None and record.split.whole.digest == manifest.tensors[name].digest
            compared += 1
    return compared


@pytest.mark.parametrize("words", [maker.row_marker, maker.column_marker, maker.random_words])
@pytest.mark.parametrize("layout", ["v100", "canonical"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_rule_every_layout(tmp_path: Path, words: maker.Words, layout: str, tp: int) -> None:
    """S02, S04: sections and roles decide, on both axes."""
    maker.converted(tmp_path / "converted", maker.config(), words=words, layout=layout, max_shard_bytes=50_000)
    shard(tmp_path / "converted", tmp_path / "ranks", tp)
    assert check_ranks(tmp_path / "converted", tmp_path / "ranks", tp) > 100 * tp


@pytest.mark.parametrize("encoding", ["bf16", "fp32", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("tp", [2, 8])
def test_every_encoding_for_every_matrix(tmp_path: Path, encoding: str, tp: int) -> None:
    shapes: dict[str, Any] = {
        "num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
        "intermediate_size": 256, "hidden_size": 64, "vocab_size": 256,
    }  # fmt: skip
    maker.converted(
        tmp_path / "converted", maker.config(**shapes), words=maker.random_words,
        encoding=lambda spec: encoding if len(spec.shape) == 2 and spec.group != "vision" else "bf16",
    )  # fmt: skip
    shard(tmp_path / "converted", tmp_path / "ranks", tp)
    assert check_ranks(tmp_path / "converted", tmp_path / "ranks", tp) > 100


@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    heads=st.integers(1, 3),
    kv=st.sampled_from([1, 2, 4, 8]),
    key_heads=st.integers(1, 2),
    ratio=st.integers(1, 3),
    dim=st.sampled_from([16, 32, 48]),
    inner=st.integers(1, 4),
    layout=st.sampled_from(["v100", "canonical"]),
    words=st.sampled_from([maker.row_marker, maker.column_marker, maker.random_words]),
)
@settings(max_examples=15, deadline=None)
def test_any_shape_any_width(
    tp: int, heads: int, kv: int, key_heads: int, ratio: int, dim: int, inner: int, layout: str, words: maker.Words
) -> None:
    """kv heads may be fewer than ranks (then replicated); tiles may or may not lie on the cuts."""
    config = maker.config(
        num_hidden_layers=2, full_attention_interval=2, num_attention_heads=8 * heads, num_key_value_heads=kv,
        head_dim=dim, linear_num_key_heads=tp * key_heads, linear_num_value_heads=tp * key_heads * ratio,
        linear_key_head_dim=dim, linear_value_head_dim=dim, intermediate_size=16 * tp * inner, vocab_size=8 * tp * inner,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        maker.converted(path / "converted", config, words=words, layout=layout)
        shard(path / "converted", path / "ranks", tp)
        assert check_ranks(path / "converted", path / "ranks", tp) > 50


def test_decoding_a_part_is_the_part_of_the_decoding(tmp_path: Path) -> None:
    """S03: scales follow their weight on the right axis, so each rank decodes to the slice of the whole, bit for bit."""
    maker.converted(tmp_path / "converted", maker.config())
    shard(tmp_path / "converted", tmp_path / "ranks", 2)
    whole, manifest = Checkpoint.open(tmp_path / "converted"), read_manifest(tmp_path / "converted")
    config = ModelConfig.read(tmp_path / "converted")
    for rank in range(2):
        directory = tmp_path / "ranks" / f"rank-{rank}-of-2"
        mine, records = Checkpoint.open(directory), read_manifest(directory)
        for spec in inventory(config).values():
            expected = rank_part(spec.role, read_weight(whole, manifest, spec.name), config.text, 2, rank, spec.group)
            np.testing.assert_array_equal(read_weight(mine, records, spec.name), expected)


def test_layouts_commute_with_the_split(tmp_path: Path) -> None:
    """layout(split(x)) == split(layout(x)): ranks of the tiled directory hold the tiles of the canonical ranks."""
    for layout in ("v100", "canonical"):
        maker.converted(tmp_path / layout, maker.config(), layout=layout)
        shard(tmp_path / layout, tmp_path / f"ranks-{layout}", 2)
    tiled_tensors = 0
    for rank in range(2):
        tiled, plain = (tmp_path / f"ranks-{layout}" / f"rank-{rank}-of-2" for layout in ("v100", "canonical"))
        ours, theirs = Checkpoint.open(tiled), Checkpoint.open(plain)
        for name, record in read_manifest(tiled).tensors.items():
            if record.layout == "canonical":
                continue
            tiled_tensors += 1
            np.testing.assert_array_equal(ours.read(name), LAYOUTS[record.layout].apply(theirs.read(name)))
    assert tiled_tensors >= 2 * 40


def test_a_cut_inside_a_tile_is_stored_row_by_row(tmp_path: Path) -> None:
    """S01: four heads of 16 rows over two ranks leave 32 rows, but q, k and v sections of half a tile."""
    config = maker.config(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16
    )
    maker.converted(tmp_path / "converted", config)
    report = shard(tmp_path / "converted", tmp_path / "ranks", 2)
    qkv = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    assert qkv in report.canonical
    record = read_manifest(tmp_path / "ranks" / "rank-0-of-2").tensors[qkv]
    assert (record.layout, record.shape, record.split and record.split.whole.layout) == (
        "canonical",
        [64, 64],
        "v100-fp8",
    )
    assert check_ranks(tmp_path / "converted", tmp_path / "ranks", 2) > 100
