"""Drafts from the MTP layer for all lanes at once.

The MTP layer's own keys and values are always made from the target's hidden states: what it wrote at drafted positions,
from its own hidden states, is written again once the target has passed there.
"""

import torch
from torch import Tensor

from ..grammar import GrammarFault
from .answering import Answering
from .cache import Cache
from .model import Batch, Model, Segment
from .sampling import Purpose
from .speculation import Draft

Wish = tuple[Answering, int, Draft]  # whose drafts, how many, and those drawn so far


def make_drafts(
    model: Model, cache: Cache, answers: list[Answering], counts: list[int], n_sampleable: int
) -> list[Draft]:
    """counts[i] drafts for answers[i], drawn under its own sampling parameters.

    The first pass reads what the target has newly passed (the last of it yields draft 1); draft j + 1 comes from the
    MTP layer's hidden state of draft j.
    """
    drafts = [Draft([], []) for _ in answers]
    active = [(answer, count, draft) for answer, count, draft in zip(answers, counts, drafts, strict=True) if count]
    if not active:
        return drafts
    ends, begin, segments, tokens, rope, hidden = [], 0, [], [], [], []
    for answer, _, _ in active:
        lane, states = answer.lane, answer.hidden
        assert states is not None
        start, count = cache.mtp_lengths[lane.index], len(states)
        assert start + count == len(lane.tokens) - 1, "the MTP layer lags behind by exactly the hidden states kept"
        segments.append(Segment(lane.index, start, count))
        tokens += lane.tokens[start + 1 :]
        rope.append(lane.rope(start, count))
        hidden.append(states)
        begin += count
        ends.append(begin - 1)
        cache.mtp_lengths[lane.index] += count
        answer.hidden = None
    batch = Batch(torch.tensor(tokens), segments, torch.cat(rope, dim=-1), by_rows=True)
    state = model.draft(batch, torch.cat(hidden), cache)[ends]
    while going := _draw(active, model.draft_logits(state)[:, :n_sampleable]):
        active, state = [active[row] for row in going], state[going]
        state = model.draft(_next_batch(active), state, cache)
    return drafts


def _draw(active: list[Wish], logits: Tensor) -> list[int]:
    """Draw one draft a lane; the rows of `active` that want more. A draft is only a guess: broken logits end it."""
    going = []
    for index, (answer, count, draft) in enumerate(active):
        row = logits[index]
        if not bool(torch.isfinite(row.max())):  # NaN, infinity, or no token at all; a reduced head leaves -inf
            continue
        position = len(answer.lane.tokens) + len(draft.tokens)
        try:
            token, source = answer.sampler.choose(row, position, Purpose.DRAFT, draft.tokens)
        except GrammarFault:  # if the answer comes here, judging says so
            continue
        draft.tokens.append(token)
        draft.distributions.append(source)
        if len(draft.tokens) < count:
            going.append(index)
    return going


def _next_batch(active: list[Wish]) -> Batch:
    lanes = [answer.lane for answer, _, _ in active]
    segments = [
        Segment(lane.index, len(lane.tokens) - 2 + len(draft.tokens), 1)
        for lane, (_, _, draft) in zip(lanes, active, strict=True)
    ]
    rope = [lane.rope(segment.start, 1) for lane, segment in zip(lanes, segments, strict=True)]
    tokens = torch.tensor([draft.tokens[-1] for _, _, draft in active])
    return Batch(tokens, segments, torch.cat(rope, dim=-1), by_rows=True)
