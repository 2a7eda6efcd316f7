"""The prefix cache: what is kept is found, has the bits it was saved with, and changes no answer."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duovolt.runtime.engine.content import Content
from duovolt.runtime.engine.engine import Engine
from duovolt.runtime.engine.pages import PAGE
from duovolt.runtime.messages import GenerateRequest, ImageInput, SamplingParams, StepRecord, TokenEvent
from duovolt.runtime.parallel.base import Collective
from duovolt.runtime.parallel.lockstep import LockstepFailure, SharedLockstep
from duovolt.runtime.parallel.region import Region, region_bytes

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
MUCH = 1 << 30
SCORED = SamplingParams(temperature=0.0, logprobs=2)


def text(seed: int, count: int) -> list[int]:
    return torch.randint(128, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def source(tools):
    return tools.source(seed=71, **LAYERS)


def caching(tools, source, collective: Collective | None = None, **changes: Any) -> Engine:
    chosen = {"prefix_bytes": MUCH, "max_context": 512, "prefill_chunk": 32, "drafts": 3} | changes
    return tools.engine(source, collective, **chosen)


def cached(events: list[TokenEvent]) -> int:
    return next(event.cached_tokens for event in events if event.admitted)


def read_prompt(tools, engine: Engine) -> list[torch.Tensor]:
    """Step until the one lane's prompt is read; all that its next token depends on, and the MTP layer's keys."""
    while not engine.running or engine.running[0].prefilling:
        engine.step()
    memory = engine.executor.cache
    pages, length = memory.mtp_kv.table(0), memory.mtp_lengths[0]
    mtp = [pool[pages].flatten(0, 1)[:length].clone() for pool in (memory.mtp_kv.keys[0], memory.mtp_kv.values[0])]
    return [*tools.snapshot(engine, 0), *mtp, engine.executor.answers[0].hidden.clone()]


@pytest.mark.parametrize("at", [64, 65, 96, 100, 127, 128, 150])
def test_from_a_kept_state_on_all_bits_are_those_of_the_whole_prompt(tools, source, at: int) -> None:
    """The edges of the chunks coincide; the prompts part at `at`, so that the MTP layer's last key there differs."""
    first = tools.request(1, text(1, 150), 5, checkpoints=[at])
    second = tools.request(2, text(1, 150)[:at] + text(2, 80), 30, checkpoints=[at], sampling=SCORED)
    engine = caching(tools, source)
    tools.drive(engine, first)
    engine.add(second)
    found = read_prompt(tools, engine)
    whole = caching(tools, source)
    whole.add(second)
    for mine, wanted in zip(found, read_prompt(tools, whole), strict=True):
        assert torch.equal(mine, wanted)
    again = tools.request(3, second.prompt, 30, checkpoints=[at], sampling=SCORED)
    tools.drive(engine)
    run, plain = tools.drive(engine, again), tools.drive(caching(tools, source), again)
    assert cached(run.events[3]) == at + 80, "the whole prompt: nothing is read"
    assert run.tokens[3] == plain.tokens[3]
    assert [event.logprobs for event in run.events[3][1:]] == [e.logprobs for e in plain.events[3] if e.tokens]


def test_hits_stand_in_events_and_records(tools, source) -> None:
    engine = caching(tools, source)
    tools.drive(engine, tools.request(1, text(1, 150), 5, checkpoints=[130]))
    run = tools.drive(engine, tools.request(2, text(1, 140), 5))
    assert cached(run.events[2]) == 130
    assert [record.kind for record in run.records[:2]] == ["admit", "prefill"]
    assert [record.cached_tokens for record in run.records[:2]] == [130, 0]
    assert run.records[0].prefixes == 3, "the checkpoint, the prompt's end, the answer's"
    assert cached(tools.drive(engine, tools.request(3, text(3, 140), 5)).events[3]) == 0


@pytest.mark.parametrize("tokens", range(2, 9))
def test_whatever_the_last_round_left_behind_the_next_turn_reads_it(tools, source, tokens: int) -> None:
    """The answer's limit cuts the last rounds' drafts; the next turns find the whole, again and again."""
    answer = tools.drive(caching(tools, source, prefix_bytes=0), tools.request(1, text(4, 90), 30)).tokens[1]
    engine, prompt = caching(tools, source, drafts_from=[answer[1:6], answer[7:12]]), text(4, 90)
    guessing = caching(tools, source, drafts=5)
    for one in (engine, guessing):
        watch, said = Watch(one), list(prompt)
        for number in range(3):
            run = tools.drive(one, tools.request(number, said, tokens), after_step=watch)
            assert cached(run.events[number]) == (len(said) if number else 0)
            assert [*said, *run.tokens[number]] == [*prompt, *answer][: len(said) + tokens]
            said += run.tokens[number][:-1]  # all that the state holds


def test_an_answer_is_gone_on_from(tools, source) -> None:
    """Its state comes from decode rounds, the plain one from chunks: equal within bounds."""
    engine, prompt = caching(tools, source), text(4, 90)
    answer = tools.drive(engine, tools.request(1, prompt, 40)).tokens[1]
    longer = tools.request(2, [*prompt, *answer, *text(5, 30)], 20, sampling=SCORED)
    run = tools.drive(engine, longer)
    plain = tools.drive(caching(tools, source, prefix_bytes=0, drafts=0), longer)
    assert cached(run.events[2]) == len(prompt) + len(answer) - 1
    assert run.tokens[2] == plain.tokens[2]
    close(run.events[2], plain.events[2])


def close(found: list[TokenEvent], wanted: list[TokenEvent]) -> None:
    """The same tokens with log-probabilities within 1e-3, up to where a near tie fell the other way."""
    mine, theirs = ([entry for event in events for entry in event.logprobs] for events in (found, wanted))
    for one, other in zip(mine, theirs, strict=False):
        assert abs(one.top[0][1] - other.top[0][1]) < 1e-3
        if one.token != other.token:
            assert abs(one.logprob - other.logprob) < 1e-3, "no near tie"
            return
    assert len(mine) == len(theirs)


@pytest.mark.parametrize("states", [2, 1000])
def test_a_prompt_again_and_again_beside_a_long_one(tools, source, states: int) -> None:
    """M01: A, B with padding, A, twenty times; every A as without cache and drafts, also where B pushes it out."""
    a = tools.request(1, text(6, 100), 24, checkpoints=[96])
    expected = tools.drive(tools.engine(source, max_context=512), a).tokens[1]
    one = caching(tools, source).executor.state_bytes
    engine = caching(tools, source, prefix_bytes=states * one, prefix_interval=128, drafts=5)
    hits = 0
    for number in range(20):
        run = tools.drive(engine, tools.request(2 * number, a.prompt, 24, checkpoints=[96]))
        assert run.tokens[2 * number] == expected
        hits += cached(run.events[2 * number]) > 0
        tools.drive(engine, tools.request(2 * number + 1, text(100 + number % 3, 300), 4))
    assert hits == (19 if states == 1000 else 0)


def test_states_are_saved_at_intervals_of_a_long_prompt(tools, source) -> None:
    engine = caching(tools, source, prefix_interval=96)
    run = tools.drive(engine, tools.request(1, text(7, 300), 1))
    assert [r.kind for r in run.records].count("prefill") == len({*range(32, 300, 32), 300})
    assert run.records[-1].prefixes == 4
    assert cached(tools.drive(engine, tools.request(2, text(7, 200), 1)).events[2]) == 192


def test_a_waiting_request_gets_the_pages_of_prefixes(tools, source) -> None:
    engine = caching(tools, source, pages=6)
    tools.drive(engine, tools.request(1, text(8, 200), 10))
    assert (engine.free_pages, engine.idle_pages) == (2, 4)
    run = tools.drive(engine, tools.request(2, text(9, 300), 60))
    assert len(run.tokens[2]) == 60 and run.records[-1].evicted > 0
    assert engine.free_pages + engine.idle_pages == 6


def test_what_a_lane_goes_on_from_does_not_make_room_for_it(tools, source) -> None:
    """Also where it was used longest ago."""
    engine = caching(tools, source, pages=6, max_context=256)
    for number in (1, 2):
        tools.drive(engine, tools.request(number, text(number, 150), 10))
    assert engine.free_pages == 0
    longer = tools.request(3, text(1, 150) + text(9, 60), 40)
    run = tools.drive(engine, longer)
    assert cached(run.events[3]) == 150 and run.records[0].evicted == 3
    assert run.tokens[3] == tools.drive(caching(tools, source, prefix_bytes=0), longer).tokens[3]


def test_a_lane_takes_pages_as_it_grows_and_lets_prefixes_live(tools, source) -> None:
    """A limit far away costs no prefix: the pages are promised, and taken when they are needed."""
    engine = caching(tools, source, max_context=40 * PAGE, pages=40, prefill_chunk=512)
    tools.drive(engine, tools.request(1, text(8, 1000), 2))
    run = tools.drive(engine, tools.request(2, text(9, 100), 39 * PAGE - 100, stop_ids=tuple(range(1, 128, 2))))
    assert run.finish(2) == "stop" and run.records[-1].evicted == 0
    assert cached(tools.drive(engine, tools.request(3, text(8, 1010), 2)).events[3]) == 1000


def test_echoed_prompts_are_read_whole(tools, source) -> None:
    engine = caching(tools, source)
    for number in (1, 2):
        run = tools.drive(engine, tools.request(number, text(1, 90), 3, sampling=SCORED, echo_logprobs=True))
        assert cached(run.events[number]) == 0
        assert sum(len(event.prompt_logprobs) for event in run.events[number]) == 89


def test_what_was_read_anew_is_the_last_to_go(tools, source) -> None:
    """A lane that did not go on from a prefix, and comes to its end, has used it too."""
    engine = caching(tools, source, prefix_bytes=2 * caching(tools, source).executor.state_bytes)
    for number, seed in enumerate((1, 2, 1, 3)):
        echoed = tools.request(number, text(seed, 90), 1, sampling=SCORED, echo_logprobs=True)
        tools.drive(engine, echoed)
    assert len(engine.prefixes) == 2
    found = [cached(tools.drive(engine, tools.request(seed, [*text(seed, 90), 7], 1)).events[seed]) for seed in (1, 2)]
    assert found == [90, 0]


def test_a_broken_answer_takes_what_was_kept_of_it_along(tools, source) -> None:
    engine = caching(tools, source)
    tools.drive(engine, tools.request(1, text(1, 100), 5))
    before = len(engine.prefixes)
    engine.executor.model.weights.embed[77] = math.nan
    run = tools.drive(engine, tools.request(2, [*(t for t in text(2, 130) if t != 77), 77], 5, checkpoints=[70]))
    assert run.finish(2) == "error" and len(engine.prefixes) == before > 0
    assert cached(tools.drive(engine, tools.request(3, text(1, 100), 2)).events[3]) == 100


def test_checkpoints_out_of_the_prompt_are_refused(tools, source) -> None:
    for checkpoints in ([0], [101], [-5], [1] * 17):
        run = tools.drive(caching(tools, source), tools.request(1, text(1, 100), 5, checkpoints=checkpoints))
        assert "checkpoints" in run.events[1][-1].error


def test_names_tell_pictures_and_positions_apart() -> None:
    def content(**fields: Any) -> Content:
        return Content(GenerateRequest(1, [5] * 200, 1, [], False, SamplingParams(), **fields))

    index = list(range(200))
    shifted = [*range(100), *range(50, 150)]
    image, other = (ImageInput(70, 32, 32, bytes([value]) * 3072) for value in (1, 2))
    plain = content()
    assert content(rope_positions=[index] * 3).name(200) == plain.name(200)
    turned = content(rope_positions=[index, shifted, index])
    pictured, repainted = content(images=[image]), content(images=[other])
    for one in (turned, pictured, repainted):
        assert one.name(64) == plain.name(64) and one.name(70) == plain.name(70)
    for length in (130, 200):
        assert len({one.name(length) for one in (plain, turned, pictured, repainted)}) == 4
    assert plain.name(130) != plain.name(131)
    going = Content(GenerateRequest(1, [5] * 150, 1, [], False, SamplingParams()))
    going.extend([5] * 50, 0)
    assert going.name(200) == plain.name(200)


@dataclass
class Watch:
    """Every kept prefix's keys, values and state, as they were when it was first seen."""

    engine: Engine
    seen: dict[bytes, list[torch.Tensor]] = field(default_factory=dict)

    def content(self, prefix: Any) -> list[torch.Tensor]:
        memory = self.engine.executor.cache
        found = [pool[prefix.pages].flatten(0, 1)[: prefix.length] for pool in (*memory.kv.keys, *memory.kv.values)]
        assert prefix.settled <= prefix.state.mtp_length or prefix.state.mtp_length == 0, "no drafts"
        found += [
            pool[prefix.pages].flatten(0, 1)[: min(prefix.settled, prefix.state.mtp_length)]
            for pool in (memory.mtp_kv.keys[0], memory.mtp_kv.values[0])
        ]
        return [tensor.clone() for tensor in (*found, *prefix.state.recurrent, prefix.state.hidden)]

    def __call__(self, engine: Engine) -> None:
        held = [page for lane in engine.running for page in lane.pages]
        alive = {prefix.name: prefix for prefix in engine.prefixes}
        kept = {page for prefix in alive.values() for page in prefix.pages}
        assert engine.idle_pages == len(kept - set(held))
        assert engine.free_pages == engine.pages - len(kept | set(held))
        assert len(alive) <= engine.prefixes.states
        self.seen = {name: tensors for name, tensors in self.seen.items() if name in alive}
        for name, prefix in alive.items():
            content = self.content(prefix)
            for now, before in zip(content, self.seen.setdefault(name, content), strict=True):
                assert torch.equal(now, before), f"a prefix of {prefix.length} tokens has changed"


PARTS = [text(200 + number, count) for number, count in enumerate((30, 64, 70, 100, 5, 128))]


@given(
    asked=st.lists(
        st.tuples(
            st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=3),  # the prompt's parts
            st.integers(-1, 7),  # it goes on from an earlier prompt and its answer
            st.integers(1, 20),  # tokens
            st.booleans(),  # a checkpoint behind its first part
        ),
        min_size=2,
        max_size=8,
    ),
    lanes=st.integers(1, 3),
    drafts=st.integers(0, 5),
    pages=st.integers(9, 30),
    states=st.sampled_from([1, 2, 5, 100]),
    cancels=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 7)), max_size=3),
)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_conversations_are_those_without_a_cache(
    tools, asked: list, lanes: int, drafts: int, pages: int, states: int, cancels: list
) -> None:
    torch.set_num_threads(1)
    source = tools.source(seed=72, **LAYERS)
    one = caching(tools, source).executor.state_bytes
    engine = caching(
        tools, source, lanes=lanes, drafts=drafts, pages=pages, prefix_bytes=states * one, prefix_interval=128
    )
    plain = caching(tools, source, prefix_bytes=0, drafts=0)
    watch, dialogue = Watch(engine), []
    due = {}
    for step, number in cancels:
        due.setdefault(step, []).append(number)
    steps = iter(range(1 << 20))

    def after(running: Engine) -> None:
        for number in due.get(next(steps), []):
            running.cancel(number)
        watch(running)

    for begin in range(0, len(asked), 2):  # two at a time
        batch = []
        for number, (parts, before, count, marked) in enumerate(asked[begin : begin + 2], start=begin):
            start = list(dialogue[before]) if 0 <= before < len(dialogue) else []
            prompt = (start + [token for part in parts for token in PARTS[part]])[-400:]
            checkpoints = [len(start) + len(PARTS[parts[0]])] if marked and len(start) < 200 else []
            checkpoints = [at for at in checkpoints if at <= len(prompt)]
            batch.append(tools.request(number, prompt, count, sampling=SCORED, checkpoints=checkpoints))
        run = tools.drive(engine, *batch, after_step=after)
        for request in batch:
            number = request.request_id
            dialogue.append(request.prompt + run.tokens[number])
            if run.finish(number) == "length":
                close(run.events[number], tools.drive(plain, request).events[number])
    assert engine.free_pages + engine.idle_pages == pages


@pytest.mark.parametrize("what", ["dropped", "hidden"])
def test_ranks_that_found_different_prefixes_fail_at_once(tools, source, what: str) -> None:
    """R07: an entry is missing, or not found, on rank 1 only. Nothing is computed on it."""
    region = Region(bytearray(region_bytes(4)), 4)
    asked = [tools.request(1, text(1, 150), 5, checkpoints=[100]), tools.request(2, text(1, 140), 5)]

    def work(collective: Collective) -> tuple[list[StepRecord], str]:
        engine = caching(tools, tools.cut(source, 2, collective.rank), collective)
        lockstep, records = SharedLockstep(region, collective.rank, 20), []

        def answer(request: GenerateRequest) -> None:
            engine.add(request)
            while engine.has_work():
                records.append(engine.step()[0])
                lockstep.agree(records[-1], 0, 0)

        answer(asked[0])
        if collective.rank == 1:
            (longer,) = (prefix for prefix in engine.prefixes if prefix.length == 100)
            engine.prefixes._remove(longer.name)
            if what == "hidden":  # as many as before, but not found
                engine.prefixes._kept[b"another"] = longer
        try:
            answer(asked[1])
        except LockstepFailure as failure:
            return records, str(failure)
        return records, ""

    (first, left), (second, right) = tools.ranks(2, work)
    assert first[:-1] == second[:-1] and first[-1].kind == second[-1].kind == "admit"
    field_ = "prefixes" if what == "dropped" else "cached_tokens"
    for failure in (left, right):
        assert "TP2 LOCKSTEP FAILURE" in failure
        assert (
            f"{field_}={getattr(first[-1], field_)}" in failure and f"{field_}={getattr(second[-1], field_)}" in failure
        )
