"""One rank and several give the same answer; ranks of one model hold the same bits where they must."""

from typing import Any

import pytest
import torch
from torch import Tensor

from duovolt.runtime.engine.cache import Cache
from duovolt.runtime.engine.model import Batch, Model, Segment
from duovolt.runtime.engine.weights import load_weights
from duovolt.runtime.messages import SamplingParams
from duovolt.runtime.parallel.base import Collective, SoloCollective

CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (2, {"linear_num_value_heads": 6, "linear_value_head_dim": 16}),
    (2, {"num_key_value_heads": 1}),
    (2, {"tie_word_embeddings": True}),
    (4, {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
]


def logits_of(source, collective: Collective, tokens: Tensor, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Logits of the model and of its MTP layer."""
    weights = load_weights(source)
    model, cache = Model(weights, collective, 256), Cache.for_one(weights, 128)
    count = len(tokens)
    hidden = model.forward(Batch(tokens, [Segment(0, 0, count)], torch.arange(count).expand(3, -1), by_rows), cache)
    batch = Batch(tokens[1:], [Segment(0, 0, count - 1)], torch.arange(count - 1).expand(3, -1), by_rows)
    return model.logits(hidden), model.logits(model.draft(batch, hidden[:-1], cache))


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize(("size", "shape"), CASES)
def test_logits_of_one_rank_and_of_several(tools, size: int, shape: dict[str, Any], by_rows: bool) -> None:
    """R11: two widths agree within a bound, as sums are rounded in another order; one width has its bits every time."""
    source = tools.source(seed=7, **shape)
    tokens = torch.randint(128, (70,), generator=torch.Generator().manual_seed(3))
    alone = logits_of(source, SoloCollective(), tokens, by_rows)
    shared = tools.ranks(size, lambda c: logits_of(tools.cut(source, size, c.rank), c, tokens, by_rows))
    again = tools.ranks(size, lambda c: logits_of(tools.cut(source, size, c.rank), c, tokens, by_rows))
    for first_run, second_run in zip(shared, again, strict=True):
        assert all(torch.equal(*logits) for logits in zip(first_run, second_run, strict=True))
    for found in shared:
        for wanted, logits, first in zip(alone, found, shared[0], strict=True):
            assert (logits - wanted).abs().max() < 1e-4
            assert torch.equal(logits, first), "all ranks see the same bits"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_two_ranks_answer_in_step(tools, temperature: float) -> None:
    source = tools.source(seed=8)
    requests = [
        tools.request(n, list(range(n, n + 20 * n)), 12, sampling=SamplingParams(temperature=temperature, seed=n))
        for n in (1, 2, 3)
    ]

    def work(collective: Collective) -> Any:
        engine = tools.engine(tools.cut(source, 2, collective.rank), collective, lanes=2, drafts=3, prefill_chunk=16)
        return tools.drive(engine, *requests)

    first, second = tools.ranks(2, work)
    assert first.records == second.records
    assert first.tokens == second.tokens
    assert all(len(tokens) == 12 for tokens in first.tokens.values())
    if temperature == 0.0:
        alone = tools.drive(tools.engine(source, lanes=2, drafts=3, prefill_chunk=16), *requests)
        assert alone.tokens == first.tokens
