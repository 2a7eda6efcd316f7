"""The draft head: which rows are chosen, that they are the head's in every encoding, and that verify would see it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings.weights import read_weight
from duovolt.checkpoint.manifest import DRAFT_HEAD, read_manifest
from duovolt.cli.main import main
from duovolt.convert.draft_head import gathered
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import DRAFT_IDS, HEAD
from duovolt.perf.shapes import configuration
from duovolt.perf.synth import Specimen, write_source
from duovolt.shard.split import shard
from duovolt.tests.support.damage import edit_manifest, edit_tensor, refit
from duovolt.verify.proofs import verify

ROWS = 1024


def recipe_file(place: Path, base: str = "v100", **keys: Any) -> Path:
    """A built-in recipe with more keys at its top, as a file."""
    text = (Path(__file__).parents[2] / "convert" / "recipes" / f"{base}.toml").read_text()
    place.mkdir(exist_ok=True)
    (place / "r.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) + text)
    return place / "r.toml"


def to(source: Path, target: Path, recipe: Path) -> None:
    convert(source, target, load_recipe(str(recipe)), 2, lambda count: None)


def ids_of(directory: Path) -> np.ndarray:
    return Checkpoint.open(directory).read(DRAFT_IDS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Releases of a model of four layers, by name; made once."""
    place = tmp_path_factory.mktemp("sources")

    def source(name: str) -> Path:
        if not (place / name).exists():
            config = configuration("narrow", 4)
            config["text_config"] |= {"hidden_size": 128, "intermediate_size": 256}
            config["vision_config"] = config["vision_config"] | {"out_hidden_size": 128, "depth": 1}
            release, _, tied = name.partition("+")
            if tied:
                config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
            write_source(place / name, Specimen(config, release, 0, sparse=False), 2, lambda count: None)
        return place / name

    return source


# source, recipe: the encoding of the draft head
FORMS = {
    ("bf16", "v100"): "fp8_e4m3",
    ("bf16", "v100-nvfp4"): "nvfp4",
    ("bf16", "bf16"): "bf16",
    ("bf16+tied", "bf16"): "bf16",
    ("nvfp4-ct", "v100"): "fp8_e4m3",
    ("qwen3.8-fp8", "v100"): "fp8_e4m3",
}


@pytest.mark.parametrize("source, base", FORMS)
def test_every_stage_carries_it(
    source: str, base: str, sources: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows equal the head's bit for bit, ranks have their share of rows and ids, verify and dequantize agree."""
    recipe = recipe_file(tmp_path / "recipe", base, draft_head=ROWS)
    to(sources(source), tmp_path / "c", recipe)
    to(sources(source), tmp_path / "plain", recipe_file(tmp_path / "without", base))
    manifest, checkpoint = read_manifest(tmp_path / "c"), Checkpoint.open(tmp_path / "c")
    assert manifest.recipe["draft_head"] == ROWS
    assert manifest.conversion_id != read_manifest(tmp_path / "plain").conversion_id
    assert {r.encoding for r in manifest.tensors.values() if r.weight == DRAFT_HEAD} == {FORMS[source, base]}
    ids = ids_of(tmp_path / "c")
    assert len(ids) == ROWS and (np.diff(ids) > 0).all()
    head = "model.language_model.embed_tokens.weight" if source.endswith("tied") else HEAD
    whole, kept = read_weight(checkpoint, manifest, head), read_weight(checkpoint, manifest, DRAFT_HEAD)
    assert np.array_equal(whole[ids].view(np.uint32), kept.view(np.uint32))
    for tp in (1, 2, 4):
        shard(tmp_path / "c", tmp_path / f"r{tp}", tp)
        shares = [ids_of(tmp_path / f"r{tp}" / f"rank-{rank}-of-{tp}") for rank in range(tp)]
        assert [len(share) for share in shares] == [ROWS // tp] * tp and np.array_equal(np.concatenate(shares), ids)
    report = verify(sources(source), tmp_path / "c", tmp_path / "r2")
    assert not report.failed and "converted: draft head" in {proof.name for proof in report.proofs}
    alone = verify(None, None, tmp_path / "r4")
    assert not alone.failed and "ranks: draft head" in {proof.name for proof in alone.proofs}
    for name in ("c", "plain"):
        assert main(["dequantize", str(tmp_path / name), str(tmp_path / f"{name}-decoded"), "--quiet"]) == 0
    decoded, other = (Checkpoint.open(tmp_path / f"{name}-decoded") for name in ("c", "plain"))
    assert decoded.tensors.keys() == other.tensors.keys()  # no other program knows a draft head
    capsys.readouterr()
    assert main(["plan", str(sources(source)), "--recipe", str(recipe), "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    made = {tensor["name"]: tensor["made"] for tensor in tensors if tensor["weight"] in (DRAFT_HEAD, DRAFT_IDS)}
    assert made[DRAFT_HEAD] == "chosen rows of the head" and made[DRAFT_IDS] == "ids of the chosen rows"
    assert main(["inspect", str(tmp_path / "c"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "unknown" not in facts["by_part_of_the_model"] and facts["draft_head"] == ROWS
    assert main(["inspect", str(tmp_path / "c")]) == 0
    assert f"draft head of {ROWS:,} rows" in capsys.readouterr().out


def test_a_head_in_tiles_keeps_its_scales(tmp_path: Path) -> None:
    """A block FP8 head: a scale for each chosen row, since neighbours in the draft head come from several tiles."""
    config = configuration("narrow", 4)
    source, target = tmp_path / "s", tmp_path / "c"
    write_source(source, Specimen(config, "qwen3.8-fp8", 0, sparse=False), 2, lambda count: None)
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "outside.safetensors")
    rows, columns = tensors[HEAD].shape
    generator = torch.Generator().manual_seed(0)
    tensors["lm_head.weight_scale_inv"] = torch.rand(rows // 128, columns // 128, generator=generator).bfloat16() + 1
    tensors[HEAD] = (tensors[HEAD].float() * 100).to(torch.float8_e4m3fn)
    save_file(tensors, source / "outside.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight_scale_inv"] = "outside.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    stated = json.loads((source / "config.json").read_text())
    stated["quantization_config"]["modules_to_not_convert"].remove("lm_head")
    (source / "config.json").write_text(json.dumps(stated))
    to(source, target, recipe_file(tmp_path / "r", draft_head=ROWS))
    shard(target, tmp_path / "ranks", 2)
    manifest = read_manifest(target)
    assert manifest.tensors[HEAD].encoding == "fp8_e4m3/128x128"
    assert manifest.tensors[DRAFT_HEAD].encoding == "fp8_e4m3/1x128"
    checkpoint, ids = Checkpoint.open(target), ids_of(target)
    whole, kept = (read_weight(checkpoint, manifest, name) for name in (HEAD, DRAFT_HEAD))
    assert np.array_equal(whole[ids].view(np.uint32), kept.view(np.uint32))
    assert not verify(source, target, tmp_path / "ranks").failed


def test_merge_order_decides_and_special_tokens_are_always_there(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    tokenizer = {
        "added_tokens": [{"id": 4000, "content": "<end>"}, {"id": 4090, "content": "<pad>"}],
        "model": {
            "vocab": {"a": 7, "b": 9, "ab": 300, "abb": 12, "ba": 5, "aab": 2000},
            "merges": ["a b", ["ab", "b"], "a ab", "b a"],
        },
    }
    source = tmp_path / "s"
    shutil.copytree(sources("bf16"), source)
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    # two special tokens, two letters, then merges in their order: ab, abb, aab, ba
    for rows, wanted in ((4, {7, 9}), (5, {7, 9, 300}), (6, {7, 9, 300, 12}), (8, {7, 9, 300, 12, 2000, 5})):
        to(source, tmp_path / f"c{rows}", recipe_file(tmp_path / "r", draft_head=rows))
        assert set(ids_of(tmp_path / f"c{rows}").tolist()) == {4000, 4090} | wanted
    assert read_manifest(tmp_path / "c4").tensors[DRAFT_IDS].sources[0].name == "tokenizer.json"


def test_a_frequency_list_decides(sources: Callable[[str], Path], tmp_path: Path) -> None:
    """The list lies beside the recipe; its path is no part of the conversion id, what it chooses is."""
    found = []
    for name, order in (("one", "77 900\n1500 12\n"), ("two", "77\n1500\n"), ("three", "78\n1500\n")):
        recipe = recipe_file(tmp_path / name, draft_head=40, draft_head_tokens="frequent.txt")
        (tmp_path / name / "frequent.txt").write_text(order)
        to(sources("bf16"), tmp_path / f"c-{name}", recipe)
        found.append((read_manifest(tmp_path / f"c-{name}"), set(ids_of(tmp_path / f"c-{name}").tolist())))
    assert {77, 1500} <= found[0][1] and found[0][1] == found[1][1] != found[2][1]
    assert found[0][0].conversion_id == found[1][0].conversion_id != found[2][0].conversion_id
    assert found[0][0].tensors[DRAFT_IDS].sources[0].name == "draft_head_tokens"
    special = json.loads((sources("bf16") / "tokenizer.json").read_text())["added_tokens"]
    assert {token["id"] for token in special} <= found[0][1]


REFUSED: dict[str, tuple[dict[str, Any], str, str | None, str]] = {
    "no MTP layer": ({"draft_head": 64}, "nvfp4-modelopt", None, "no MTP layer"),
    "more than there are": ({"draft_head": 4000}, "bf16", None, "give a number between"),
    "fewer than special ones": ({"draft_head": 2}, "bf16", None, "give a number between"),
    "negative": ({"draft_head": -1}, "bf16", None, "number of rows"),
    "a list without a number": ({"draft_head_tokens": "f.txt"}, "bf16", None, "number of rows"),
    "no list": ({"draft_head": 64, "draft_head_tokens": "none.txt"}, "bf16", None, "No such file"),
    "no id": ({"draft_head": 64, "draft_head_tokens": "f.txt"}, "bf16", "12\nthe\n", "line 2 is 'the'"),
    "beyond the head": ({"draft_head": 64, "draft_head_tokens": "f.txt"}, "bf16", "4096\n", "beyond the 4096 rows"),
    "not text": ({"draft_head": 64, "draft_head_tokens": "f.txt"}, "bf16", "\x00", "line 1"),
    "an empty list": ({"draft_head": 64, "draft_head_tokens": "f.txt"}, "bf16", "", "an empty list"),
    "a name that is none": ({"draft_head": 64, "draft_head_tokens": "a\0b"}, "bf16", None, "null"),
    "a device": ({"draft_head": 64, "draft_head_tokens": "/dev/zero"}, "bf16", None, "not a regular file"),
    "a pipe": ({"draft_head": 64, "draft_head_tokens": "pipe"}, "bf16", None, "not a regular file"),
    "no number": ({"draft_head": "many"}, "bf16", None, "draft_head"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input(
    case: str, sources: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, source, order, words = REFUSED[case]
    recipe = recipe_file(tmp_path / "r", **keys)
    if order is not None:
        (recipe.parent / "f.txt").write_text(order)
    os.mkfifo(recipe.parent / "pipe")
    for command in (["convert", str(sources(source)), str(tmp_path / "c")], ["plan", str(sources(source))]):
        assert main([*command, "--recipe", str(recipe), "--quiet"]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    "content", ["[]", '{"model": {}}', '{"model": {"vocab": {"a": "b"}}}', '{"model": {"vocab": 3}}']
)
def test_a_tokenizer_without_a_vocabulary(
    content: str, sources: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "s"
    shutil.copytree(sources("bf16"), source)
    (source / "tokenizer.json").write_text(content)
    recipe = str(recipe_file(tmp_path / "r", draft_head=64))
    assert main(["convert", str(source), str(tmp_path / "c"), "--recipe", recipe]) == 2
    assert "no model.vocab and model.merges" in capsys.readouterr().err
    (source / "tokenizer.json").unlink()
    assert main(["convert", str(source), str(tmp_path / "c"), "--recipe", recipe]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


def _swap(data: np.ndarray) -> None:
    ids = data.view(np.int32)
    ids[3], ids[4] = ids[4], ids[3]


DAMAGES: dict[str, tuple[str, Callable[[np.ndarray], Any], str]] = {
    "another word": (DRAFT_HEAD, lambda data: data.__setitem__(9, data[9] ^ 1), "differs from the head's"),
    "another scale": (
        "draft_head.weight_scale", lambda data: data.__setitem__(1, data[1] ^ 1), "differs from the head's",
    ),
    "ids out of order": (DRAFT_IDS, _swap, "do not ascend"),
    "an id beyond": (DRAFT_IDS, lambda data: data.view(np.int32).__setitem__(ROWS - 1, 4096), "no row of the head"),
    "a special token left out": (
        DRAFT_IDS, lambda data: data.view(np.int32).__setitem__(slice(None), np.arange(500, 500 + ROWS)), "special",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_verify_finds_damage_that_every_digest_fits(case: str, sources: Callable[[str], Path], tmp_path: Path) -> None:
    tensor, change, words = DAMAGES[case]
    to(sources("bf16"), tmp_path / "c", recipe_file(tmp_path / "r", draft_head=ROWS))
    edit_tensor(tmp_path / "c", tensor, change)
    refit(tmp_path / "c")
    (failed,) = verify(None, tmp_path / "c").failed
    assert failed.name == "converted: draft head" and words in str(failed.failures[0])


def test_ids_that_cannot_be_read_fail_the_proof_and_nothing_else(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    to(sources("bf16"), tmp_path / "c", recipe_file(tmp_path / "r", draft_head=ROWS))
    edit_manifest(tmp_path / "c", lambda m: m["tensors"].pop(DRAFT_IDS))
    proofs = {proof.name: proof for proof in verify(None, tmp_path / "c").failed}
    assert "cannot be compared" in str(proofs["converted: draft head"].failures[0])


def test_gathering_rows_keeps_whole_tile_rows() -> None:
    matrix = np.arange(1000 * 4).reshape(1000, 4)
    bands = [matrix[first : first + 96] for first in range(0, 1000, 96)]
    for rows in (np.arange(0, 1000, 3), np.array([999]), np.array([0, 0, 5, 5, 999]), np.arange(1000)):
        found = list(gathered(iter(bands), rows))
        assert np.array_equal(np.concatenate(found), matrix[rows])
        assert all(len(band) % 32 == 0 and len(band) for band in found[:-1])


def test_other_recipes_know_nothing_of_it(sources: Callable[[str], Path], tmp_path: Path) -> None:
    to(sources("bf16"), tmp_path / "c", recipe_file(tmp_path / "r"))
    assert "draft_head" not in read_manifest(tmp_path / "c").recipe
    config = ModelConfig.of_stage(
        json.loads((tmp_path / "c" / "config.json").read_text()), read_manifest(tmp_path / "c"), ""
    )
    assert config.text.draft_rows == 0


def test_the_27b_with_half_its_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From headers alone: 131,072 of 248,320 rows, 65,536 a card, fp8 with a scale a row, and their ids."""
    source, recipe = tmp_path / "source", recipe_file(tmp_path / "r", draft_head=131072)
    assert main(["synth", str(source), "--config", "qwen3.8-27b", "--fill", "sparse", "--quiet"]) == 0
    vocabulary = {f"t{number}": number for number in range(248044)}
    special = [{"id": number, "content": f"<{number}>"} for number in range(248044, 248077)]
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": special, "model": {"vocab": vocabulary}}))
    found = {}
    for name, path in (("with", str(recipe)), ("without", "v100")):
        assert main(["plan", str(source), "--recipe", path, "--tp", "2", "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    added = [
        here["bytes"] - there["bytes"]
        for here, there in zip(found["with"]["ranks"], found["without"]["ranks"], strict=True)
    ]
    assert added == [65536 * (5120 + 4 + 4)] * 2
    assert found["with"]["ranks"][1]["parts"]["draft_head.ids"] == {"axis": 0, "ranges": [[65536, 131072]]}
    assert main(["plan", str(source), "--recipe", str(recipe), "--tp", "2"]) == 0
    assert "draft_head" in capsys.readouterr().out
