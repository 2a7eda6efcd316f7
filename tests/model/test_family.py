"""The inventory and the partition table, against the numbers of the 27B."""

from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.model.config import ModelConfig
from duovolt.model.inventory import check_closed, inventory
from duovolt.model.partition import TABLE, split_of
from duovolt.tests.support import maker

LARGE: dict[str, Any] = {
    "model_type": "qwen3_5",
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": True,  # text_config decides
    "text_config": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "vocab_size": 248320,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "full_attention_interval": 4,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "mtp_num_hidden_layers": 1, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
    "vision_config": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 5120,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def large() -> ModelConfig:
    return ModelConfig.from_dict(LARGE)


def elements(shape: tuple[int, ...]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def test_tensors_of_the_27b(large: ModelConfig) -> None:
    specs = inventory(large)
    groups = [spec.group for spec in specs.values()]
    assert (len(specs), groups.count("text"), groups.count("mtp"), groups.count("vision")) == (1199, 851, 15, 333)
    assert sum(elements(spec.shape) for spec in specs.values()) == 27_781_427_952
    layer = "model.language_model.layers."
    assert specs[f"{layer}3.self_attn.q_proj.weight"].shape == (12288, 5120)
    assert specs[f"{layer}0.linear_attn.in_proj_qkv.weight"].shape == (10240, 5120)
    assert specs[f"{layer}0.linear_attn.conv1d.weight"].shape == (10240, 1, 4)
    assert specs["mtp.fc.weight"].shape == (5120, 10240)
    assert specs["model.visual.patch_embed.proj.weight"].shape == (1152, 3, 2, 16, 16)


@pytest.mark.parametrize(
    ("name", "axis", "ranges"),
    [
        ("model.language_model.layers.3.self_attn.q_proj.weight", 0, [(6144, 12288)]),
        ("model.language_model.layers.3.self_attn.k_proj.weight", 0, [(512, 1024)]),
        ("model.language_model.layers.3.self_attn.o_proj.weight", 1, [(3072, 6144)]),
        (
            "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
            0,
            [(1024, 2048), (3072, 4096), (7168, 10240)],
        ),
        ("model.language_model.layers.0.linear_attn.conv1d.weight", 0, [(1024, 2048), (3072, 4096), (7168, 10240)]),
        ("model.language_model.layers.0.linear_attn.in_proj_z.weight", 0, [(3072, 6144)]),
        ("model.language_model.layers.0.linear_attn.in_proj_a.weight", 0, [(24, 48)]),
        ("model.language_model.layers.0.linear_attn.A_log", 0, [(24, 48)]),
        ("model.language_model.layers.0.linear_attn.out_proj.weight", 1, [(3072, 6144)]),
        ("model.language_model.layers.0.mlp.up_proj.weight", 0, [(8704, 17408)]),
        ("model.language_model.layers.0.mlp.down_proj.weight", 1, [(8704, 17408)]),
        ("mtp.layers.0.self_attn.v_proj.weight", 0, [(512, 1024)]),
        ("lm_head.weight", 0, [(124160, 248320)]),
        ("model.language_model.embed_tokens.weight", None, None),
        ("model.language_model.layers.0.linear_attn.norm.weight", None, None),
        ("mtp.fc.weight", None, None),
        ("model.visual.blocks.0.attn.qkv.weight", None, None),
    ],
)
def test_second_rank_of_two(large: ModelConfig, name: str, axis: int | None, ranges: Any) -> None:
    split = split_of(inventory(large)[name], large, 2)
    assert split.axis == axis
    assert ranges is None or list(split.ranges[1]) == ranges


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_element_on_exactly_one_rank(large: ModelConfig, tp: int) -> None:
    """Except the kv heads, which eight ranks share in pairs."""
    for spec in inventory(large).values():
        split = split_of(spec, large, tp)
        if split.axis is None:
            continue
        held = sorted(pair for ranges in split.ranges for pair in ranges)
        if tp > 4 and spec.role in ("self_attn.k_proj", "self_attn.v_proj"):
            assert held[0::2] == held[1::2]
            held = held[0::2]
        edges = [edge for pair in held for edge in pair]
        assert edges[0] == 0 and edges[-1] == spec.shape[split.axis] and edges[1:-1:2] == edges[2::2], spec.name


def test_a_value_head_lies_with_its_key_head(large: ModelConfig) -> None:
    """Value head j uses key head j // 3: both on the same rank, for every width."""
    specs = inventory(large)
    name = "model.language_model.layers.0.linear_attn."
    for tp in (2, 4, 8, 16):
        qkv = split_of(specs[f"{name}in_proj_qkv.weight"], large, tp)
        gates = split_of(specs[f"{name}in_proj_a.weight"], large, tp)
        for rank in range(tp):
            keys = range(qkv.ranges[rank][0][0] // 128, qkv.ranges[rank][0][1] // 128)
            assert {j // 3 for j in range(*gates.ranges[rank][0])} == set(keys)


@pytest.mark.parametrize(
    ("tp", "words"), [(3, "16 linear key"), (16, "24 attention"), (0, "0 ranks"), (65, "65 ranks")]
)
def test_widths_that_are_refused(large: ModelConfig, tp: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        for spec in sorted(inventory(large).values(), key=lambda spec: "self_attn" not in spec.role if tp == 16 else 0):
            split_of(spec, large, tp)


def test_every_rule_names_a_role_of_the_family(large: ModelConfig) -> None:
    """C07: a rule that matches nothing would be a typing error in the table."""
    assert set(TABLE) <= {spec.role for spec in inventory(large.with_draft_head(64)).values()}


def test_text_config_decides_about_tied_embeddings(large: ModelConfig) -> None:
    assert "lm_head.weight" in inventory(large)
    tied = LARGE | {"text_config": LARGE["text_config"] | {"tie_word_embeddings": True}}
    assert "lm_head.weight" not in inventory(ModelConfig.from_dict(tied))


def test_what_a_directory_holds_must_be_the_family() -> None:
    config = ModelConfig.from_dict(maker.config())
    shapes = {name: spec.shape for name, spec in inventory(config).items()}
    assert check_closed(config, shapes, "here") == inventory(config)
    renamed = {name.replace("language_model", "language_model.language_model"): s for name, s in shapes.items()}
    with pytest.raises(InputError, match=r"matched.*missing.*unknown"):
        check_closed(config, renamed, "here")
    with pytest.raises(InputError, match=r"2 of another shape.*embed_tokens.weight is \[1\]"):
        check_closed(
            config, shapes | {n: (1,) for n in ("model.language_model.embed_tokens.weight", "lm_head.weight")}, "here"
        )
    with pytest.raises(InputError, match="interleaved by key head"):
        check_closed(config, shapes | {"model.language_model.layers.0.linear_attn.in_proj_qkvz.weight": (1, 1)}, "here")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM"),
        ({"text_config": None}, "text_config"),
        ({"text_config": []}, "text_config"),
        ({"vision_config": {"depth": 10**6}}, "vision_config"),
    ],
)
def test_configurations_of_others(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        ModelConfig.from_dict(maker.config() | change)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 5000}, "5000"),
        ({"num_attention_heads": 3}, "3 attention heads"),
        ({"linear_num_value_heads": 6}, "6 linear value heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
    ],
)
def test_values_that_make_no_sense(change: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        ModelConfig.from_dict(maker.config(**change))


def test_not_a_configuration(tmp_path: Path) -> None:
    for content, word in (("[]", "JSON object"), ("{", "JSON"), ("null", "JSON object")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(InputError, match=word):
            ModelConfig.read(tmp_path)
