"""The scheduler: order, fairness, endings, faults, records."""

import math
import struct

import pytest
import torch
import xxhash
from msgspec import msgpack

from duovolt.checkpoint.errors import InputError
from duovolt.runtime.messages import CancelRequest, GenerateRequest, SamplingParams, StepRecord, TokenEvent


@pytest.fixture(scope="module")
def source(tools):
    return tools.source(seed=61)


def test_prefill_and_rounds_alternate_and_nobody_starves(tools, source) -> None:
    engine = tools.engine(source, lanes=2, prefill_chunk=16)
    engine.add(tools.request(1, [1, 2], 30))
    engine.step()
    engine.add(tools.request(2, [3] * 80, 4))
    kinds = []
    for _ in range(10):
        record, events = engine.step()
        kinds.append(record.kind)
        if record.kind == "round":
            assert 1 in [event.request_id for event in events]
    assert kinds == ["round", "prefill"] * 5


def test_a_lane_is_told_of_as_soon_as_it_is_taken(tools, source) -> None:
    engine = tools.engine(source, lanes=1)
    engine.add(tools.request(1, [1, 2], 2))
    engine.add(tools.request(2, [1, 2], 2))
    (first,) = engine.admit()
    assert first.request_id == 1 and first.admitted and engine.admit() == []
    events = [engine.step()[1] for _ in range(2)]
    assert [(event.request_id, event.admitted) for event in events[1]] == [(1, False), (2, True)]
    run = tools.drive(engine)
    assert len(run.tokens[2]) == 2 and not any(event.admitted for event in run.events[2])


def test_first_come_first_served(tools, source) -> None:
    engine = tools.engine(source, lanes=1)
    run = tools.drive(engine, *(tools.request(n, [n], 5) for n in (7, 3, 5)))
    assert list(run.events) == [7, 3, 5]
    assert [record.pending for record in run.records][0::5] == [2, 1, 0]


def test_a_large_request_is_not_overtaken(tools, source) -> None:
    engine = tools.engine(source, lanes=3, pages=2)
    run = tools.drive(engine, tools.request(1, [1], 60), tools.request(2, [2] * 70, 20), tools.request(3, [3], 10))
    finished = [n for n in run.events]
    assert finished == [1, 2, 3]


def test_stop_ids_and_ignore_eos(tools, source) -> None:
    plain = tools.drive(tools.engine(source), tools.request(1, [1, 2, 3], 20)).tokens[1]
    stop = plain[4]
    run = tools.drive(tools.engine(source), tools.request(1, [1, 2, 3], 20, stop_ids=(stop,)))
    assert run.tokens[1] == plain[: plain.index(stop) + 1] and run.finish(1) == "stop"
    going = tools.request(1, [1, 2, 3], 20, stop_ids=(stop,))
    going.ignore_eos = True
    run = tools.drive(tools.engine(source), going)
    assert run.tokens[1] == plain and run.finish(1) == "length"


def test_the_context_ends_an_answer(tools, source) -> None:
    engine = tools.engine(source, max_context=40)
    run = tools.drive(engine, tools.request(1, [1] * 30, 500), tools.request(2, [1] * 39, 500))
    assert (len(run.tokens[1]), run.finish(1)) == (10, "length")
    assert (len(run.tokens[2]), run.finish(2)) == (1, "length")


@pytest.mark.parametrize("drafts", [0, 3])
def test_scoring_a_prompt_without_an_answer(tools, source, drafts: int) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=2)
    engine = tools.engine(source, max_context=40, drafts=drafts, prefill_chunk=16)
    run = tools.drive(engine, tools.request(1, list(range(40)), 0, sampling=sampling, echo_logprobs=True))
    assert run.tokens[1] == [] and run.finish(1) == "length"
    entries = [entry for event in run.events[1] for entry in event.prompt_logprobs]
    assert [entry.token for entry in entries] == list(range(1, 40))
    assert all(entry.logprob <= entry.top[0][1] < 0 and len(entry.top) == 1 for entry in entries)


@pytest.mark.parametrize("when", ["waiting", "prefill", "decode"])
def test_cancel(tools, source, when: str) -> None:
    """A01 in the engine: waiting, in the middle of a prompt, or answering."""
    engine = tools.engine(source, prefill_chunk=8)
    if when == "waiting":
        engine.add(tools.request(9, [1], 50))
        engine.step()
    engine.add(tools.request(1, [1] * 20, 50))
    for _ in range({"waiting": 2, "prefill": 1, "decode": 6}[when]):
        engine.step()
    engine.cancel(1)
    _, events = engine.step()
    assert [event.finish_reason for event in events if event.request_id == 1] == ["cancelled"]
    if when == "waiting":
        engine.cancel(9)
        engine.step()
    assert not engine.has_work()
    assert engine.free_pages == engine.pages
    engine.cancel(1)
    assert not engine.has_work(), "a request that is gone is not cancelled twice"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, 500]}, "token 500"),
        ({"prompt": [1, -1]}, "token -1"),
        ({"prompt": [1] * 256}, "256 tokens; the context holds 256"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"echo_logprobs": True}, "echo_logprobs"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top_p"),
        ({"rope_positions": [[0], [0]]}, "rope_positions"),
        ({"rope_positions": [[0, 9], [0, 1], [0, 1]]}, "rope_positions"),
        ({"request_id": -4}, "request id -4"),
    ],
)
def test_requests_that_cannot_be_served(tools, source, change: dict, words: str) -> None:
    engine = tools.engine(source)
    bad = tools.request(1, [1, 2], 5)
    for name, value in change.items():
        setattr(bad, name, value)
    engine.add(bad)
    engine.add(tools.request(2, [1], 3))
    event = engine.step()[1][0]
    assert event.finish_reason == "error" and words in event.error
    run = tools.drive(engine)
    assert len(run.tokens[2]) == 2 and run.finish(2) == "length", "the next one came through in the same step"


def test_a_number_in_use_is_refused(tools, source) -> None:
    engine = tools.engine(source, lanes=1)
    engine.add(tools.request(1, [1], 4))
    engine.add(tools.request(1, [2], 4))
    run = tools.drive(engine)
    assert [event.finish_reason for event in run.events[1]].count("error") == 1
    assert len(run.tokens[1]) == 4


def test_a_request_larger_than_the_pool_is_refused(tools, source) -> None:
    engine = tools.engine(source, pages=2)
    run = tools.drive(engine, tools.request(1, [1] * 100, 100))
    assert "4 pages" in run.events[1][0].error


def test_logits_that_are_not_finite_end_the_answer(tools, source) -> None:
    engine = tools.engine(source, lanes=2)
    engine.executor.model.weights.embed[77] = math.nan
    run = tools.drive(engine, tools.request(1, [5, 77], 9), tools.request(2, [5, 6], 9))
    assert run.finish(1) == "error" and "not finite" in run.events[1][-1].error and run.tokens[1] == []
    assert len(run.tokens[2]) == 9 and 77 not in run.tokens[2]


def test_padding_rows_of_the_head_are_never_drawn(tools) -> None:
    source = tools.source(seed=62)
    engine = tools.engine(source, n_sampleable=10, drafts=3)
    engine.executor.model.weights.head[:10] = -torch.ones(64) * 0.0
    engine.executor.model.weights.head[10:] *= 50.0
    run = tools.drive(
        engine,
        tools.request(1, [1, 2], 20),
        tools.request(2, [1, 2], 20, sampling=SamplingParams(temperature=2.0, seed=4)),
    )
    assert run.tokens[1] == [0] * 20, "all equal: the lowest id"
    assert max(run.tokens[2]) < 10 and len(set(run.tokens[2])) > 3


def test_records_say_what_happened(tools, source) -> None:
    engine = tools.engine(source, drafts=2, prefill_chunk=4)
    run = tools.drive(engine, tools.request(12, [1, 2, 3, 4, 5, 6], 5))
    admission, *later = run.events[12]
    assert admission.admitted and not admission.tokens and not any(event.admitted for event in later)
    events = iter(later)
    for record in run.records:
        if record.tokens_produced:
            event = next(events)
            digest = xxhash.xxh64(struct.pack(f"<{2 + len(event.tokens)}Q", 12, len(event.tokens), *event.tokens))
            assert record.token_hash == digest.intdigest()
            assert record.tokens_produced == len(event.tokens)
    assert [record.kind for record in run.records[:3]] == ["prefill", "prefill", "round"]
    assert [record.position for record in run.records[:2]] == [4, 6]
    assert run.records[0].free_pages == engine.pages - 1
    assert run.records[-1].free_pages == engine.pages and run.records[-1].position == 0


def test_two_engines_make_equal_records(tools, source) -> None:
    requests = [tools.request(n, [n] * n, 10, sampling=SamplingParams(temperature=1.0, seed=n)) for n in range(1, 7)]
    runs = [tools.drive(tools.engine(source, lanes=3, drafts=2), *requests) for _ in range(2)]
    assert runs[0].records == runs[1].records and runs[0].events == runs[1].events


@pytest.mark.parametrize(
    "settings",
    [
        {"lanes": 0},
        {"lanes": 5},
        {"drafts": 6},
        {"drafts": -1},
        {"n_sampleable": 129},
        {"max_context": 1},
        {"prefill_chunk": 0},
    ],
)
def test_bad_settings(tools, source, settings: dict) -> None:
    with pytest.raises(InputError, match="expected"):
        tools.engine(source, **settings)


@pytest.mark.parametrize("rounds", [[[1, 2, 3, 4, 5, 6]], [[128]], [[-1]], [[True]], [3], {"a": 1}, [["x"]]])
def test_bad_forced_drafts(tools, source, rounds) -> None:
    with pytest.raises(InputError, match="forced drafts"):
        tools.engine(source, drafts_from=rounds)


def test_drafts_without_an_mtp_layer(tools) -> None:
    source = tools.source(seed=63, mtp_num_hidden_layers=0)
    with pytest.raises(InputError, match="no MTP layer"):
        tools.engine(source, drafts=1)
    assert len(tools.drive(tools.engine(source), tools.request(1, [1], 5)).tokens[1]) == 5


def test_messages_survive_the_wire() -> None:
    sampling = SamplingParams(temperature=0.5, logit_bias={5: -1.0}, seed=(1 << 64) - 1, logprobs=3)
    for message in (GenerateRequest(1, [1, 2], 5, [9], True, sampling, rope_positions=[[0, 1]] * 3), CancelRequest(8)):
        assert msgpack.decode(msgpack.encode(message), type=GenerateRequest | CancelRequest) == message
    record = StepRecord("round", 3, (1 << 64) - 1, 4, 5, 6)
    assert msgpack.decode(msgpack.encode(record), type=StepRecord) == record
    event = TokenEvent(1, [2], [], None, 3, 1, 4)
    assert msgpack.decode(msgpack.encode(event), type=TokenEvent) == event
