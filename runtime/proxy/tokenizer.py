"""Text to ids and back, exactly: a token is a string of bytes, an answer is the bytes of its tokens.

The `tokenizers` library is used directly: the proxy then starts without torch, and the byte of every token is at hand,
which incremental decoding needs. Only byte-level BPE is accepted (the family's); anything else is refused at start.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from ...checkpoint.directory import MAX_JSON, read_json, require_file
from ...checkpoint.errors import InputError
from ...model.config import MAX_EXTENT
from ..rank.identity import TOKENIZER
from .schema import GenerationDefaults

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"


# Normaliser -> bytes of text that one byte of its result comes from, at most. NFC: the iota of U+1FBE with two marks
# (7 bytes) becomes U+0390 (2 bytes); no other composition shrinks more.
_SHRINK = {None: 1, "NFC": 4}


def _keeps_text(splitter: dict[str, Any] | None) -> bool:
    """True if the pre-tokenizer drops no text."""
    match (splitter or {}).get("type"):
        case None | "ByteLevel" | "Digits":
            return True
        case "Split":
            return splitter is not None and splitter.get("behavior") != "Removed"
        case "Sequence":
            return splitter is not None and all(map(_keeps_text, splitter.get("pretokenizers", [])))
    return False


def _byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in a byte-level vocabulary, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


class TextTokenizer:
    """The model's tokenizer, read from `file`. `stop_ids` end an answer; `size` is one more than its largest id."""

    def __init__(self, directory: Path) -> None:
        path = self.file = directory / TOKENIZER
        try:
            require_file(path, MAX_JSON, "a tokenizer")
            self._tokenizer = Tokenizer.from_file(str(path))
            document = json.loads(path.read_bytes())
        except InputError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise InputError(f"{path}: not a tokenizer ({error}).") from error
        if not isinstance(document, dict):
            raise InputError(f"{path}: not a JSON object.")
        self._document: dict[str, Any] = document
        decoder = document.get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            raise InputError(f"{path}: decoder {decoder.get('type')!r}; only byte-level BPE tokenizers are supported.")
        self._added = {entry["id"]: entry["content"] for entry in document.get("added_tokens", [])}
        self._special = {entry["id"] for entry in document.get("added_tokens", []) if entry.get("special")}
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 0 < self.size <= MAX_EXTENT:
            raise InputError(f"{path}: its largest id is {self.size - 1}, expected 0 to {MAX_EXTENT - 1}.")
        for token, content in self._added.items():
            if (given := self._tokenizer.token_to_id(content)) != token:  # the library numbers gaps in its own way
                raise InputError(
                    f"{path}: the added token {content!r} has id {token}, the tokenizer library gives it {given}. "
                    "Take the file of the model's makers."
                )
        self.settings = _read_optional(directory / "tokenizer_config.json")
        self.generation = _read_generation(directory / "generation_config.json")
        self.stop_ids = self._find_stop_ids()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; added tokens written out in it become their ids, nothing is put around it."""
        # a batch of one: only the batch call lets other threads run, and a long text takes seconds
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return ids

    @cached_property
    def most_bytes_per_token(self) -> int | None:
        """UTF-8 bytes of text that one token can stand for at most; None where the tokenizer may drop text."""
        shrink = _SHRINK.get((self._document.get("normalizer") or {}).get("type"))
        letters = self._tokenizer.get_vocab(with_added_tokens=False)
        swallows = any(entry.get("lstrip") or entry.get("rstrip") for entry in self._document.get("added_tokens", []))
        if shrink is None or swallows or not _keeps_text(self._document.get("pre_tokenizer")):
            return None
        if any(letter not in letters for letter in _byte_letters()):
            return None
        return shrink * max(map(len, self._table))

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for an id beyond the vocabulary."""
        return self._table[token] if 0 <= token < len(self._table) else b""

    def shown_bytes(self, token: int) -> bytes:
        """As token_bytes, but nothing for special tokens, which are not part of an answer's text."""
        return b"" if token in self._special else self.token_bytes(token)

    def decode(self, tokens: list[int]) -> str:
        """Text of all tokens, special ones written out."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", errors="replace")

    def marker(self, text: str) -> int | None:
        """Id of the added token `text`, None if the vocabulary has none."""
        return next((token for token, content in self._added.items() if content == text), None)

    @cached_property
    def _table(self) -> list[bytes]:
        letters = _byte_letters()
        table = [b""] * self.size
        for text, token in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if all(letter in letters for letter in text):
                table[token] = bytes(letters[letter] for letter in text)
        for token, content in self._added.items():
            table[token] = content.encode()
        return table

    def _find_stop_ids(self) -> list[int]:
        named = self.generation.eos_token_id
        ids = set(named if isinstance(named, list) else [] if named is None else [named])
        eos = self.settings.get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        if isinstance(text, str) and (token := self._tokenizer.token_to_id(text)) is not None:
            ids.add(token)
        return sorted(ids)


def _read_generation(path: Path) -> GenerationDefaults:
    try:
        return msgspec.convert(_read_optional(path), GenerationDefaults)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise InputError(f"{path}: {where.rstrip('`')}: {what}. Correct the field or take it out.") from error


def _read_optional(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    document = read_json(path)
    if not isinstance(document, dict):
        raise InputError(f"{path}: not a JSON object.")
    return document
