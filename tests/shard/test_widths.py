"""Every width that a model of the family allows, planned from records alone; the others refused with their numbers."""

from collections import Counter
from typing import Any

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.manifest import FORMAT_VERSION, Manifest, SourceRecord, SourceRef, TensorRecord
from duovolt.model.config import FAMILY, ModelConfig
from duovolt.model.inventory import inventory
from duovolt.perf.shapes import QWEN_27B
from duovolt.shard.plan import RankPart, plan_rank
from duovolt.tests.support import maker

# Shapes of smaller dense models of the family: two and four kv heads, tied and untied.
SIZES: dict[str, dict[str, Any]] = {
    "27B": QWEN_27B,
    "1024 wide, 24 layers (0.8B)": QWEN_27B | {
        "tie_word_embeddings": True,
        "text_config": QWEN_27B["text_config"] | {
            "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
            "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        },
        "vision_config": QWEN_27B["vision_config"] | {"out_hidden_size": 1024},
    },
    "4096 wide, 32 layers": QWEN_27B | {
        "text_config": QWEN_27B["text_config"] | {
            "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
            "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        },
        "vision_config": QWEN_27B["vision_config"] | {"out_hidden_size": 4096},
    },
}  # fmt: skip
ALLOWED = {"27B": {1, 2, 4, 8}, "1024 wide, 24 layers (0.8B)": {1, 2, 4, 8}, "4096 wide, 32 layers": {1, 2, 4, 8, 16}}


def manifest_of(config: ModelConfig) -> Manifest:
    """What `convert` would record with its default recipe, digests apart."""
    records = {}
    for spec in inventory(config).values():
        encoding = maker.default_encoding(spec)
        for part, layout, dtype, shape, stored in maker.stored_parts(spec, encoding, "v100"):
            records[stored.name] = TensorRecord(
                weight=spec.name, part=part, encoding=encoding, layout=layout, dtype=dtype, shape=list(stored.shape),
                canonical_shape=list(shape), file="x", digest="0" * 32,
                sources=[SourceRef(name=spec.name, dtype="BF16", shape=list(spec.shape), digest="0" * 32)],
            )  # fmt: skip
    return Manifest(
        format_version=FORMAT_VERSION, stage="converted", family=FAMILY, conversion_id="0", recipe={}, tp_size=None,
        tp_rank=None, tensors=records, files={}, provenance={},
        source=SourceRecord(quantization_config=None, hf_quant_config=None, files={}),
    )  # fmt: skip


def planned(manifest: Manifest, config: ModelConfig, tp: int) -> list[dict[str, RankPart]]:
    ranks = (plan_rank(manifest, config, tp, rank, "test") for rank in range(tp))
    return [{part.name: part for group in groups for part in group} for groups in ranks]


@pytest.mark.parametrize("size", SIZES)
def test_widths(size: str) -> None:
    """S07: kv heads lie on several ranks where there are fewer of them; every other element lies on exactly one."""
    config = ModelConfig.from_dict(SIZES[size])
    manifest = manifest_of(config)
    for tp in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32):
        if tp not in ALLOWED[size]:
            with pytest.raises(InputError, match=rf"\d+ [\w ]+ cannot be shared out over {tp} ranks"):
                plan_rank(manifest, config, tp, 0, "test")
            continue
        ranks = planned(manifest, config, tp)
        copies = max(1, tp // config.text.num_key_value_heads)
        for name, record in manifest.tensors.items():
            parts = [rank[name] for rank in ranks]
            if parts[0].axis is None:
                assert all(part.canonical_shape == tuple(record.canonical_shape) for part in parts)
                continue
            held = Counter(i for part in parts for start, stop in part.ranges for i in (start, stop - 1))
            shared = any(word in name for word in ("k_proj", "v_proj"))
            extent = sum(part.canonical_shape[part.axis or 0] for part in parts)
            assert extent == record.canonical_shape[parts[0].axis] * (copies if shared else 1), (tp, name)
            assert min(held) == 0 and max(held) == record.canonical_shape[parts[0].axis] - 1
        assert ("lm_head.weight" in manifest.tensors) == (not config.tie_word_embeddings)
        assert tp == 1 or config.tie_word_embeddings or ranks[0]["lm_head.weight"].axis == 0
        assert ranks[0]["model.language_model.embed_tokens.weight"].axis is None


def test_the_ledger_of_the_27b() -> None:
    """Bytes a rank, and those of them that every rank has, at each width."""
    config = ModelConfig.from_dict(QWEN_27B)
    manifest = manifest_of(config)
    found = {}
    for tp in (1, 2, 4, 8):
        parts = planned(manifest, config, tp)[0].values()
        replicated = sum(part.stored.nbytes for part in parts if part.axis is None)
        found[tp] = (round(sum(part.stored.nbytes for part in parts) / 1e9, 2), round(replicated / 1e9, 2))
    assert found[1][0] == pytest.approx(22.05, abs=0.02) and found[2] == pytest.approx((12.78, 3.52), abs=0.02)
    assert found[4][0] == pytest.approx((22.05 - 3.52) / 4 + 3.52, abs=0.02)
    # Four kv heads over eight ranks: each lies on two.
    kv = 17 * 2 * 4 * 256 * 5120 / 1e9
    assert found[8][0] == pytest.approx((22.05 - 3.52 - kv) / 8 + kv / 4 + 3.52, abs=0.02)


def test_the_head_is_cut_by_rows() -> None:
    config = ModelConfig.from_dict(QWEN_27B)
    manifest = manifest_of(config)
    halves = [rank["lm_head.weight"] for rank in planned(manifest, config, 2)]
    assert [half.ranges for half in halves] == [((0, 124160),), ((124160, 248320),)]
