"""plan and inspect: the published ledger of the 27B from headers alone, and the tiny checkpoint's fate, tensor by tensor."""

import io
import json
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from duovolt.checkpoint.writer import Planned, encode_header
from duovolt.cli.main import main
from duovolt.cli.plan import CARD_BYTES
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory
from duovolt.perf.shapes import QWEN_27B
from duovolt.runtime.engine.cuda.plan import MARGIN, SPARE

FIXTURE = Path(__file__).parent.parent / "fixtures" / "tiny_qwen3_5" / "checkpoint"


@pytest.fixture(scope="module")
def giant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 27B's headers over a hole of 55.6 GB that takes no room on disk."""
    directory = tmp_path_factory.mktemp("giant")
    (directory / "config.json").write_text(json.dumps(QWEN_27B))
    tensors = [Planned(s.name, "BF16", s.shape) for s in inventory(ModelConfig.from_dict(QWEN_27B)).values()]
    header = encode_header(tensors, {"format": "pt"})
    path = directory / "model.safetensors"
    path.write_bytes(header)
    os.truncate(path, len(header) + sum(tensor.nbytes for tensor in tensors))
    return directory


def run(*arguments: object) -> SimpleNamespace:
    """A command in this process, where torch is imported but once: exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def facts(*arguments: object) -> dict:
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_inventory_of_the_27b_counts_what_the_release_counts() -> None:
    specs = inventory(ModelConfig.from_dict(QWEN_27B)).values()
    assert len(specs) == 1199
    assert [sum(s.group == g for s in specs) for g in ("text", "mtp", "vision")] == [851, 15, 333]
    parameters = 0
    for spec in specs:
        count = 1
        for extent in spec.shape:
            count *= extent
        parameters += count
    assert parameters == 27_781_427_952


def test_ledger_of_the_27b(giant: Path) -> None:
    found = facts("plan", giant, "--tp", 2, "--max-context", 262144)
    assert found["source_bytes"] == 55_562_855_904
    assert found["converted_bytes"] == 22_059_614_432  # published: 22.05 GB; ours keeps row scales in float32
    assert [rank["bytes"] / 1e9 for rank in found["ranks"]] == pytest.approx([12.78, 12.78], rel=1e-3)
    assert found["ranks"][0]["replicated_bytes"] / 1e9 == pytest.approx(3.52, rel=2e-3)
    assert found["kv_bytes_per_token"] * 2 == 35_904
    assert round(found["state_bytes"] / 1e6, 1) == 77.0  # 75.5 MB of state and 1.5 of convolution history
    parts = found["card_memory"]
    kept = sum(parts[name] for name in ("weights", "vision tower", "kv", "states"))
    assert round(kept / 1e9, 1) == 17.6 and sum(parts.values()) == found["card_bytes_needed"]
    assert found["fits_32_gb_card"] and found["longest_context_32_gb"] == 262144
    left = CARD_BYTES - MARGIN - found["card_bytes_needed"] - SPARE
    assert found["plain_weights_32_gb"] == left and found["plain_weights_share"] == pytest.approx(left / 24_358_420_480)
    told = run("plan", giant, "--tp", 2, "--max-context", 262144).stdout
    assert (
        f"{left / 1e9:,.2f} GB that such a card has left: {left / 24_358_420_480:.0%} of their plain weights stay"
        in told
    )
    assert not facts("plan", giant, "--tp", 1, "--kv", "fp16")["fits_32_gb_card"]


@pytest.mark.parametrize("tp, fits", [(1, True), (2, True), (4, True), (8, True), (3, False), (16, False)])
def test_every_width_the_27b_allows(giant: Path, tp: int, fits: bool) -> None:
    result = run("plan", giant, "--tp", str(tp))
    assert (result.returncode == 0) == fits
    if not fits:
        assert result.returncode == 2 and f"cannot be shared out over {tp} ranks" in result.stderr


def test_inspect_of_a_source(giant: Path) -> None:
    found = facts("inspect", giant)
    assert found["stage"] == "source" and found["tensors"] == 1199
    assert {name: total["tensors"] for name, total in found["by_part_of_the_model"].items()} == {
        "mtp": 15,
        "text": 851,
        "vision": 333,
    }


def test_inspect_one_tensor() -> None:
    found = facts("inspect", FIXTURE, "--tensor", "lm_head.weight")
    assert (found["dtype"], found["shape"]) == ("BF16", [256, 64])
    result = run("inspect", FIXTURE, "--tensor", "lm_head")
    assert result.returncode == 2 and "Did you mean lm_head.weight?" in result.stderr


@pytest.mark.parametrize("option", [["--max-context", "0"], ["--max-context", "999999"], ["--tp", "0"]])
def test_nonsense_is_refused_with_the_numbers(option: list[str]) -> None:
    result = run("plan", FIXTURE, *option)
    assert result.returncode == 2 and option[1] in result.stderr and "Traceback" not in result.stderr


def test_auto_is_the_longest_context_that_fits(giant: Path) -> None:
    """As for `serve`: the 27B on two cards reaches all its positions, on one none."""
    found = facts("plan", giant, "--tp", 2, "--max-context", "auto", "--kv", "fp16")
    assert found["max_context"] == found["longest_context_32_gb"] and found["fits_32_gb_card"]
    result = run("plan", giant, "--max-context", "auto", "--recipe", "bf16", "--tp", "1")
    assert result.returncode == 3 and "no context fits" in result.stderr and "Traceback" not in result.stderr
    result = run("plan", FIXTURE, "--max-context", "auto")
    assert result.returncode == 2 and "no kernels for this model" in result.stderr


def test_a_recipe_that_cards_cannot_serve_is_told_before_it_is_converted(giant: Path, tmp_path: Path) -> None:
    """The embedding in nvfp4: the reference backend serves it, the CUDA engine refuses it when it loads."""
    recipe = tmp_path / "small.toml"
    recipe.write_text('name = "small"\n[[rules]]\nroles = ["embed_tokens", "mlp.up_proj"]\nencoding = "nvfp4"\n')
    words = "model.language_model.embed_tokens.weight stored as nvfp4, taken as bf16, fp16 or fp32"
    assert facts("plan", giant, "--recipe", recipe)["missing_kernels"] == [words]
    result = run("plan", giant, "--recipe", recipe)
    assert f"the CUDA engine has no kernels for this model: {words}\n" in result.stdout
    assert facts("plan", giant)["missing_kernels"] == []
