"""Faults that users of comparable tools reported, sections C (names and coverage) and Q (numbers): what was not yet proved.

Each row's id stands in the docstring of its tests, here and elsewhere; `test_every_row_has_a_test` keeps it so.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings import fp8, nvfp4
from duovolt.checkpoint.encodings.weights import read_weight
from duovolt.checkpoint.layouts import layout_named
from duovolt.checkpoint.manifest import read_manifest
from duovolt.cli.main import main
from duovolt.convert.pipeline import convert
from duovolt.convert.quantisers import QUANTISERS, compressed_tensors
from duovolt.convert.recipe import load_recipe
from duovolt.runtime.messages import TokenEvent
from duovolt.runtime.proxy.hub import SUSPICIOUS_DRAFTS, Hub
from duovolt.shard.split import shard
from duovolt.tests.support import exports
from duovolt.verify.proofs import verify

ROWS = [f"C{n:02}" for n in range(1, 12)] + [f"Q{n:02}" for n in range(1, 13)]
# What only a card can show, beside the part of the row that a processor can: kernels and the CUDA engine prove it.
ON_A_CARD = {
    "Q05": "the product of tiny scales inside a kernel",
    "Q06": "large activations through a linear layer; counters of non-finite values",
}
LAYER = "model.language_model.layers.0"
NORMS = {
    "trunk": f"{LAYER}.input_layernorm.weight",
    "MTP": "mtp.layers.0.input_layernorm.weight",
    "MTP's own": "mtp.pre_fc_norm_hidden.weight",
    "gated": f"{LAYER}.linear_attn.norm.weight",
}


def test_every_row_has_a_test() -> None:
    texts = [path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py") if path != Path(__file__)]
    here = Path(__file__).read_text().split("def test_every_row_has_a_test", 1)[1]
    named = {row for text in (*texts, here) for row in re.findall(r"\b[CQ]\d\d\b", text)}
    assert set(ROWS) <= named and ON_A_CARD.keys() <= set(ROWS)


def to(source: Path, target: Path, recipe: str = "v100") -> Path:
    convert(source, target, load_recipe(recipe), 2, lambda count: None)
    return target


def renamed(path: Path, rename: Callable[[str], str]) -> Path:
    exports.save(path, {rename(name): tensor for name, tensor in exports.tiny_tensors().items()})
    return path


RENAMES: dict[str, tuple[Callable[[str], str], list[str]]] = {
    "a prefix twice": (
        lambda n: n.replace("model.language_model.", "model.language_model.language_model."),
        ["37 of 92 tensors", "55 missing", "55 unknown", "model.language_model.language_model."],
    ),
    "every name": (lambda n: f"wrapped.{n}", ["0 of 77 tensors", "92 unknown", "wrapped.model."]),
    "one MTP tensor": (
        lambda n: n.replace("mtp.layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.qkv_proj"),
        ["91 of 92", "1 missing", "mtp.layers.0.self_attn.qkv_proj.weight"],
    ),
}


@pytest.mark.parametrize("case", RENAMES)
def test_names_that_no_known_prefix_explains_stop_every_stage(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C05, C10: how many matched, with examples; nothing is skipped, nothing is made anew."""
    rename, words = RENAMES[case]
    source = renamed(tmp_path / "source", rename)
    for command in (["plan", source], ["convert", source, tmp_path / "converted"]):
        assert main([str(word) for word in command]) == 2
        message = capsys.readouterr().err
        assert all(word in message for word in words) and message.count("\n") == 1, message
    assert not (tmp_path / "converted").exists()


def test_a_renamed_mtp_tensor_in_a_rank_folder_stops_verify_and_the_engine(tmp_path: Path) -> None:
    """C10: index and header agree on the new name; the closed inventory does not."""
    from duovolt.checkpoint.errors import DuovoltError
    from duovolt.runtime.engine.sources import open_source
    from duovolt.runtime.engine.weights import load_weights

    to(exports.TINY, tmp_path / "converted")
    shard(tmp_path / "converted", tmp_path / "ranks", 2)
    rank = tmp_path / "ranks" / "rank-1-of-2"
    old, new = "mtp.layers.0.self_attn.k_proj.weight", "mtp.layers.0.self_attn.k_proj.weighs"
    for path in (*rank.glob("*.safetensors"), rank / "model.safetensors.index.json"):
        path.write_bytes(path.read_bytes().replace(f'"{old}"'.encode(), f'"{new}"'.encode()))
    with pytest.raises(DuovoltError, match=re.escape(old)):
        load_weights(open_source(rank))
    failed = [f.tensor for proof in verify(None, None, tmp_path / "ranks").failed for f in proof.failures]
    assert {old, new} <= set(failed)


def test_drafts_that_never_stand_are_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    """C10: an acceptance of nothing is loud, and a single accepted draft keeps it quiet."""
    for accepted, warnings in ((0, 1), (1, 0)):
        hub = Hub(lanes=1, max_waiting=0)
        hub.relay([TokenEvent(9, [1], [], None, 3, accepted, 1)])
        for _ in range(SUSPICIOUS_DRAFTS):
            hub.relay([TokenEvent(9, [1], [], None, 3, 0, 1)])
        assert capsys.readouterr().err.count("none accepted") == warnings


def test_repetitive_text_is_drafted_well(tmp_path: Path) -> None:
    """C10: on a prompt that repeats itself more than one token a round is kept, through conversion and split."""
    from duovolt.runtime.engine.loading import EngineSettings, load_engine
    from duovolt.runtime.messages import GenerateRequest, SamplingParams
    from duovolt.runtime.parallel.base import SoloCollective

    converted = to(Path(__file__).parents[2] / "tiny" / "checkpoint", tmp_path / "converted")
    shard(converted, tmp_path / "ranks", 1)
    engine = load_engine(
        tmp_path / "ranks" / "rank-0-of-1", SoloCollective(), EngineSettings(max_context=160, drafts=3)
    )
    prompt = [700, 701, 702, 703] * 16
    engine.add(GenerateRequest(1, prompt, 48, [], True, SamplingParams(temperature=0.0)))
    rounds = tokens = 0
    while engine.has_work():
        for event in engine.step()[1]:
            rounds += bool(event.tokens)
            tokens += len(event.tokens)
    assert tokens == 48 and tokens / rounds > 1.2


def test_an_all_zero_tile_beside_a_living_one() -> None:
    """Q02: finite scales, words 0x00, exact zeros back: every quantiser, and tiles of 128 x 128."""
    weight = np.zeros((256, 256), np.float32)
    weight[:128, 128:] = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
    dead = weight == 0
    words, scale = compressed_tensors.fp8_blocks(weight, "BF16")
    assert np.isfinite(scale).all() and (scale > 0).all() and not words[dead].any()
    assert not fp8.DECODE[words][dead].any()
    for rules in QUANTISERS.values():
        amax = float(np.abs(weight).max())
        codes, blocks = rules.nvfp4_words(weight, rules.global_scale(amax, "BF16"), "BF16")
        assert not fp8.has_nan(blocks) and blocks.all() and not nvfp4.unpack(codes)[dead].any()
        rows = rules.row_scales(np.abs(weight).max(axis=1), "BF16")
        assert np.isfinite(rows).all() and (rows > 0).all() and not rules.fp8_words(weight, rows, "BF16")[dead].any()


def test_negative_zeros_keep_their_bits_and_ours_are_positive(tmp_path: Path) -> None:
    """Q04: 0x80 and nibble 8 through repack, split and join; what we quantise writes +0 everywhere."""
    exports.export(tmp_path / "source", "ct mixed with late fp8 and KV scales")
    source = tmp_path / "source"
    for path in source.glob("layers-*.safetensors"):
        tensors = load_file(path)
        for tensor in tensors.values():
            if tensor.dtype == torch.uint8:
                tensor.fill_(0x88)
            elif tensor.dtype == torch.float8_e4m3fn and tensor.shape[1] >= 64:
                tensor.view(torch.uint8).fill_(0x80)
        save_file(tensors, path)
    converted = to(source, tmp_path / "converted")
    shard(converted, tmp_path / "ranks", 2)
    assert verify(source, converted, tmp_path / "ranks").ok
    manifest, checkpoint = read_manifest(converted), Checkpoint.open(converted)
    seen = set()
    for name, record in manifest.tensors.items():
        if record.part == "words" and ".layers." in name and "mtp" not in name:
            tile = layout_named(record.layout)
            words = checkpoint.read(name)
            words = words if tile is None else tile.invert(words)
            seen.add((record.dtype, *np.unique(words).tolist()))
            values = read_weight(checkpoint, manifest, record.weight)
            assert not values.any() and np.signbit(values).all()
    assert seen == {("U8", 0x88), ("F8_E4M3", 0x80)}
    minus = np.full((2, 32), -0.0, np.float32)
    minus[0, 0], minus[1, 1] = 1, -1e-30  # a negative so small that it rounds to zero
    for name in ("default", "search"):
        rules = QUANTISERS[name]
        codes, _ = rules.nvfp4_words(minus, rules.global_scale(1.0, "F32"), "F32")
        assert set(nvfp4.unpack(codes).reshape(-1)[1:]) == {0}
        words = rules.fp8_words(minus, np.ones(2, np.float32), "F32")
        assert set(words.reshape(-1)[1:]) == {0}


def test_norms_are_stored_as_they_are(tmp_path: Path) -> None:
    """Q07: no +1 is folded in by any stage, for trunk, MTP and the gated norm alike, nor by a second conversion."""
    tensors = exports.tiny_tensors()
    for name in NORMS.values():
        tensors[name] = torch.full_like(tensors[name], 2.0**-12)
    exports.save(tmp_path / "source", tensors)
    converted = to(tmp_path / "source", tmp_path / "converted")
    assert main(["dequantize", str(converted), str(tmp_path / "plain"), "--quiet"]) == 0
    again = to(tmp_path / "plain", tmp_path / "again")
    shard(converted, tmp_path / "ranks", 2)
    for place in (converted, again, tmp_path / "ranks" / "rank-0-of-2", tmp_path / "ranks" / "rank-1-of-2"):
        for name in NORMS.values():
            assert set(Checkpoint.open(place).read(name).tolist()) == {0x3980}, f"{place} {name}"  # BF16 of 2^-12


def test_element_zero_is_the_low_nibble_through_every_stage(tmp_path: Path) -> None:
    """Q09: codes 0 to 15 in a row, from both producers, which agree on the order."""
    for export, module, words in (("ct nvfp4", "weight_packed", 0), ("modelopt nvfp4", "weight", 1)):
        source = tmp_path / f"source-{words}"
        exports.export(source, export)
        name, path = f"{LAYER}.mlp.up_proj", source / "layers-0.safetensors"
        tensors = load_file(path)
        row = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
        packed = tensors[f"{name}.{module}"]
        packed.copy_(row.repeat(packed.shape[0], packed.shape[1] // 8))
        tensors[f"{name}.weight_scale"].view(torch.uint8).fill_(0x38)  # 1.0
        key = "weight_global_scale" if words == 0 else "weight_scale_2"
        tensors[f"{name}.{key}"].fill_(1.0)
        save_file(tensors, path)
        converted = to(source, tmp_path / f"converted-{words}")
        shard(converted, tmp_path / f"ranks-{words}", 2)
        wanted = np.tile(np.concatenate([nvfp4.VALUES, -nvfp4.VALUES]), packed.shape[1] // 8)
        for place in (converted, tmp_path / f"ranks-{words}" / "rank-1-of-2"):
            found = read_weight(Checkpoint.open(place), read_manifest(place), f"{name}.weight")
            assert (found == wanted).all()


def test_the_stage_fed_its_own_output_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Q11: convert of converted or rank directories, shard of ranks: no transform is ever applied twice."""
    converted = to(exports.TINY, tmp_path / "converted")
    shard(converted, tmp_path / "ranks", 2)
    rank = tmp_path / "ranks" / "rank-0-of-2"
    commands = {
        "already converted": [["convert", converted, tmp_path / "x"], ["convert", rank, tmp_path / "x"]],
        "already split": [["shard", rank, tmp_path / "x", "--tp", "2"]],
    }
    for words, runs in commands.items():
        for command in runs:
            assert main([str(word) for word in command]) == 2
            assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_plain_copies_are_byte_identical_whatever_the_words(tmp_path: Path) -> None:
    """Q12: every finite BF16 word, subnormals and -0 among them, through convert, split and join; in norms of all parts."""
    finite = np.arange(1 << 16, dtype=np.uint16)
    finite = finite[(finite & 0x7F80) != 0x7F80]
    tensors = exports.tiny_tensors()
    name = "model.language_model.embed_tokens.weight"
    words = np.resize(finite, tensors[name].shape)
    words[0, :3] = 0x0001, 0x8000, 0x8001
    tensors[name] = torch.from_numpy(words.copy()).view(torch.bfloat16)
    exports.save(tmp_path / "source", tensors)
    converted = to(tmp_path / "source", tmp_path / "converted", "bf16")
    shard(converted, tmp_path / "ranks", 2)
    for place in (converted, tmp_path / "ranks" / "rank-1-of-2"):
        np.testing.assert_array_equal(Checkpoint.open(place).read(name), words)
    assert verify(tmp_path / "source", converted, tmp_path / "ranks").ok
    assert json.loads((converted / "duovolt.json").read_text())["recipe"]["name"] == "bf16"
