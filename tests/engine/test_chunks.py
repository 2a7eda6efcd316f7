"""Reading prompts in turn: rounds between chunks, short prompts first, long ones not forgotten. Nothing is computed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.runtime.engine.chunks import PATIENCE, chunk_end
from duovolt.runtime.engine.engine import Engine
from duovolt.runtime.engine.executor import Outcome
from duovolt.runtime.engine.lane import Lane
from duovolt.runtime.engine.pages import PAGE
from duovolt.runtime.messages import GenerateRequest, SamplingParams, TokenLogprob


class Counting:
    """An executor whose answers are a count; its states are lengths, and it checks that it is called as promised."""

    pages, state_bytes, overflows, facts = 4096, 1, 0, {"kv": "none"}

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int, int]] = []
        self.lengths: dict[int, int] = {}

    def open(self, lane: Lane) -> None:
        assert lane.index not in self.lengths
        self.lengths[lane.index] = 0

    def look(self, lane: Lane, start: int, count: int) -> bool:
        return True

    def prefill(self, lane: Lane, start: int, count: int) -> list[TokenLogprob]:
        assert count > 0 and start == self.lengths[lane.index] and len(lane.pages) * PAGE >= start + count
        self.lengths[lane.index] += count
        self.chunks.append((lane.request.request_id, start, count))
        return []

    def first(self, lane: Lane) -> Outcome:
        assert self.lengths[lane.index] == len(lane.request.prompt)
        return Outcome([0])

    def round(self, lanes: list[Lane]) -> list[Outcome]:
        for lane in lanes:
            self.lengths[lane.index] += 1
        return [Outcome([lane.produced]) for lane in lanes]

    def grow(self, lane: Lane) -> None:
        pass

    def close(self, lane: Lane) -> None:
        del self.lengths[lane.index]

    def save(self, lane: Lane) -> int:
        assert self.lengths[lane.index] == lane.length
        return lane.length

    def load(self, lane: Lane, state: object) -> None:
        assert isinstance(state, int)
        self.lengths[lane.index] = state

    def copy_page(self, source: int, target: int) -> None:
        assert source != target

    def seen(self) -> bytes:
        return b""


def engine(prefix_bytes: int = 0, chunk: int = 512) -> tuple[Engine, Counting]:
    executor = Counting()
    made = Engine(
        executor,
        max_context=1 << 16,
        lanes=4,
        n_sampleable=1 << 17,
        prefill_chunk=chunk,
        prefix_bytes=prefix_bytes,
    )
    return made, executor


def request(number: int, length: int, tokens: int = 1, **fields: object) -> GenerateRequest:
    return GenerateRequest(number, [number] * length, tokens, [], False, SamplingParams(), **fields)  # type: ignore[arg-type]


def test_a_long_prompt_leaves_a_round_between_any_two_chunks() -> None:
    made, executor = engine()
    made.add(request(1, 5, 1000))
    made.step()
    made.add(request(2, 32768))
    kinds, given = [], []
    while not any(event.finish_reason for event in given if event.request_id == 2):
        record, events = made.step()
        kinds.append(record.kind)
        given += events
        if record.kind == "round":
            assert [event.request_id for event in events if event.tokens] == [1]
    assert kinds == ["round", "prefill"] * 64
    assert max(count for _, _, count in executor.chunks) == 512


@pytest.mark.parametrize("prefix_bytes", [0, 1000])
def test_any_number_of_prompts_cost_a_running_answer_one_chunk_a_round(prefix_bytes: int) -> None:
    """The bound of docs/serve.md, in tokens, while prompts of all lengths come and go, kept ones among them."""
    made, executor = engine(prefix_bytes=prefix_bytes, chunk=100)
    made.add(request(1, 70, 400))
    waited, most, read, done = 0, 0, 0, 0
    for step in range(2000):
        if step % 3 == 0:
            made.add(request(2 + step % 40, 1 + 97 * step % 900, step % 5))
        _, events = made.step()
        read, chunks = len(executor.chunks), executor.chunks[read:]
        waited += sum(count for number, _, count in chunks if number != 1)
        if any(event.request_id == 1 and event.tokens for event in events):
            most, waited = max(most, waited), 0
        done += sum(event.finish_reason is not None for event in events)
        if any(event.request_id == 1 and event.finish_reason for event in events):
            break
    assert most == 100 and done > 50


def test_a_short_prompt_is_not_kept_waiting_by_a_long_one() -> None:
    made, executor = engine()
    made.add(request(1, 32768))
    made.step()
    for number in (2, 3):
        made.add(request(number, 600))
    for _ in range(6):
        made.step()
    assert [number for number, _, _ in executor.chunks] == [1, 2, 2, 3, 1, 3, 1]


def test_a_long_prompt_goes_on_however_many_short_ones_come() -> None:
    made, executor = engine()
    made.add(request(1, 8192))
    made.add(request(2, 10))
    for number in range(3, 60):
        made.step()
        made.add(request(number, 10))
    order = [number == 1 for number, _, _ in executor.chunks]
    assert order.count(True) >= len(order) // (PATIENCE + 1)
    assert all(any(order[at : at + PATIENCE + 1]) for at in range(len(order) - PATIENCE - 16))


@given(
    length=st.integers(1, 3000),
    chunk=st.integers(1, 600),
    interval=st.none() | st.integers(64, 1000),
    cuts=st.lists(st.integers(1, 3000), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_edges_follow_from_the_text_and_not_from_where_reading_begins(
    length: int, chunk: int, interval: int | None, cuts: list[int]
) -> None:
    cuts = [cut for cut in cuts if cut <= length]
    lane = Lane(0, request(1, length, checkpoints=cuts), 1, [])
    edges = [0]
    while edges[-1] < length:
        lane.read = edges[-1]
        edges.append(chunk_end(lane, chunk, interval))
        assert 0 < edges[-1] - edges[-2] <= chunk
    wanted = {0, length, *range(0, length, chunk)}
    if interval is not None:
        wanted |= {*cuts, *range(0, length, interval)}
    assert edges == sorted(wanted)


def test_the_choices_of_one_request_read_its_prompt_once() -> None:
    """Also while another answer is in the making; a prompt that only begins alike does not wait."""
    made, executor = engine(prefix_bytes=100)
    made.add(request(9, 70, 400))
    for _ in range(3):
        made.step()
    for number in (1, 2, 3):
        choice = request(number, 3000, 30)
        choice.prompt = [7] * 3000
        made.add(choice)
    given = []
    while made.has_work():
        given += made.step()[1]
    assert sum(count for number, _, count in executor.chunks if number != 9) == 3000
    cached = {event.request_id: event.cached_tokens for event in given if event.admitted}
    assert cached == {1: 0, 2: 3000, 3: 3000}
    assert all(sum(len(e.tokens) for e in given if e.request_id == number) == 30 for number in (1, 2, 3))


def test_a_prompt_that_begins_alike_does_not_wait_for_little() -> None:
    made, executor = engine(prefix_bytes=100)
    long, other = request(1, 3000, checkpoints=[100]), request(2, 3000)
    other.prompt = [1] * 1000 + [2] * 2000
    made.add(long)
    made.add(other)
    made.step()
    assert [lane.request.request_id for lane in made.running] == [1, 2]
    assert executor.chunks == []


def test_a_choice_whose_twin_is_cancelled_reads_on_itself() -> None:
    made, executor = engine(prefix_bytes=100)
    for number in (1, 2):
        choice = request(number, 3000, checkpoints=[600])
        choice.prompt = [7] * 3000
        made.add(choice)
    for _ in range(4):
        made.step()
    made.cancel(1)
    given = []
    while made.has_work():
        given += made.step()[1]
    assert {e.request_id: e.cached_tokens for e in given if e.admitted} == {2: 600}
    assert executor.chunks[-1] == (2, 2560, 440)


def test_a_very_long_prompt_does_not_push_everything_else_out() -> None:
    """Seven intervals and three states beside: every third interval is kept."""
    made, _ = engine(prefix_bytes=6)
    short = request(1, 100)
    for one in (short, request(2, 60000), request(3, 200)):
        made.add(one)
        while made.has_work():
            made.step()
    assert made.prefixes is not None
    assert [prefix.length for prefix in made.prefixes] == [100, 24576, 49152, 60000, 200]
    assert made.prefixes.evicted == 0


def test_the_engine_keeps_and_finds_prefixes_of_any_executor() -> None:
    """32K tokens, kept at every 8192: what comes back is read from there."""
    made, executor = engine(prefix_bytes=100)
    made.add(request(1, 32768))
    while made.has_work():
        made.step()
    executor.chunks.clear()
    again = request(2, 30000)
    again.prompt = [1] * 30000
    made.add(again)
    while made.has_work():
        made.step()
    assert executor.chunks[0] == (2, 24576, 512)
    assert sum(count for _, _, count in executor.chunks) == 30000 - 24576
