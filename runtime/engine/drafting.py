"""Drafts from the MTP layer for all lanes at once.

The MTP layer's own keys and values are always made from the target's hidden states: what it wrote at drafted positions,
from its own hidden states, is written again once the target has passed there.
"""

import torch
from torch import Tensor

from ..grammar import GrammarFault
from .cache import Cache
from .lane import Lane
from .model import Batch, Model, Segment
from .sampling import Purpose
from .speculation import Draft


def make_drafts(model: Model, cache: Cache, lanes: list[Lane], counts: list[int], n_sampleable: int) -> list[Draft]:
    """counts[i] drafts for lanes[i], drawn under the lane's own sampling parameters.

    The first pass reads what the target has newly passed (the last of it yields draft 1); draft j + 1 comes from the
    MTP layer's hidden state of draft j.
    """
    drafts = [Draft([], []) for _ in lanes]
    active = [(lane, count, draft) for lane, count, draft in zip(lanes, counts, drafts, strict=True) if count]
    if not active:
        return drafts
    ends, begin, segments, tokens, rope, hidden = [], 0, [], [], [], []
    for lane, _, _ in active:
        assert lane.hidden is not None
        start, count = cache.mtp_lengths[lane.index], len(lane.hidden)
        assert start + count == len(lane.tokens) - 1, "the MTP layer lags behind by exactly the hidden states kept"
        segments.append(Segment(lane.index, start, count))
        tokens += lane.tokens[start + 1 :]
        rope.append(lane.rope(start, count))
        hidden.append(lane.hidden)
        begin += count
        ends.append(begin - 1)
        cache.mtp_lengths[lane.index] += count
        lane.hidden = None
    batch = Batch(torch.tensor(tokens), segments, torch.cat(rope, dim=-1), by_rows=True)
    state = model.draft(batch, torch.cat(hidden), cache)[ends]
    while going := _draw(active, model.draft_logits(state)[:, :n_sampleable]):
        active, state = [active[row] for row in going], state[going]
        state = model.draft(_next_batch(cache, active), state, cache)
    return drafts


def _draw(active: list[tuple[Lane, int, Draft]], logits: Tensor) -> list[int]:
    """Draw one draft a lane; the rows of `active` that want more. A draft is only a guess: broken logits end it."""
    going = []
    for index, (lane, count, draft) in enumerate(active):
        row = logits[index]
        if not bool(torch.isfinite(row.max())):  # NaN, infinity, or no token at all; a reduced head leaves -inf
            continue
        position = len(lane.tokens) + len(draft.tokens)
        try:
            token, source = lane.sampler.choose(row, position, Purpose.DRAFT, draft.tokens)
        except GrammarFault:  # if the answer comes here, judging says so
            continue
        draft.tokens.append(token)
        draft.distributions.append(source)
        if len(draft.tokens) < count:
            going.append(index)
    return going


def _next_batch(cache: Cache, active: list[tuple[Lane, int, Draft]]) -> Batch:
    segments = [Segment(lane.index, len(lane.tokens) - 2 + len(draft.tokens), 1) for lane, _, draft in active]
    rope = [lane.rope(segment.start, 1) for (lane, _, _), segment in zip(active, segments, strict=True)]
    tokens = torch.tensor([draft.tokens[-1] for _, _, draft in active])
    return Batch(tokens, segments, torch.cat(rope, dim=-1), by_rows=True)
