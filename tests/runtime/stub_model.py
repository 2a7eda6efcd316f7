"""A tokenizer directory and scripts for servers without a model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MERGES = ["Hello", " world", " beta", " gamma"]

TEMPLATE = """\
{%- if divisor is defined %}{{ 1 // divisor }}{% endif %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('unexpected role') }}{% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% else %}<think>
{% endif %}{% endif %}"""


def byte_letters() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def make_tokenizer() -> Tokenizer:
    vocabulary = {letter: number for number, letter in enumerate(byte_letters())}
    merges: list[tuple[str, str]] = []
    for word in MERGES:
        letters = word.replace(" ", "Ġ")
        joined = letters[0]
        for letter in letters[1:]:
            merges.append((joined, letter))
            joined += letter
            vocabulary.setdefault(joined, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    return tokenizer


def make_directory(directory: Path) -> Path:
    """A scripted rank's directory: tokenizer, template, nothing else."""
    directory.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def make_ranks(folder: Path, size: int) -> Path:
    for rank in range(size):
        make_directory(folder / f"rank-{rank}-of-{size}")
    return folder


def ids(text: str) -> list[int]:
    return make_tokenizer().encode(text, add_special_tokens=False).ids


def byte_ids(data: bytes) -> list[int]:
    """One token a byte, so that characters can be cut anywhere."""
    from duovolt.runtime.proxy.tokenizer import _byte_letters

    letters = {byte: letter for letter, byte in _byte_letters().items()}
    tokenizer = make_tokenizer()
    return [tokenizer.token_to_id(letters[byte]) for byte in data]


def write_script(path: Path, *answers: dict) -> Path:
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path


def blocks(text: str, size: int = 1, *, end: bool = True) -> list[list[int]]:
    """The ids of `text` (and the end of turn) in blocks of `size`."""
    tokens = ids(text) + (ids("<|im_end|>") if end else [])
    return [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
