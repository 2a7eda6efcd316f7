"""Lossless speculation: which drafts stand, and what comes after them.

Greedy answers keep a draft while it is the token that would have been chosen. Sampled answers keep draft d with
probability min(1, p(d) / q(d)) and draw the first refused token from max(p - q, 0), normalised (Leviathan et al. 2023),
so that every token has the target's distribution p whatever the draft's distribution q was.
"""

from dataclasses import dataclass

from torch import Tensor

from ...kernels import reference as ops
from .sampling import Purpose, Sampler

MAX_DRAFTS = 5


@dataclass(frozen=True)
class Draft:
    """Drafted tokens and the distribution each was drawn from; None: certain to be this token (greedy or forced)."""

    tokens: list[int]
    distributions: list[Tensor | None]

    @staticmethod
    def forced(tokens: list[int]) -> "Draft":
        """Drafts that were given, not drawn."""
        return Draft(tokens, [None] * len(tokens))


@dataclass(frozen=True)
class Verdict:
    """tokens: the drafts that stand, then one token of the target's own; `accepted` counts the former."""

    tokens: list[int]
    accepted: int


def judge(sampler: Sampler, logits: Tensor, draft: Draft, position: int) -> Verdict:
    """Decide on a draft. logits [1 + drafts, V]: row j is the target's for the token at index `position` + j."""
    for index, (token, source) in enumerate(zip(draft.tokens, draft.distributions, strict=True)):
        before = draft.tokens[:index]
        if sampler.is_greedy:
            chosen, _ = sampler.choose(logits[index], position + index, Purpose.SAMPLE, before)
            if chosen != token:
                return Verdict([*before, chosen], index)
            continue
        target = sampler.distribution(logits[index], before)
        drafted = 1.0 if source is None else float(source[token])
        if sampler.random(position + index, Purpose.ACCEPT) * drafted < float(target[token]):
            continue
        if source is None:
            source = target.new_zeros(len(target))
            source[token] = 1.0
        rest = ops.residual(target, source)
        return Verdict([*before, ops.draw(rest, sampler.random(position + index, Purpose.RESIDUAL))], index)
    count = len(draft.tokens)
    last, _ = sampler.choose(logits[count], position + count, Purpose.SAMPLE, draft.tokens)
    return Verdict([*draft.tokens, last], count)
