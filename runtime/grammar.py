"""The grammar library behind one door: which tokens may follow, from a grammar and the tokens before.

The library (llguidance) counts its work and has no clock, so two processes with the same version, grammar and tokens
give the same masks, and the same refusals.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # engines without a server do without the library
    from llguidance import LLParserLimits, LLTokenizer


class GrammarFault(Exception):
    """The grammar cannot be followed any further: nothing may come next, or the library's limits are reached."""


@lru_cache(maxsize=2)
def _tokenizer(path: Path, vocabulary: int, ends: tuple[int, ...]) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(str(path), n_vocab=vocabulary, eos_token=list(ends))


def _limits() -> LLParserLimits:
    """Half of the library's own: a mask may take a few milliseconds of every lane's time, not more."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=100_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def prepare(path: Path, vocabulary: int, ends: list[int]) -> None:
    """Read the tokenizer now, so that the first answer with a grammar does not wait for it."""
    _tokenizer(path, vocabulary, tuple(ends))


def grammar_fault(text: str, path: Path, vocabulary: int, ends: list[int]) -> str | None:
    """Why no answer can be held to the grammar; None if one can."""
    try:
        Matcher(text, path, vocabulary, ends).allowed()
    except GrammarFault as fault:
        return str(fault)
    return None


class Matcher:
    """Follows one answer. `path` is the tokenizer's file, `vocabulary` the number of ids, `ends` those that end it."""

    def __init__(self, text: str, path: Path, vocabulary: int, ends: list[int]) -> None:
        from llguidance import LLMatcher

        self._vocabulary = vocabulary
        self._matcher = LLMatcher(
            _tokenizer(path, vocabulary, tuple(ends)),
            LLMatcher.grammar_from_lark(text),
            log_level=0,
            limits=_limits(),
        )
        self._check()

    def allowed(self) -> np.ndarray:
        """bool [vocabulary]: the tokens that may come next, ends among them where the answer may end.

        Raises GrammarFault if there are none.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)
        if not mask.any():
            raise GrammarFault("no token of this model may come next.")
        return mask

    def take(self, tokens: list[int]) -> int:
        """Go on over tokens; how many of them the grammar allows, which are those gone over."""
        return self._matcher.try_consume_tokens(tokens)

    def back(self, count: int) -> None:
        """Undo the last `count` tokens."""
        if count and not self._matcher.rollback(count):
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFault(self._matcher.get_error().strip())
