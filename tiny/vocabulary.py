"""The tiny model's tokenizer: byte-level BPE with the family's splitting rule and special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 3072  # rows of the embedding
LEARNED = 3024  # byte and merged tokens; the special tokens follow, the rest are padding rows

# The order gives the ids. True: control tokens, left out of decoded text; False: visible marks that a parser reads.
SPECIAL = {
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<|vision_start|>": True,
    "<|vision_end|>": True,
    "<|image_pad|>": True,
    "<|video_pad|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
}
TOKEN_ID = {token: LEARNED + at for at, token in enumerate(SPECIAL)}

# The family's rule, so that every loader of the family cuts text alike: contractions, words, single digits,
# punctuation, line ends, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly ``LEARNED`` learned tokens, then :data:`SPECIAL`. Deterministic in ``texts``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != LEARNED:
        raise SystemExit(
            f"tokenizer: {tokenizer.get_vocab_size()} tokens learned, {LEARNED} wanted: more text is needed"
        )
    tokenizer.add_tokens([AddedToken(token, special=control, normalized=False) for token, control in SPECIAL.items()])
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """``tokenizer_config.json``; ``<|im_end|>`` ends a chat turn, ``<|endoftext|>`` pads."""
    added = {
        str(TOKEN_ID[token]): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": control,
        }
        for token, control in SPECIAL.items()
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=1) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_bytes(CHAT_TEMPLATE.read_bytes())
