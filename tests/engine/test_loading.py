"""Weights from every kind of directory; what does not fit is refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from duovolt.checkpoint.directory import Checkpoint
from duovolt.checkpoint.encodings.weights import read_weight
from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.manifest import read_manifest
from duovolt.convert.pipeline import convert
from duovolt.convert.recipe import load_recipe
from duovolt.runtime.engine import EngineSettings, load_engine
from duovolt.runtime.engine.loading import tokenizer_ids
from duovolt.runtime.engine.sources import open_source
from duovolt.runtime.engine.weights import load_weights
from duovolt.runtime.parallel.base import SoloCollective
from duovolt.shard.split import shard

PROMPT = [3, 200, 45, 17, 99, 128, 5, 60]


@pytest.fixture(scope="module")
def stages(tools, tmp_path_factory) -> Path:
    """converted/ and ranks of one and of two, made from the fixture with the default recipe."""
    folder = tmp_path_factory.mktemp("stages")
    convert(tools.fixture / "checkpoint", folder / "converted", load_recipe("v100"), 1, lambda count: None)
    for size in (1, 2):
        shard(folder / "converted", folder / "ranks", size)
    return folder


@pytest.fixture
def plain(tools, tmp_path: Path) -> Path:
    """A copy of the fixture's checkpoint as one file without an index."""
    directory = tmp_path / "plain"
    directory.mkdir()
    tensors = {}
    for file in sorted((tools.fixture / "checkpoint").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            tensors |= {name: opened.get_tensor(name).float().numpy() for name in names}
    save_file(tensors, directory / "model.safetensors")
    shutil.copy(tools.fixture / "checkpoint" / "config.json", directory)
    return directory


def rewrite(directory: Path, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_a_rank_holds_its_part_of_the_converted_weights(stages: Path) -> None:
    """S06: what is summed follows from the split records of the files, not from a table of the engine."""
    whole = open_source(stages / "converted")
    ranks = [open_source(stages / "ranks" / f"rank-{rank}-of-2") for rank in (0, 1)]
    assert (whole.tp_size, whole.tp_rank) == (1, 0) and not whole.summed
    for name in ("down_proj", "o_proj", "out_proj"):
        assert any(name in weight for weight in ranks[0].summed)
    assert "lm_head.weight" in ranks[0].cut and not any("norm" in weight for weight in ranks[0].summed)
    for name in whole.shapes:
        if name in ranks[0].summed:
            joined = np.concatenate([rank.read(name) for rank in ranks], axis=1)
            assert np.array_equal(joined, whole.read(name)), name
    assert np.array_equal(np.concatenate([rank.read("lm_head.weight") for rank in ranks]), whole.read("lm_head.weight"))


def test_converted_and_rank_directories_give_one_answer(tools, stages: Path) -> None:
    settings = EngineSettings(max_context=128, drafts=3)
    answers = []
    for directory in (stages / "converted", stages / "ranks" / "rank-0-of-1"):
        run = tools.drive(load_engine(directory, SoloCollective(), settings), tools.request(1, PROMPT, 20))
        answers.append(run.tokens[1])
    two = tools.ranks(
        2,
        lambda c: tools.drive(
            load_engine(stages / "ranks" / f"rank-{c.rank}-of-2", c, settings), tools.request(1, PROMPT, 20)
        ),
    )
    assert two[0].records == two[1].records
    assert answers[0] == answers[1] == two[0].tokens[1]


def test_loaded_tensors_are_the_decoded_ones(stages: Path) -> None:
    directory = stages / "ranks" / "rank-1-of-2"
    weights = load_weights(open_source(directory))
    checkpoint, manifest = Checkpoint.open(directory), read_manifest(directory)

    def decoded(name: str) -> np.ndarray:
        return read_weight(checkpoint, manifest, name)

    prefix = "model.language_model.layers.3"
    layer = weights.layers[3]
    parts = [decoded(f"{prefix}.mlp.{name}_proj.weight") for name in ("gate", "up")]
    assert np.array_equal(layer.gate_up.numpy(), np.concatenate(parts))
    assert layer.down.summed and np.array_equal(layer.down.weight.numpy(), decoded(f"{prefix}.mlp.down_proj.weight"))
    assert weights.sizes.query_heads == 2 and weights.sizes.kv_heads == 1
    assert (weights.sizes.key_heads, weights.sizes.value_heads) == (2, 6)


def test_a_rank_alone_or_in_the_wrong_place_is_refused(stages: Path) -> None:
    with pytest.raises(InputError, match="rank 1 of 2, this process is rank 0 of 1"):
        load_engine(stages / "ranks" / "rank-1-of-2", SoloCollective(), EngineSettings(max_context=64))


def test_an_unfinished_directory_is_refused(stages: Path, tmp_path: Path) -> None:
    shutil.copytree(stages / "converted", tmp_path / "half")
    (tmp_path / "half" / "duovolt.json").unlink()
    with pytest.raises(InputError, match="unfinished"):
        open_source(tmp_path / "half")


def test_a_plain_checkpoint_loads(tools, plain: Path) -> None:
    settings = EngineSettings(max_context=64)
    run = tools.drive(load_engine(plain, SoloCollective(), settings), tools.request(1, PROMPT, 10))
    same = load_engine(tools.fixture / "checkpoint", SoloCollective(), settings)
    assert run.tokens == tools.drive(same, tools.request(1, PROMPT, 10)).tokens


@pytest.mark.parametrize(
    "name",
    ["mtp.layers.0.self_attn.k_proj.weight", "model.language_model.norm.weight", "model.visual.pos_embed.weight"],
)
def test_a_missing_weight_is_named(plain: Path, name: str) -> None:
    """C10: MTP and vision too."""
    rewrite(plain, lambda tensors: tensors.pop(name))
    with pytest.raises(InputError, match="1 missing: " + name.replace(".", r"\.")):
        open_source(plain)


def test_a_renamed_weight_is_named_on_both_sides(plain: Path) -> None:
    """C10: an MTP tensor under another name."""
    rewrite(
        plain, lambda t: t.update({"mtp.layers.0.self_attn.key.weight": t.pop("mtp.layers.0.self_attn.k_proj.weight")})
    )
    with pytest.raises(InputError, match=r"1 missing: .*k_proj.*1 unknown: .*key\.weight"):
        open_source(plain)


def test_a_wrong_shape_is_named(plain: Path) -> None:
    rewrite(plain, lambda t: t.update({"mtp.fc.weight": np.zeros((64, 64), np.float32)}))
    with pytest.raises(InputError, match=r"mtp\.fc\.weight is \[64, 64\], expected \[64, 128\]"):
        open_source(plain)


def test_a_quantised_source_is_sent_to_convert(plain: Path) -> None:
    rewrite(plain, lambda t: t.update({"lm_head.weight": np.zeros((256, 64), np.uint8)}))
    with pytest.raises(InputError, match=r"lm_head\.weight.*U8.*duovolt convert"):
        open_source(plain)


def test_a_context_longer_than_the_model_knows(tools) -> None:
    with pytest.raises(InputError, match="4096 positions"):
        load_engine(tools.fixture / "checkpoint", SoloCollective(), EngineSettings(max_context=5000))


def test_ids_of_a_tokenizer(tmp_path: Path) -> None:
    """S09: rows of the head beyond the tokenizer are never sampled; no rank has a row of padding."""
    assert tokenizer_ids(tmp_path, 300) == 300
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 250, "content": "<x>"}]}))
    assert tokenizer_ids(tmp_path, 300) == 251
    with pytest.raises(InputError, match="largest id is 250, the model has 200 rows"):
        tokenizer_ids(tmp_path, 200)
    path.write_text('{"model": {}}')
    with pytest.raises(InputError, match="vocab"):
        tokenizer_ids(tmp_path, 300)
