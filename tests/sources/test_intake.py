"""What a source may look like and still be the same model: names, parts, tied heads, strangers beside the shards."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings.weights import read_weight
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.manifest import read_manifest
from duovolt.cli.main import main
from duovolt.convert.pipeline import ConversionReport, convert
from duovolt.convert.recipe import load_recipe
from duovolt.model.names import family_name
from duovolt.shard.split import shard
from duovolt.tests.support import exports
from duovolt.tests.support.forks import Commands
from duovolt.verify.proofs import verify

MODELOPT = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5_modelopt_nvfp4" / "checkpoint"
HEAD, EMBED = "lm_head.weight", "model.language_model.embed_tokens.weight"


def to(source: Path, target: Path, **options: Path) -> ConversionReport:
    return convert(source, target, load_recipe("v100"), 2, lambda count: None, **options)


def plain(path: Path, change: Callable[[exports.Tensors], object], **config: object) -> Path:
    """The tiny BF16 model with its tensors changed, and keys of text_config."""
    tensors = exports.tiny_tensors()
    change(tensors)
    exports.save(path, tensors)
    value = json.loads((path / "config.json").read_text())
    value["text_config"] |= config
    (path / "config.json").write_text(json.dumps(value))
    return path


@pytest.mark.parametrize("name", exports.EXPORTS)
def test_every_source_tensor_is_used_or_left_out_by_name(name: str, tmp_path: Path) -> None:
    """C08, C09: output and declared drops are the source exactly, counted by part."""
    exports.export(tmp_path / "source", name)
    manifest = to(tmp_path / "source", tmp_path / "converted").manifest
    used = [ref.name for record in manifest.tensors.values() for ref in record.sources]
    dropped = set(manifest.source.dropped)
    assert set(used) | dropped == set(Checkpoint.open(tmp_path / "source").tensors) and not dropped & set(used)
    assert all(
        name.endswith(("input_scale", "activation_scale", "input_global_scale", "k_scale", "v_scale"))
        for name in dropped
    )
    assert manifest.provenance["weights"] == {"text": 56, "mtp": 15, "vision": 21}


PREFIXES = {
    "as other servers order it": [
        ("model.language_model.", "language_model.model."),
        ("lm_head", "language_model.lm_head"),
    ],
    "vision without model": [("model.visual.", "visual.")],
    "vision tower": [("model.visual.", "vision_tower.")],
    "mtp below model": [("mtp.", "model.mtp.")],
    "text alone": [("model.language_model.", "model.")],
}


@pytest.mark.parametrize("case", PREFIXES)
def test_known_prefixes_map_one_to_one(case: str, tmp_path: Path) -> None:
    """C05, C08: every known spelling, of text, MTP and vision, gives the same digests."""

    def renamed(tensors: exports.Tensors) -> None:
        for name in list(tensors):
            for kept, found in PREFIXES[case]:
                if name.startswith(kept):
                    tensors[found + name.removeprefix(kept)] = tensors.pop(name)
                    break

    source = plain(tmp_path / "source", renamed)
    assert set(Checkpoint.open(source).tensors) != set(exports.tiny_tensors())
    manifest = to(source, tmp_path / "converted").manifest
    usual = to(plain(tmp_path / "usual", lambda tensors: None), tmp_path / "usual-converted").manifest
    assert {name: record.digest for name, record in manifest.tensors.items()} == {
        name: record.digest for name, record in usual.tensors.items()
    }
    assert verify(source, tmp_path / "converted").ok


def test_an_unknown_prefix_stays_unknown() -> None:
    odd = "model.language_model.language_model.layers.0.mlp.up_proj.weight"
    assert family_name(odd) == odd and family_name("transformer.h.0.weight") == "transformer.h.0.weight"


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(tmp_path: Path) -> None:
    """C04: absent, equal, and not equal."""

    def absent(tensors: exports.Tensors) -> None:
        tensors.pop(HEAD)

    def equal(tensors: exports.Tensors) -> None:
        tensors[HEAD] = tensors[EMBED].clone()

    def other(tensors: exports.Tensors) -> None:
        tensors[HEAD] = tensors[EMBED].clone()
        tensors[HEAD][7, 3] += 1

    def other_type(tensors: exports.Tensors) -> None:
        tensors[HEAD] = tensors[EMBED].float()

    first = to(plain(tmp_path / "absent", absent, tie_word_embeddings=True), tmp_path / "a").manifest
    second = to(plain(tmp_path / "equal", equal, tie_word_embeddings=True), tmp_path / "b").manifest
    assert HEAD not in first.tensors and HEAD not in second.tensors
    assert not first.source.dropped and "equal to the embedding" in second.source.dropped[HEAD]
    assert verify(tmp_path / "equal", tmp_path / "b").ok
    for name, change in (("other", other), ("type", other_type)):
        source = plain(tmp_path / name, change, tie_word_embeddings=True)
        with pytest.raises(InputError, match="tie_word_embeddings is true, but"):
            to(source, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()


def test_verify_does_not_take_a_dropped_head_on_trust(tmp_path: Path) -> None:
    source = plain(tmp_path / "source", lambda t: t.__setitem__(HEAD, t[EMBED].clone()), tie_word_embeddings=True)
    to(source, tmp_path / "converted")
    path = source / "layers-outside.safetensors"
    raw = bytearray(path.read_bytes())
    entry = Checkpoint.open(source).tensors[HEAD]
    raw[entry.begin + 5] ^= 1
    path.write_bytes(raw)
    report = verify(source, tmp_path / "converted")
    assert [f.tensor for p in report.failed for f in p.failures if p.name.endswith("source bytes")] == [HEAD]


@pytest.mark.parametrize("case", ["has its own", "second lacks it too", "another model", "no layer declared", "itself"])
def test_a_second_source_that_makes_no_sense_is_refused(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, second, words = MODELOPT, exports.TINY, ""
    if case == "has its own":
        source, words = exports.TINY, "has its own MTP layer"
    elif case == "second lacks it too":
        second, words = MODELOPT, "has no mtp.* tensor either"
    elif case == "another model":
        second = plain(tmp_path / "second", lambda tensors: None, rms_norm_eps=1e-5)
        words = "another model"
    elif case == "no layer declared":
        without = [name for name in exports.tiny_tensors() if name.startswith("mtp")]
        source = plain(tmp_path / "s", lambda t: [t.pop(name) for name in without], mtp_num_hidden_layers=0)
        words = "has no MTP layer"
    else:
        second, words = tmp_path, "no such file"
    for command in (["convert", source, tmp_path / "converted"], ["plan", source]):
        assert main([*map(str, command), "--mtp-from", str(second)]) == 2
        message = capsys.readouterr().err
        assert words in message and message.count("\n") == 1, message
    assert not (tmp_path / "converted").exists()


def test_a_part_of_an_mtp_layer_is_not_taken_for_none(tmp_path: Path) -> None:
    source = plain(tmp_path / "source", lambda tensors: tensors.pop("mtp.fc.weight"))
    with pytest.raises(InputError, match=r"1 missing: mtp\.fc\.weight"):
        to(source, tmp_path / "converted")


def test_the_missing_layer_is_said_by_every_command_and_serves_without_drafts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["plan", MODELOPT], ["convert", MODELOPT, tmp_path / "converted"]):
        assert main([str(part) for part in command]) == 0
        assert "the MTP layer is missing" in capsys.readouterr().out
    from duovolt.runtime.engine import EngineSettings, load_engine
    from duovolt.runtime.parallel.base import SoloCollective

    engine = load_engine(tmp_path / "converted", SoloCollective(), EngineSettings(max_context=64))
    assert engine.executor.model.weights.mtp is None


def test_the_peers_logits(tmp_path: Path) -> None:
    """The engine on the repacked words gives the logits that the decoded weights give in transformers."""
    from safetensors.numpy import load_file

    recipe = msgspec.structs.replace(load_recipe("v100"), rules=[])
    convert(MODELOPT, tmp_path / "converted", recipe, 2, lambda count: None)
    assert main(["dequantize", str(MODELOPT), str(tmp_path / "plain"), "--dtype", "float32", "--quiet"]) == 0
    from transformers import Qwen3_5ForConditionalGeneration

    torch.set_num_threads(1)
    reference = load_file(MODELOPT.parent / "ref" / "reference.safetensors")
    model = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    ids = torch.from_numpy(reference["input_ids"]).reshape(1, -1)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0].numpy()
    np.testing.assert_allclose(logits, reference["prefill_logits"], atol=2e-4)
    manifest, converted = read_manifest(tmp_path / "converted"), Checkpoint.open(tmp_path / "converted")
    decoded = Checkpoint.open(tmp_path / "plain")
    for name in decoded.tensors:
        np.testing.assert_array_equal(read_weight(converted, manifest, name), decoded.read(name))


def test_side_files_go_over_and_what_would_lie_does_not(tmp_path: Path) -> None:
    """C01: known and unknown side files reach every rank, the quantisation configuration does not."""
    exports.export(tmp_path / "source", "modelopt nvfp4")
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": exports.MODELOPT_IGNORE}
    (tmp_path / "source" / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    for name in ("foo_config.json", "generation_config.json", "tokenizer.json"):
        (tmp_path / "source" / name).write_text('{"a":  1}')
    report = to(tmp_path / "source", tmp_path / "converted")
    shard(tmp_path / "converted", tmp_path / "ranks", 2)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    stated = config.pop("quantization_config")
    for directory in (tmp_path / "converted", tmp_path / "ranks" / "rank-0-of-2", tmp_path / "ranks" / "rank-1-of-2"):
        assert json.loads((directory / "config.json").read_text()) == config
        assert not (directory / "hf_quant_config.json").exists()
        for name in ("foo_config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
            assert (directory / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
    assert report.manifest.source.quantization_config == stated
    assert report.manifest.source.hf_quant_config == {"quantization": quantization}


def test_weights_that_the_index_does_not_name_are_left_alone_with_a_notice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C02: a second set of shards beside the indexed one."""
    exports.export(tmp_path / "source", "ct nvfp4")
    (tmp_path / "source" / "model.safetensors").write_bytes(b"another set of shards")
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "converted")]) == 0
    assert "model.safetensors: not named by" in capsys.readouterr().out
    assert not (tmp_path / "converted" / "model.safetensors").exists()
    assert verify(tmp_path / "source", tmp_path / "converted").ok


@pytest.mark.parametrize("producer", ["modelopt", "compressed-tensors"])
def test_scales_of_the_kv_cache_alone_leave_a_plain_source(producer: str, tmp_path: Path) -> None:
    attention = "model.language_model.layers.3.self_attn"

    def with_scales(tensors: exports.Tensors) -> None:
        tensors |= {f"{attention}.{name}_scale": torch.ones(1, dtype=torch.bfloat16) for name in "kv"}

    source = plain(tmp_path / "source", with_scales)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8", "ignore": []},
        "compressed-tensors": exports._ct("float-quantized", [], [], kv=True),
    }[producer]
    (source / "config.json").write_text(json.dumps(config))
    manifest = to(source, tmp_path / "converted").manifest
    assert set(manifest.source.dropped) == {f"{attention}.k_scale", f"{attention}.v_scale"}
    usual = to(exports.TINY, tmp_path / "usual").manifest
    assert {n: r.digest for n, r in manifest.tensors.items()} == {n: r.digest for n, r in usual.tensors.items()}
    assert verify(source, tmp_path / "converted").ok


def test_an_mtp_layer_left_plain_against_the_rules_is_kept_and_said(tmp_path: Path) -> None:
    """ModelOpt's exclude list does not know MTP: files with a plain MTP layer put back are common (its rules lie)."""
    exports.export(tmp_path / "source", "modelopt nvfp4")
    report = to(tmp_path / "source", tmp_path / "converted")
    said = [notice for notice in report.notices if "declared quantised, stored plain, kept plain" in notice]
    assert len(said) == 1 and "mtp.fc" in said[0]


def test_a_kill_at_any_write_resumes_to_the_same_bytes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    commands = Commands("convert")
    request.addfinalizer(commands.close)

    def run(target: Path, **environment: str) -> int:
        words = ["convert", str(MODELOPT), str(target), "--mtp-from", str(exports.TINY), "--quiet"]
        return commands.run(words, tmp_path, **environment).returncode

    counter = tmp_path / "count"
    assert run(tmp_path / "whole", DUOVOLT_COUNT_WRITES=str(counter)) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    for stop in np.linspace(2, int(counter.read_text()), 4, dtype=int):
        broken = tmp_path / f"broken-{stop}"
        assert run(broken, DUOVOLT_STOP_AT_WRITE=str(stop)) == -9
        assert run(broken) == 0
        assert files == {path.name: path.read_bytes() for path in broken.iterdir()}


def test_a_tiny_product_of_scales_is_not_flushed_to_zero(tmp_path: Path) -> None:
    """Block scale 2^-9 with multiplier 0.04 / 2688: 2.9e-8 a step, which 16 bits cannot hold (Q05)."""
    exports.export(tmp_path / "source", "modelopt nvfp4")
    path = tmp_path / "source" / "layers-0.safetensors"
    from safetensors.torch import load_file, save_file

    module = "model.language_model.layers.0.mlp.up_proj"
    tensors = load_file(path)
    tensors[f"{module}.weight"].fill_(0x72)  # codes 2 (1.0) and 7 (6.0): the even column is the low nibble (Q09)
    tensors[f"{module}.weight_scale"].view(torch.uint8).fill_(1)
    tensors[f"{module}.weight_scale_2"].fill_(0.04 / 2688)
    save_file(tensors, path)
    manifest = to(tmp_path / "source", tmp_path / "converted").manifest
    values = read_weight(Checkpoint.open(tmp_path / "converted"), manifest, f"{module}.weight")
    step = np.float32(2.0**-9) * np.float32(0.04 / 2688)
    assert set(values[:, 0::2].ravel()) == {step} and set(values[:, 1::2].ravel()) == {6 * step} and step > 2e-8
