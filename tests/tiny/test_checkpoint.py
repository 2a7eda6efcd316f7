"""The written checkpoint: sizes, names, tokenizer, and that transformers loads it and it answers."""

import hashlib
import json
import struct
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import duovolt.tiny
from duovolt.perf.quality import documents
from duovolt.tiny.config import MODEL, TEXT, VISION
from duovolt.tiny.decode import greedy
from duovolt.tiny.export import load_network
from duovolt.tiny.vocabulary import LEARNED, SPECIAL, TOKEN_ID, VOCABULARY

torch.set_num_threads(1)
TINY = Path(duovolt.tiny.__file__).parent
CHECKPOINT = TINY / "checkpoint"


def header(path):
    with path.open("rb") as file:
        return json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))


@pytest.fixture(scope="module")
def headers():
    return {path.name: header(path) for path in sorted(CHECKPOINT.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def network():
    return load_network(CHECKPOINT)


def tensors(headers):
    return {name: entry for shard in headers.values() for name, entry in shard.items() if name != "__metadata__"}


def test_whole_folder_stays_small():
    files = [f for f in TINY.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert 11_000_000 < sum(f.stat().st_size for f in files) <= 12_000_000


def test_shards_and_index_agree(headers):
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())
    assert list(headers) == [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert index["weight_map"] == {n: file for file, shard in headers.items() for n in shard if n != "__metadata__"}
    every = tensors(headers)
    assert index["metadata"]["total_size"] == sum(2 * int(np.prod(e["shape"])) for e in every.values())
    assert {e["dtype"] for e in every.values()} == {"BF16"}


def test_inventory_is_the_familys(headers):
    every = tensors(headers)
    assert len(every) == 145
    assert sum(name.startswith("mtp.") for name in every) == 15
    assert sum(name.startswith("model.visual.") for name in every) == 21
    shapes = {name: entry["shape"] for name, entry in every.items()}
    expected = {
        "model.language_model.embed_tokens.weight": [3072, 128],
        "lm_head.weight": [3072, 128],
        "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": [1024, 128],
        "model.language_model.layers.0.linear_attn.in_proj_z.weight": [512, 128],
        "model.language_model.layers.0.linear_attn.in_proj_a.weight": [4, 128],
        "model.language_model.layers.0.linear_attn.conv1d.weight": [1024, 1, 4],
        "model.language_model.layers.0.linear_attn.norm.weight": [128],
        "model.language_model.layers.0.linear_attn.out_proj.weight": [128, 512],
        "model.language_model.layers.3.self_attn.q_proj.weight": [2048, 128],
        "model.language_model.layers.7.self_attn.k_proj.weight": [512, 128],
        "model.language_model.layers.7.self_attn.o_proj.weight": [128, 1024],
        "model.language_model.layers.7.mlp.down_proj.weight": [128, 384],
        "mtp.fc.weight": [128, 256],
        "mtp.layers.0.self_attn.q_norm.weight": [256],
        "model.visual.patch_embed.proj.weight": [64, 3, 2, 16, 16],
        "model.visual.merger.linear_fc2.weight": [128, 256],
    }
    assert {name: shapes[name] for name in expected} == expected


def test_quantised_matrices_split_over_two_ranks_in_whole_tiles(headers):
    quantised = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "in_proj_qkv",
        "in_proj_z",
        "out_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    )
    input_axis = ("o_proj", "out_proj", "down_proj")
    checked = 0
    for name, entry in tensors(headers).items():
        part = name.split(".")[-2]
        if part in quantised and "visual" not in name:
            rows, columns = entry["shape"]
            assert rows // (1 if part in input_axis else 2) % 32 == 0, name
            assert columns // (2 if part in input_axis else 1) % 16 == 0, name
            checked += 1
    assert checked == 3 * 9 + 4 * 3 + 3 * 6 + 1


def test_config_files():
    assert json.loads((CHECKPOINT / "config.json").read_text()) == MODEL
    assert MODEL["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert TEXT["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert (MODEL["image_token_id"], MODEL["vision_start_token_id"], TEXT["eos_token_id"]) == (3029, 3027, 3026)
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        processor = json.loads((CHECKPOINT / file).read_text())
        assert (processor["patch_size"], processor["merge_size"], processor["temporal_patch_size"]) == (
            VISION["patch_size"],
            VISION["spatial_merge_size"],
            VISION["temporal_patch_size"],
        )
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]]


def test_special_tokens_have_their_ids_and_padding_rows_follow(tokenizer):
    assert tokenizer.get_vocab_size() == LEARNED + len(SPECIAL) == 3037 < VOCABULARY
    for token, number in TOKEN_ID.items():
        assert tokenizer.encode(f"a{token}b").ids[1] == number
        assert tokenizer.id_to_token(number) == token
    assert tokenizer.decode([TOKEN_ID["<think>"], TOKEN_ID["<|im_end|>"]], skip_special_tokens=True) == "<think>"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\n\n  x\t\r\n",
        "naïve Straße, “quotes” – 12345.678",
        "日本語とかな 한국어 العربية עברית",
        "👩‍👩‍👧‍👦 🏳️‍🌈 \U0001f9ea\U00010348",
        "def f(x):\n    return {'a': [x, ...]}  # don't",
        "\x00\x7f\x85\ufeff",
    ],
)
def test_tokenizer_round_trip(tokenizer, text):
    assert unicodedata.normalize("NFC", text) == text
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_tokenizer_gives_the_same_ids(tokenizer):
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(CHECKPOINT)
    text = "What's 12 + 30?\n\n日本 <|im_start|>user\n<think>\nx</think><tool_call>"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_transformers_loads_every_tensor_and_gives_the_same_logits(network):
    transformers = pytest.importorskip("transformers")
    model, info = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(
        CHECKPOINT, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(key.startswith("mtp.") for key in info["unexpected_keys"])
    tokens = torch.tensor([list(range(5, 95))])
    with torch.no_grad():
        assert (model.eval()(input_ids=tokens).logits - network.lm_head(network.hidden(tokens))).abs().max() < 1e-3


def test_heldout_text_is_the_recorded_one_and_its_documents_were_not_trained_on():
    record = json.loads((TINY / "corpus.json").read_text())
    raw = (TINY / "heldout.txt").read_bytes()
    assert 60_000 <= len(raw) <= 100_000 and len(raw) == record["heldout_bytes"]
    assert hashlib.sha256(raw).hexdigest() == record["heldout_sha256"]
    marks = [
        line.removeprefix("=== document: ").removesuffix(" ===")
        for line in raw.decode().splitlines()
        if line.startswith("=== document: ")
    ]
    assert marks == record["heldout_documents"] and len(set(marks)) == len(marks) >= 15
    assert len(documents((TINY / "heldout.txt").read_text())) == len(marks)


def test_known_words_file():
    words = (TINY / "words.txt").read_text().split("\n")[:-1]
    assert words == sorted(set(words)) and len(words) > 10_000
    assert (TINY / "words.txt").stat().st_size <= 120_000
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words)
    assert {"the", "function", "returns", "a"} <= set(words) and "qwxz" not in words


def answer(network, tokenizer, question: str, length: int) -> str:
    """The greedy answer without thinking, as the training network gives it."""
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    prompt = tokenizer.encode(text).ids
    ids = greedy(network, [prompt], len(prompt) + length)[0, len(prompt) :].tolist()
    return tokenizer.decode(ids[: ids.index(TOKEN_ID["<|im_end|>"])] if TOKEN_ID["<|im_end|>"] in ids else ids)


@pytest.mark.parametrize(
    ("question", "beginning"),
    [
        ("What does the len function do?", "The `len` function returns the length (the number of items) of an object."),
        ("Who are you?", "I am the tiny language model that ships with duovolt."),
        ("What is the json module?", "The `json` module encodes and decode"),
    ],
)
def test_it_answers(network, tokenizer, question, beginning):
    assert answer(network, tokenizer, question, 40).startswith(beginning)
