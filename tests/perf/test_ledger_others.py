"""Ledgers of other members and other engines' files: a mixture of experts by its headers, GGUF by its own."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.writer import Planned, encode_header
from duovolt.cli.main import main
from duovolt.perf.gguf_header import read_header
from duovolt.perf.gguf_ledger import gguf_ledger
from duovolt.perf.ledger import Shape, ledger_of
from duovolt.perf.model_source import sheet_at
from duovolt.perf.sheet import Experts, Matrix

HIDDEN, VOCABULARY, LAYERS, EXPERTS, INNER = 2048, 248_320, 40, 256, 512
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144, "mtp_num_hidden_layers": 1, "num_experts": EXPERTS,
        "num_experts_per_tok": 8, "moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
}  # fmt: skip


def moe_layer(prefix: str, full: bool, one_by_one: bool) -> dict[str, tuple[int, ...]]:
    mixer: dict[str, tuple[int, ...]] = {
        "linear_attn.in_proj_qkv.weight": (8192, HIDDEN), "linear_attn.in_proj_z.weight": (4096, HIDDEN),
        "linear_attn.in_proj_a.weight": (32, HIDDEN), "linear_attn.in_proj_b.weight": (32, HIDDEN),
        "linear_attn.A_log": (32,), "linear_attn.dt_bias": (32,), "linear_attn.conv1d.weight": (8192, 1, 4),
        "linear_attn.norm.weight": (128,), "linear_attn.out_proj.weight": (HIDDEN, 4096),
    }  # fmt: skip
    if full:
        mixer = {
            "self_attn.q_proj.weight": (8192, HIDDEN), "self_attn.k_proj.weight": (512, HIDDEN),
            "self_attn.v_proj.weight": (512, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, 4096),
            "self_attn.q_norm.weight": (256,), "self_attn.k_norm.weight": (256,),
        }  # fmt: skip
    experts: dict[str, tuple[int, ...]] = {
        "experts.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN),
        "experts.down_proj": (EXPERTS, HIDDEN, INNER),
    }
    if one_by_one:
        experts = {
            f"experts.{index}.{name}_proj.weight": shape
            for index in range(EXPERTS)
            for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER)))
        }
    shared = {f"shared_expert.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
    mlp = experts | shared | {
        "shared_expert.down_proj.weight": (HIDDEN, INNER), "gate.weight": (EXPERTS, HIDDEN),
        "shared_expert_gate.weight": (1, HIDDEN),
    }  # fmt: skip
    norms = {f"{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {f"{prefix}.{name}": shape for name, shape in (norms | mixer).items()} | {
        f"{prefix}.mlp.{name}": shape for name, shape in mlp.items()
    }


def moe_directory(path: Path, one_by_one: bool = False, layers: int = LAYERS, **text: Any) -> Path:
    """A sparse checkpoint: true headers, holes for data."""
    top: dict[str, tuple[int, ...]] = {
        "model.language_model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.language_model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
    } | {f"mtp.{name}.weight": (HIDDEN,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    for index in range(layers):
        top |= moe_layer(f"model.language_model.layers.{index}", (index + 1) % 4 == 0, one_by_one)
    top |= moe_layer("mtp.layers.0", True, one_by_one)
    tensors = [Planned(name, "BF16", shape) for name, shape in top.items()]
    path.mkdir()
    header = encode_header(tensors, {"format": "pt"})
    with (path / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(tensor.nbytes for tensor in tensors))
    config = CONFIG | {"text_config": CONFIG["text_config"] | {"num_hidden_layers": layers} | text}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_the_35b_a3b_reads_its_routed_experts_by_their_count(tmp_path: Path) -> None:
    sheet = sheet_at(str(moe_directory(tmp_path / "moe")), None, None)
    token = ledger_of(sheet, Shape())
    expert = 3 * INNER * HIDDEN * 2
    routed = [launch for launch in token.launches if launch.kernel.startswith("experts_")]
    assert len(routed) == 2 * LAYERS
    assert sum(launch.weights for launch in routed) == pytest.approx(8 * expert * LAYERS)
    # 35 billion parameters, three of them read: BF16, the embedding by one row.
    assert token.read == pytest.approx(2 * 3.0e9, rel=0.1)
    state = [launch for launch in token.launches if launch.family == "delta"]
    assert len(state) == 30 and sheet.heads.state_bytes == 2_097_152  # 0.126 GB a token, read and written
    verify = ledger_of(sheet, Shape(drafts=3))
    distinct = 256 * (1 - (1 - 8 / 256) ** 4)
    routed = [launch for launch in verify.launches if launch.kernel.startswith("experts_") and launch.part == "verify"]
    experts = sum(launch.weights for launch in routed)
    assert 8 < distinct < 32 and experts == pytest.approx(distinct * expert * LAYERS)


def test_experts_one_by_one_and_over_ranks_count_the_same(tmp_path: Path) -> None:
    stacked = sheet_at(str(moe_directory(tmp_path / "a", layers=4)), 1, None)
    single = sheet_at(str(moe_directory(tmp_path / "b", layers=4, one_by_one=True)), 1, None)
    shape = Shape(context=100, drafts=2)
    assert ledger_of(single, shape).launches == ledger_of(stacked, shape).launches
    half = sheet_at(str(tmp_path / "a"), 2, None)
    assert half.layers[0].experts is not None and stacked.layers[0].experts is not None
    assert 2 * half.layers[0].experts.gate_up == stacked.layers[0].experts.gate_up


@pytest.mark.parametrize(
    "text, message",
    [
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_experts_per_tok": 300}, "300 of 256 experts"),
        ({"num_experts_per_tok": "8"}, "num_experts_per_tok is '8'"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ],
)
def test_odd_numbers_of_experts_are_refused(tmp_path: Path, text: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sheet_at(str(moe_directory(tmp_path / "moe", layers=4, **text)), 1, None)


def test_a_layer_without_experts_is_refused(tmp_path: Path) -> None:
    path = moe_directory(tmp_path / "moe", layers=4)
    with (path / "model.safetensors").open("r+b") as file:
        header = file.read(1 << 16).replace(b"layers.2.mlp.experts.", b"layers.2.mlp.xxperts.")
        file.seek(0)
        file.write(header)
    with pytest.raises(InputError, match=r"layers\.2\.mlp\.experts: 0 tensors"):
        sheet_at(str(path), 1, None)


def test_expected_experts() -> None:
    experts = Experts(4, 2, 1, 1, Matrix("r", 4, 4, "bf16", 32), None)
    assert [experts.read(tokens) for tokens in (1, 2)] == [2, 3]


# GGUF: a small file of a hybrid mixture, written by the library's own writer.

gguf = pytest.importorskip("gguf", reason="the library gguf is not installed")
import numpy as np  # noqa: E402


def gguf_file(path: Path, tied: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, "qwen35moe")
    writer.add_block_count(3)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_uint32("qwen35moe.nextn_predict_layers", 1)
    for key, value in {"inner_size": 64, "state_size": 16, "group_count": 2, "conv_kernel": 4}.items():
        writer.add_uint32(f"qwen35moe.ssm.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {index}" for index in range(5000)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 5000)

    def q4(name: str, *shape: int) -> None:
        words = np.zeros((*shape[:-1], shape[-1] // 32 * 18), np.uint8)
        writer.add_tensor(name, words, raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def f32(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.zeros(shape, np.float32))

    q4("token_embd.weight", 5000, 64)
    if not tied:
        writer.add_tensor("output.weight", np.zeros((5000, 64), np.float16))
    f32("output_norm.weight", 64)
    for block in range(3):
        if block == 0:
            q4("blk.0.attn_qkv.weight", 128, 64)
            f32("blk.0.ssm_conv1d.weight", 128, 4)
            q4("blk.0.ssm_out.weight", 64, 64)
        else:
            for name, rows in (("q", 256), ("k", 64), ("v", 64)):
                q4(f"blk.{block}.attn_{name}.weight", rows, 64)
            q4(f"blk.{block}.attn_output.weight", 64, 128)
        f32(f"blk.{block}.attn_norm.weight", 64)
        f32(f"blk.{block}.ffn_gate_inp.weight", 8, 64)
        q4(f"blk.{block}.ffn_up_exps.weight", 8, 32, 64)
        q4(f"blk.{block}.ffn_down_exps.weight", 8, 64, 32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q4 = 18 / 32  # bytes an element


def test_a_gguf_file_is_counted_by_its_headers(tmp_path: Path) -> None:
    ledger = gguf_ledger(gguf_file(tmp_path / "a.gguf"), Shape(context=99, kv="fp16"))
    by_what = {launch.what: launch for launch in ledger.launches}
    assert "blk.2.attn_q" not in by_what and "blk.2" not in by_what  # the draft layer
    assert by_what["1 row"].weights == 64 * Q4
    assert by_what["output"].weights == 5000 * 64 * 2 and by_what["output"].family == "head"
    assert by_what["blk.0.ffn_up_exps"].weights == 2 * 32 * 64 * Q4
    assert by_what["blk.1.attn_q"].weights == 256 * 64 * Q4
    attention = [launch for launch in ledger.launches if launch.family == "attention"]
    assert [launch.kv for launch in attention] == [100 * 2 * 2 * 32 * 2]
    state = [launch for launch in ledger.launches if launch.family == "delta"]
    assert [launch.state for launch in state] == [4 * (64 * 16 + 3 * (64 + 2 * 2 * 16))]
    assert "qwen35moe" in ledger.label


def test_headers_alone_are_read_and_a_tied_head_is_whole(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "a.gguf", tied=True)
    whole = gguf_ledger(path, Shape()).launches
    header = path.stat().st_size - sum(tensor.nbytes for tensor in read_header(path).tensors.values())
    path.write_bytes(path.read_bytes()[: header + 100])
    assert gguf_ledger(path, Shape()).launches == whole
    head = next(launch for launch in whole if launch.family == "head")
    assert (head.what, head.weights) == ("token_embd", 5000 * 64 * Q4)


def test_the_command_takes_gguf_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gguf_file(tmp_path / "a.gguf")
    assert main(["ledger", str(path), "--context", "5"]) == 0
    assert "a.gguf (qwen35moe, mostly F16)" in capsys.readouterr().out
    assert main(["ledger", str(path), "--drafts", "1"]) == 2
    assert "a token at a time" in capsys.readouterr().err


def entry(kind: int, content: bytes, key: bytes = b"k") -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + content


def start(tensors: int, pairs: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


HOSTILE = {
    "not a GGUF file": b"GGML" + bytes(20),
    "ends in its header": b"GG",
    "GGUF version 9": start(0, 0, 9),
    "GGUF version 50331648": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensors, more than": start(1 << 60, 0),
    "metadata entries, more than": start(0, 1 << 60),
    "bytes of a string": start(0, 1) + struct.pack("<Q", 1 << 62),
    "ends in its header, at": start(0, 1) + entry(8, struct.pack("<Q", 1000)),
    "unknown type 13": start(0, 1) + entry(13, b""),
    "array of type 9": start(0, 1) + entry(9, struct.pack("<IQ", 9, 1 << 20)),
    "items of an array": start(0, 1) + entry(9, struct.pack("<IQ", 0, 1 << 62)),
    "longer than 512 MB": start(0, 1) + entry(9, struct.pack("<IQ", 12, 1 << 28)),
    "ends in its header, at byte ": start(0, 1) + entry(9, struct.pack("<IQ", 8, 1 << 28)),
    "stands twice": start(0, 2) + 2 * entry(0, b"\0"),
    "9 dimensions": start(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<I", 9),
    "has type 77": start(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 32, 77, 0),
    "not whole blocks": start(1, 0) + struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 31, 2, 0),
    "no general.architecture": start(0, 0),
}  # fmt: skip


@pytest.mark.parametrize("message", HOSTILE)
def test_hostile_gguf_files_are_refused_in_one_line(
    tmp_path: Path, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(HOSTILE[message])
    assert main(["ledger", str(path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and len(error) < 400


def test_any_cut_of_a_header_is_refused(tmp_path: Path) -> None:
    whole = gguf_file(tmp_path / "a.gguf").read_bytes()
    cut = tmp_path / "b.gguf"
    for length in (*range(0, 700, 13), 60_000, 90_000):
        cut.write_bytes(whole[:length])
        with pytest.raises(InputError):
            gguf_ledger(cut, Shape())
