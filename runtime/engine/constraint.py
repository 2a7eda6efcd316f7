"""An answer held to a grammar: the tokens that may come next, also behind drafts that are not yet accepted."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..grammar import Matcher
from ..messages import Grammar


class Constraint:
    """Follows the tokens of one answer; a function of them and the grammar alone, so ranks never differ.

    Before `grammar.after` everything but the end of the answer is allowed. Masks of a round's drafts are kept until the
    next token is accepted: drafting and judging ask for the same ones.
    """

    def __init__(self, grammar: Grammar, tokenizer: Path, vocabulary: int) -> None:
        self._grammar = grammar
        self._matcher = Matcher(grammar.text, tokenizer, vocabulary, grammar.ends)
        self._active = grammar.after is None
        self._ended = False
        self._free = torch.ones(vocabulary, dtype=torch.bool)
        self._waiting = self._free.clone()
        self._waiting[grammar.ends] = False
        self._masks: dict[tuple[int, ...], Tensor] = {}

    def accept(self, token: int) -> None:
        """The answer has got a token."""
        self._masks.clear()
        self._active, self._ended, _ = self._follow([token])

    def mask(self, drafted: list[int]) -> Tensor:
        """bool [V]: what may follow the answer and `drafted`. Behind an end, where nothing counts, everything may.

        Raises GrammarFault if nothing may follow.
        """
        key = tuple(drafted)
        if key not in self._masks:
            active, ended, taken = self._follow(drafted)
            try:
                self._masks[key] = (
                    self._free if ended else torch.from_numpy(self._matcher.allowed()) if active else self._waiting
                )
            finally:
                self._matcher.back(taken)
        return self._masks[key]

    def _follow(self, tokens: list[int]) -> tuple[bool, bool, int]:
        """Go over tokens: whether the grammar holds behind them, whether the answer ended, how many the matcher took."""
        active, ended, taken = self._active, self._ended, 0
        for token in tokens:
            if ended:
                break
            if not active:
                active = token == self._grammar.after
            elif token in self._grammar.ends or not self._matcher.take([token]):
                ended = True  # a token that is not allowed is never accepted: only forced drafts come here
            else:
                taken += 1
        return active, ended, taken
