"""No page is lost, shared without need or read after it was given back; a lane gets the pages it was promised."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from duovolt.runtime.engine.claims import AHEAD, Claims
from duovolt.runtime.engine.kv import PagedKV
from duovolt.runtime.engine.lane import Lane
from duovolt.runtime.engine.pages import PAGE, PagePool, pages_for
from duovolt.runtime.engine.prefix import Prefix
from duovolt.runtime.messages import GenerateRequest, SamplingParams


class Growing(RuleBasedStateMachine):
    """Claims, growth and releases in any order, against a model that only counts."""

    PAGES, LANES = 40, 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.PAGES)
        self.claims = Claims(self.pool)
        self.lanes: dict[int, Lane] = {}

    @rule(index=st.integers(0, LANES - 1), prompt=st.integers(1, 5 * PAGE), answer=st.integers(0, 30 * PAGE))
    def claim(self, index: int, prompt: int, answer: int) -> None:
        if index in self.lanes:
            return
        promised = sum(pages_for(len(lane.request.prompt) + lane.limit) for lane in self.lanes.values())
        claim = self.claims.claim(index, prompt, prompt + answer)
        assert (claim is not None) == (promised + pages_for(prompt + answer) <= self.PAGES)
        if claim is not None:
            request = GenerateRequest(index, [0] * prompt, answer, [], False, SamplingParams())
            lane = self.lanes[index] = Lane(index, request, answer, claim.pages)
            lane.read = prompt

    @rule(index=st.integers(0, LANES - 1), tokens=st.integers(1, 6))
    def answer(self, index: int, tokens: int) -> None:
        lane = self.lanes.get(index)
        for _ in range(30):
            if lane is None or not lane.remaining:
                return
            self.claims.grow(lane)
            total = len(lane.request.prompt) + lane.limit
            assert len(lane.pages) >= pages_for(min(total, lane.length + AHEAD))
            lane.add([0] * tokens)

    @rule(index=st.integers(0, LANES - 1))
    def release(self, index: int) -> None:
        if index in self.lanes:
            self.claims.release(self.lanes.pop(index))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        pages = [page for lane in self.lanes.values() for page in lane.pages]
        assert len(pages) == len(set(pages)) == self.PAGES - self.pool.free
        assert all(0 <= page < self.PAGES for page in pages)


Growing.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestGrowing = Growing.TestCase


def test_the_lowest_free_pages_come_first() -> None:
    pool = PagePool(6)
    first, second = pool.take(2), pool.take(2)
    pool.keep([1])
    pool.drop(first)
    assert (first, second, pool.free, pool.idle) == ([0, 1], [2, 3], 3, 1)
    assert pool.take(3) == [0, 4, 5]
    pool.forget([1])
    assert pool.take(1) == [1] and not pool.idle
    with pytest.raises(AssertionError, match="of 0 free"):
        pool.take(1)


class Kept:
    """Prefixes that may be let go, the first first."""

    def __init__(self, pool: PagePool, *prefixes: Prefix) -> None:
        self.pool, self.left = pool, list(prefixes)

    def evict(self) -> None:
        self.pool.forget(self.left.pop(0).pages)


@pytest.mark.parametrize("pages, enough", [(3, False), (4, True)])
def test_a_page_to_copy_from_makes_no_room_while_it_is_copied(pages: int, enough: bool) -> None:
    pool = PagePool(pages)
    pool.keep(pool.take(2))
    pool.drop([0, 1])
    prefix = Prefix(b"", b"", 2 * PAGE, PAGE, [0, 1], None)  # the first page is shared, the second copied
    claims = Claims(pool, Kept(pool, prefix))  # type: ignore[arg-type]
    claim = claims.claim(0, 3 * PAGE - AHEAD, 3 * PAGE, prefix)
    assert (claim is not None) == enough
    if claim is None:
        assert (pool.free, pool.idle, claims.outstanding) == (pages - 2, 2, 0)
    else:
        assert claim.pages == [0, 2, 3] and claim.copies == [(1, 2)]


@given(start=st.integers(0, 200), count=st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_slots_are_the_tokens_places(start: int, count: int) -> None:
    pool, table = PagedKV(1, 1, 2, 8, 2), [5, 0, 7, 2, 3]
    pool.set_table(0, table)
    slots = pool.slots(0, start, count).tolist()
    assert slots == [table[t // PAGE] * PAGE + t % PAGE for t in range(start, start + count)]
    assert len(set(slots)) == count


def test_growing_past_the_pages_is_caught() -> None:
    pool = PagedKV(1, 1, 2, 8, 1)
    pool.set_table(0, [3])
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
        held = [page for lane in range(lanes) for page in running.executor.cache.kv.table(lane).tolist()]
        assert len(held) == len(set(held)) == 4 - running.free_pages
        if (number := next(steps, None)) is not None:
            running.cancel(number)

    run = tools.drive(engine, *requests, after_step=disturb)
    assert engine.free_pages == 4
    assert engine.executor.cache.lengths == [0] * lanes
    for n, (_, answer) in enumerate(lengths):
        assert run.finish(n) in ("length", "cancelled")
        if run.finish(n) == "length":
            assert len(run.tokens[n]) == answer
