"""No page is lost, shared or read after it was given back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duovolt.runtime.engine.pages import PAGE, PagedKV, pages_for


class Pool(RuleBasedStateMachine):
    """Claims and releases in any order, against a model that only counts."""

    PAGES, LANES = 9, 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagedKV(1, 1, 2, self.PAGES, self.LANES)
        self.held: dict[int, int] = {}

    @rule(lane=st.integers(0, LANES - 1), tokens=st.integers(1, 5 * PAGE))
    def claim(self, lane: int, tokens: int) -> None:
        if lane in self.held:
            return
        count = pages_for(tokens)
        fits = count <= self.PAGES - sum(self.held.values())
        assert self.pool.claim(lane, tokens) == fits
        if fits:
            self.held[lane] = count
            # Every slot of the lane is marked: a page shared with another lane would show there.
            self.pool.keys[0].flatten(0, 1)[self.pool.slots(lane, 0, tokens)] = float(lane + 1)

    @rule(lane=st.integers(0, LANES - 1))
    def release(self, lane: int) -> None:
        for page in self.pool.table(lane).tolist():
            self.pool.keys[0][page] = 0.0
        self.pool.release(lane)
        self.held.pop(lane, None)

    @invariant()
    def every_page_has_one_owner(self) -> None:
        tables = [self.pool.table(lane).tolist() for lane in range(self.LANES)]
        pages = [page for table in tables for page in table]
        assert len(pages) == len(set(pages)) == self.PAGES - self.pool.free_pages
        assert all(0 <= page < self.PAGES for page in pages)
        for lane, table in enumerate(tables):
            assert len(table) == self.held.get(lane, 0)
            assert all(set(self.pool.keys[0][page].unique().tolist()) <= {0.0, lane + 1.0} for page in table)


Pool.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestPool = Pool.TestCase


@given(start=st.integers(0, 200), count=st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_slots_are_the_tokens_places(start: int, count: int) -> None:
    pool = PagedKV(1, 1, 2, 8, 2)
    assert pool.claim(1, 100) and pool.claim(0, 320)
    slots = pool.slots(0, start, count).tolist()
    table = pool.table(0).tolist()
    assert slots == [table[t // PAGE] * PAGE + t % PAGE for t in range(start, start + count)]
    assert len(set(slots)) == count


def test_growing_past_the_claim_is_caught() -> None:
    pool = PagedKV(1, 1, 2, 8, 1)
    assert pool.claim(0, 64)
    with pytest.raises(AssertionError, match="outgrew"):
        pool.slots(0, 60, 5)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 12)), min_size=1, max_size=7),
    lanes=st.integers(1, 4),
    drafts=st.integers(0, 3),
    cancels=st.sets(st.integers(0, 6), max_size=3),
)
@settings(max_examples=12, deadline=None)
def test_an_engine_gives_every_page_back(tools, lengths, lanes: int, drafts: int, cancels: set[int]) -> None:
    torch.set_num_threads(1)
    source = tools.source(seed=51, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    engine = tools.engine(source, lanes=lanes, drafts=drafts, pages=4, max_context=128, prefill_chunk=32)
    requests = [tools.request(n, [n + 1] * prompt, answer) for n, (prompt, answer) in enumerate(lengths)]
    steps = iter(sorted(cancels))

    def disturb(running) -> None:
        held = [page for lane in range(lanes) for page in running.cache.kv.table(lane).tolist()]
        assert len(held) == len(set(held)) == 4 - running.cache.kv.free_pages
        if (number := next(steps, None)) is not None:
            running.cancel(number)

    run = tools.drive(engine, *requests, after_step=disturb)
    assert engine.cache.free_pages == 8
    assert engine.cache.lengths == [0] * lanes
    for n, (_, answer) in enumerate(lengths):
        assert run.finish(n) in ("length", "cancelled")
        if run.finish(n) == "length":
            assert len(run.tokens[n]) == answer
