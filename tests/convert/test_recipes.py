"""Recipes: rules by role and by name, the built-in ones counted, quantisers by name, casts within range."""

import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings import nvfp4, plain
from duovolt.checkpoint.encodings.weights import canonical, read_weight
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.manifest import read_manifest
from duovolt.convert.pipeline import convert
from duovolt.convert.quantisers import compressed_tensors
from duovolt.convert.recipe import Recipe, load_recipe
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory
from duovolt.perf.shapes import configuration

from .conftest import FIXTURE, rewrite

Command = Callable[..., subprocess.CompletedProcess[str]]
HEAD = 'name = "mine"\nlayout = "v100"\nmax_shard_bytes = 1000000000\n'
EMBED = "model.language_model.embed_tokens.weight"


def recipe(tmp_path: Path, *rules: str, head: str = HEAD) -> Recipe:
    path = tmp_path / "mine.toml"
    path.write_text(head + "".join(f"[[rules]]\n{rule}\n" for rule in rules))
    return load_recipe(str(path))


def encodings(found: Recipe) -> dict[str, str | None]:
    return found.encodings(ModelConfig.read(FIXTURE))


# The fixture: 3 Gated DeltaNet layers (3 projections each), 1 attention layer (4), 4 MLPs (3), a head, 8 MTP matrices.
@pytest.mark.parametrize(
    "name, counts",
    [
        ("v100", {"nvfp4": 12, "fp8_e4m3": 22}),
        ("v100-fp8", {"fp8_e4m3": 34}),
        ("v100-nvfp4", {"nvfp4": 26, "fp8_e4m3": 8}),
        ("bf16", {}),
    ],
)
def test_built_in_recipes(name: str, counts: dict[str, int]) -> None:
    chosen = encodings(load_recipe(name))
    assert Counter(filter(None, chosen.values())) == counts
    specs = inventory(ModelConfig.read(FIXTURE))
    assert chosen.keys() == specs.keys()
    kept = {spec.role for spec in specs.values() if chosen[spec.name] is None}
    assert {"embed_tokens", "input_layernorm", "linear_attn.A_log", "linear_attn.in_proj_a"} <= kept
    assert all(chosen[spec.name] is None for spec in specs.values() if spec.group == "vision")


def test_the_first_matching_rule_wins(tmp_path: Path) -> None:
    found = encodings(
        recipe(
            tmp_path,
            'names = ["*.layers.0.mlp.*", "*.layers.3.mlp.down_proj.weight"]\nencoding = "keep"',
            'group = "text"\nnames = ["*.layers.[12].*"]\nroles = ["mlp.up_proj"]\nencoding = "fp8_e4m3"',
            'roles = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]\nencoding = "nvfp4"',
        )
    )
    layer = "model.language_model.layers"
    assert found[f"{layer}.0.mlp.up_proj.weight"] is None
    assert found[f"{layer}.1.mlp.up_proj.weight"] == "fp8_e4m3"
    assert found[f"{layer}.1.mlp.gate_proj.weight"] == found[f"{layer}.3.mlp.up_proj.weight"] == "nvfp4"
    assert found[f"{layer}.3.mlp.down_proj.weight"] is None
    assert found["mtp.layers.0.mlp.up_proj.weight"] is None  # caught by the first pattern
    assert Counter(found.values())["nvfp4"] == 6


@pytest.mark.parametrize(
    "rules, words",
    [
        (['names = ["*.layers.9.*"]\nencoding = "nvfp4"'], ["layers.9", "matches no tensor"]),
        (['group = "vision"\nroles = ["mlp.up_proj"]\nencoding = "nvfp4"'], ["vision", "matches no tensor"]),
        (
            ['names = ["*mlp*"]\nencoding = "keep"', 'group = "text"\nroles = ["mlp.up_proj"]\nencoding = "nvfp4"'],
            ["earlier rules", "mlp.up_proj"],
        ),
        (['group = "text"\nencoding = "nvfp4"'], ["neither roles nor names"]),
        (['names = ["*A_log"]\nencoding = "nvfp4"'], ["A_log", "matrices only"]),
        (['names = ["*"]\nencoding = "int4"'], ["int4", "nvfp4", "keep"]),
        (['group = "mlp"\nnames = ["*"]\nencoding = "keep"'], ["'mlp'", "group", "is one of text, mtp, vision"]),
    ],
)
def test_rules_without_effect_or_sense_are_refused(rules: list[str], words: list[str], tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        encodings(recipe(tmp_path, *rules))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_what_a_recipe_does_not_say_is_as_in_the_built_in_ones(tmp_path: Path) -> None:
    path = tmp_path / "short.toml"
    path.write_text('name = "short"\nrules = []\n')
    short, built_in = load_recipe(str(path)), load_recipe("v100")
    assert (short.layout, short.max_shard_bytes) == (built_in.layout, built_in.max_shard_bytes) == ("v100", 1 << 31)
    path.write_text('name = "short"\nlayout = "volta"\nrules = []\n')
    with pytest.raises(InputError, match=r"'volta' - at `\$\.layout`, which is one of v100, canonical\.$"):
        load_recipe(str(path))


def test_an_unknown_quantiser_is_refused(source: Path, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "odd.toml"
    path.write_text(HEAD + 'quantiser = "gptq"\nrules = []\n')
    result = command("convert", source, tmp_path / "out", "--recipe", path)
    assert result.returncode == 2 and "'gptq'" in result.stderr and "search" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_modelopt_quantiser_writes_modelopts_words(tmp_path: Path, command: Command) -> None:
    """The peers' own export of the same model: every nvfp4 tensor it holds, word for word."""
    path = tmp_path / "peer.toml"
    text = Path(load_recipe.__code__.co_filename).parent / "recipes" / "v100-nvfp4.toml"
    path.write_text(text.read_text().replace('name = "v100-nvfp4"', 'name = "peer"\nquantiser = "modelopt"'))
    convert(FIXTURE, tmp_path / "ours", load_recipe(str(path)), 2, lambda count: None)
    ours, manifest = Checkpoint.open(tmp_path / "ours"), read_manifest(tmp_path / "ours")
    assert manifest.recipe["quantiser"] == "modelopt"
    theirs = load_file(FIXTURE.parent.parent / "tiny_qwen3_5_modelopt_nvfp4" / "checkpoint" / "model.safetensors")
    scales = [name for name in theirs if name.endswith(".weight_scale_2")]
    assert len(scales) == 25
    for name in scales:
        assert ours.read(name).item() == theirs[name].item(), name
        for stored in (name.removesuffix("_scale_2"), name.removesuffix("_2")):
            found = canonical(ours, stored, manifest.tensors[stored])
            np.testing.assert_array_equal(found, theirs[stored].view(torch.uint8).numpy(), stored)
    report = command("verify", "--source", FIXTURE, "--converted", tmp_path / "ours")
    assert report.returncode == 0, report.stdout + report.stderr


def test_a_searched_conversion_is_proved_and_its_errors_are_smaller(
    source: Path, tmp_path: Path, command: Command
) -> None:
    errors = {}
    for name in ("default", "search"):
        path = tmp_path / f"{name}.toml"
        path.write_text(HEAD + f'quantiser = "{name}"\n[[rules]]\nnames = ["*.layers.?.mlp.*"]\nencoding = "nvfp4"\n')
        convert(source, tmp_path / name, load_recipe(str(path)), 2, lambda count: None)
        report = command("verify", "--source", source, "--converted", tmp_path / name)
        assert report.returncode == 0, report.stdout + report.stderr
        before, after, manifest = (
            Checkpoint.open(source),
            Checkpoint.open(tmp_path / name),
            read_manifest(tmp_path / name),
        )
        weights = [n for n, r in manifest.tensors.items() if r.encoding == "nvfp4" and r.part == "words"]
        errors[name] = sum(
            float(np.square(read_weight(after, manifest, n) - plain.to_float32(before.read(n), "BF16")).sum())
            for n in weights
        )
    assert errors["search"] < 0.85 * errors["default"]


def test_the_compressed_tensors_quantiser_keeps_its_divisors(source: Path, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "peer.toml"
    text = (Path(load_recipe.__code__.co_filename).parent / "recipes" / "v100-nvfp4.toml").read_text()
    path.write_text(text.replace('name = "v100-nvfp4"', 'name = "peer"\nquantiser = "compressed-tensors"'))
    convert(source, tmp_path / "out", load_recipe(str(path)), 2, lambda count: None)
    before, after, manifest = (
        Checkpoint.open(source),
        Checkpoint.open(tmp_path / "out"),
        read_manifest(tmp_path / "out"),
    )
    layer = "model.language_model.layers.3"
    for name, partners in (("mlp.gate_proj", ["mlp.gate_proj", "mlp.up_proj"]), ("mlp.down_proj", ["mlp.down_proj"])):
        weight = plain.to_float32(before.read(f"{layer}.{name}.weight"), "BF16")
        others = [plain.to_float32(before.read(f"{layer}.{other}.weight"), "BF16") for other in partners]
        divisor = compressed_tensors.divisor(max(float(np.abs(other).max()) for other in others), "BF16")
        words, scales = compressed_tensors.nvfp4_words(weight, divisor, "BF16")
        stored = f"{layer}.{name}.weight"
        assert after.read(f"{stored}_global_scale").item() == divisor
        np.testing.assert_array_equal(canonical(after, stored, manifest.tensors[stored]), words)
        decoded = nvfp4.decode(words, nvfp4.factors(scales, divisor=divisor))
        np.testing.assert_array_equal(read_weight(after, manifest, stored), decoded)
    report = command("verify", "--source", source, "--converted", tmp_path / "out")
    assert report.returncode == 0, report.stdout + report.stderr
    plan = command("plan", source, "--recipe", path, "--json")
    assert plan.returncode == 0 and "nvfp4/divisor" in plan.stdout


def test_casts_round_once_and_are_proved(source: Path, tmp_path: Path, command: Command) -> None:
    half = recipe(
        tmp_path, 'names = ["*.A_log", "*embed_tokens*"]\nencoding = "fp16"', 'roles = ["norm"]\nencoding = "fp32"'
    )
    rewrite(source, EMBED, lambda words: np.where(words == words.flat[0], np.uint16(0x477F), words))  # 65280
    convert(source, tmp_path / "out", half, 2, lambda count: None)
    before, after, manifest = (
        Checkpoint.open(source),
        Checkpoint.open(tmp_path / "out"),
        read_manifest(tmp_path / "out"),
    )
    assert manifest.tensors[EMBED].encoding == "fp16" and after.tensors[EMBED].dtype == "F16"
    values = plain.to_float32(before.read(EMBED), "BF16")
    np.testing.assert_array_equal(after.read(EMBED), values.astype(np.float16))
    assert after.tensors["model.language_model.norm.weight"].dtype == "F32"
    report = command("verify", "--source", source, "--converted", tmp_path / "out")
    assert report.returncode == 0, report.stdout + report.stderr
    shards = command("shard", tmp_path / "out", tmp_path / "ranks", "--tp", "2")
    assert shards.returncode == 0, shards.stderr


def test_a_value_beyond_fp16_is_named_before_anything_is_written(
    source: Path, tmp_path: Path, command: Command
) -> None:
    """Q06 (a): a weight that FP16 cannot hold."""

    def grow(words: np.ndarray) -> np.ndarray:
        words[5, 7] = 0xC780  # -65536
        return words

    rewrite(source, EMBED, grow)
    recipe(tmp_path, 'names = ["*embed_tokens*"]\nencoding = "fp16"')
    result = command("convert", source, tmp_path / "out", "--recipe", tmp_path / "mine.toml")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    for word in (EMBED, "-65536", "[5, 7]", "65504"):
        assert word in result.stderr, result.stderr
    assert not (tmp_path / "out").exists()
    kept = command("convert", source, tmp_path / "out")
    assert kept.returncode == 0, kept.stderr


def test_modelopt_refuses_a_matrix_of_zeros_by_name(source: Path, tmp_path: Path, command: Command) -> None:
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    rewrite(source, name, np.zeros_like)
    path = tmp_path / "peer.toml"
    path.write_text(HEAD + 'quantiser = "modelopt"\n[[rules]]\nroles = ["mlp.down_proj"]\nencoding = "nvfp4"\n')
    result = command("convert", source, tmp_path / "out", "--recipe", path)
    assert result.returncode == 2 and name in result.stderr and "zeros" in result.stderr
    assert not (tmp_path / "out").exists()


def sparse_gigabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), sparse_gigabyte])
def test_what_never_ends_is_no_recipe(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    make(path)
    with pytest.raises(InputError, match=r"not a regular file|more than"):
        load_recipe(str(path))


@pytest.mark.parametrize("name", ["v100", "v100-fp8", "v100-nvfp4", "bf16"])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_shortened_model_has_no_full_attention_and_built_in_recipes_allow_it(name: str, layers: int) -> None:
    chosen = load_recipe(name).encodings(ModelConfig.from_dict(configuration("tiny", layers)))
    assert ("fp8_e4m3" in chosen.values()) == (name != "bf16")


@pytest.mark.parametrize(
    "rule", ['roles = ["self_attn.q_prj"]', 'names = ["*.self_attn.q_proj.*"]', 'roles = ["mlp.gate"]']
)
def test_misspelt_rules_stay_errors(rule: str, tmp_path: Path) -> None:
    group = 'group = "text"\nencoding = "fp8_e4m3"\n'
    config = ModelConfig.from_dict(configuration("tiny", 8 if "prj" in rule else 1))
    with pytest.raises(InputError, match="matches no tensor"):
        recipe(tmp_path, group + rule.replace("*.self", "model.language_model.*.self")).encodings(config)
