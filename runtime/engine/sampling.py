"""Choosing tokens for one answer: its parameters, its history, and random numbers that depend on nothing else."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels import reference as ops
from ..messages import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from .constraint import Constraint

MAX_LOGPROBS = 21  # the chosen token and twenty more
# Bounds that keep adjusted logits finite in float32, far beyond any use.
MAX_SHIFT = 1000
MAX_REPETITION = 100


class Purpose(IntEnum):
    """What a random number at a position is for; each gets its own stream."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def fault_of(params: SamplingParams, vocabulary: int) -> str | None:
    """What is wrong with the parameters, None if nothing is."""
    if not math.isfinite(params.temperature) or params.temperature < 0:
        return f"temperature is {params.temperature}, expected 0 or more."
    if params.top_k < 0:
        return f"top_k is {params.top_k}, expected 0 (all) or more."
    if not 0 < params.top_p <= 1:
        return f"top_p is {params.top_p}, expected more than 0 and at most 1."
    if not 0 <= params.min_p <= 1:
        return f"min_p is {params.min_p}, expected 0 to 1."
    if not 1 / MAX_REPETITION <= params.repetition_penalty <= MAX_REPETITION:
        return f"repetition_penalty is {params.repetition_penalty}, expected {1 / MAX_REPETITION} to {MAX_REPETITION}."
    for name, value in (("presence", params.presence_penalty), ("frequency", params.frequency_penalty)):
        if not abs(value) <= MAX_SHIFT:
            return f"{name}_penalty is {value}, expected -{MAX_SHIFT} to {MAX_SHIFT}."
    if not 0 <= params.logprobs <= MAX_LOGPROBS:
        return f"logprobs is {params.logprobs}, expected 0 to {MAX_LOGPROBS}."
    if not 0 <= params.seed < 1 << 64:
        return f"seed is {params.seed}, expected an unsigned 64-bit number."
    for token, bias in params.logit_bias.items():
        if not 0 <= token < vocabulary or not abs(bias) <= MAX_SHIFT:
            return f"logit_bias {bias} for token {token}: expected -{MAX_SHIFT} to {MAX_SHIFT} for an id below {vocabulary}."
    return None


class Sampler:
    """Draws the tokens of one answer. Logits are those of the `vocabulary` ids that may be drawn.

    A constraint takes the tokens that may not come next out of every distribution, the target's and the drafts' alike:
    speculation is then lossless for the constrained distribution. Choosing raises GrammarFault where nothing may come.
    """

    def __init__(
        self, params: SamplingParams, prompt: list[int], vocabulary: int, constraint: Constraint | None = None
    ) -> None:
        self.params = params
        self._constraint = constraint
        self._penalised = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        self._bias: Tensor | None = None
        if params.logit_bias:
            self._bias = torch.zeros(vocabulary)
            self._bias[list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()))
        self._seen = torch.zeros(vocabulary, dtype=torch.bool)
        self._seen[prompt] = True
        self._counts = torch.zeros(vocabulary)

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0

    def accept(self, token: int) -> None:
        """Count a token as part of the answer. The constraint gets to know it from the lane."""
        self._seen[token] = True
        self._counts[token] += 1

    def adjusted(self, logits: Tensor, drafted: list[int]) -> Tensor:
        """Logits [V] after bias, penalties and constraint, as if the `drafted` tokens stood at the answer's end."""
        if self._penalised or self._bias is not None:
            logits = self._shifted(logits, drafted)
        if self._constraint is not None:
            logits = logits.masked_fill(~self._constraint.mask(drafted), -math.inf)
        return logits

    def _shifted(self, logits: Tensor, drafted: list[int]) -> Tensor:
        seen, counts = self._seen, self._counts
        if drafted and self._penalised:
            seen, counts = seen.clone(), counts.clone()
            for token in drafted:
                seen[token] = True
                counts[token] += 1
        return ops.adjust_logits(
            logits,
            seen,
            counts,
            bias=self._bias,
            repetition=self.params.repetition_penalty,
            presence=self.params.presence_penalty,
            frequency=self.params.frequency_penalty,
        )

    def distribution(self, logits: Tensor, drafted: list[int]) -> Tensor:
        """Probabilities float64 [V] of the next token; temperature above 0."""
        p = self.params
        return ops.distribution(self.adjusted(logits, drafted), p.temperature, p.top_k, p.top_p, p.min_p)

    def choose(self, logits: Tensor, position: int, purpose: Purpose, drafted: list[int]) -> tuple[int, Tensor | None]:
        """The token at `position`, and the distribution it was drawn from (None: greedy)."""
        if self.is_greedy:
            return ops.greedy(self.adjusted(logits, drafted)), None
        probabilities = self.distribution(logits, drafted)
        return ops.draw(probabilities, self.random(position, purpose)), probabilities

    def random(self, position: int, purpose: Purpose) -> float:
        """The number in [0, 1) for a position of this answer."""
        return ops.uniform(self.params.seed, position, purpose)

    def logprob(self, logits: Tensor, token: int) -> TokenLogprob:
        """The entry of `token` under the model's own logits [V]."""
        value, top = ops.log_probabilities(logits, token, self.params.logprobs - 1)
        return TokenLogprob(token, value, top)
