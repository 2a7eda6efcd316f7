"""Speculation changes nothing but speed: the same tokens and, bit for bit, the same caches as without it."""

import pytest
import torch
from torch import Tensor

from duovolt.runtime.engine.cache import Cache
from duovolt.runtime.engine.drafting import make_drafts
from duovolt.runtime.engine.engine import Engine
from duovolt.runtime.engine.model import Batch, Segment
from duovolt.runtime.messages import SamplingParams

PROMPT = [5, 9, 2, 77, 31, 8, 100, 3, 64, 12, 90]
ANSWER = 40
DRAWN = 6  # ids that may be drawn: few enough for the random MTP layer to guess right now and then


def plain_states(tools, source, **fields) -> tuple[list[int], dict[int, list[Tensor]]]:
    """The plain answer, and the lane's state at every length it passes."""
    states: dict[int, list[Tensor]] = {}

    def keep(engine: Engine) -> None:
        if engine.executor.cache.lengths[0]:
            states[engine.executor.cache.lengths[0]] = tools.snapshot(engine, 0)

    engine = tools.engine(source, n_sampleable=DRAWN)
    run = tools.drive(engine, tools.request(1, [t % DRAWN for t in PROMPT], ANSWER, **fields), after_step=keep)
    return run.tokens[1], states


def written(cache: Cache, length: int) -> list[Tensor]:
    """Keys and values of lane 0 in the MTP layer."""
    kv = cache.mtp_kv
    return [pool[kv.table(0)].flatten(0, 1)[:length] for pool in (kv.keys[0], kv.values[0])]


def speculative(tools, source, states: dict[int, list[Tensor]], fields: dict, **settings):
    """The answer of an engine with `settings`, whose state is compared with the plain one after every step."""
    compared = []

    def check(engine: Engine) -> None:
        length = engine.executor.cache.lengths[0]
        if length:
            for found, wanted in zip(tools.snapshot(engine, 0), states[length], strict=True):
                assert torch.equal(found, wanted), f"state at length {length}"
            compared.append(length)

    engine = tools.engine(source, n_sampleable=DRAWN, **settings)
    run = tools.drive(engine, tools.request(1, [t % DRAWN for t in PROMPT], ANSWER, **fields), after_step=check)
    assert compared
    return run


@pytest.mark.parametrize("drafts", range(6))
def test_greedy_with_mtp_drafts(tools, drafts: int) -> None:
    """M02."""
    source = tools.source(seed=11)
    answer, states = plain_states(tools, source)
    run = speculative(tools, source, states, {}, drafts=drafts)
    assert run.tokens[1] == answer
    accepted = sum(event.accepted for event in run.events[1])
    proposed = sum(event.proposed for event in run.events[1])
    if drafts:
        assert 0 < accepted < proposed, "both outcomes must occur, or nothing is proved"
        assert len(run.records) == ANSWER - accepted
    else:
        assert proposed == 0


@pytest.mark.parametrize(("drafts", "wrong"), [(k, j) for k in range(1, 6) for j in range(k + 1)])
def test_greedy_with_forced_drafts_wrong_at_every_place(tools, drafts: int, wrong: int) -> None:
    """`wrong` is the place of the wrong draft; equal to `drafts`: all are right."""
    source = tools.source(seed=12)
    answer, states = plain_states(tools, source)
    accepted = min(wrong, drafts)
    rounds, position = [], 1  # the first token comes from the prompt itself
    while position < ANSWER:
        row = [answer[min(position + j, ANSWER - 1)] for j in range(drafts)]
        if wrong < drafts:
            row[wrong] = (row[wrong] + 1) % DRAWN
        rounds.append(row)
        position += accepted + 1
    run = speculative(tools, source, states, {}, drafts_from=rounds)
    assert run.tokens[1] == answer
    full = [event for event in run.events[1] if event.proposed == drafts]
    assert full and all(event.accepted == accepted for event in full)


def test_greedy_with_penalties_and_bias(tools) -> None:
    source = tools.source(seed=13)
    fields = {
        "sampling": SamplingParams(
            temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={2: 1.5}
        )
    }
    answer, states = plain_states(tools, source, **fields)
    assert answer != plain_states(tools, source)[0], "the penalties must matter, or this test proves nothing"
    for drafts in (1, 3, 5):
        run = speculative(tools, source, states, fields, drafts=drafts)
        assert run.tokens[1] == answer
        assert sum(event.accepted for event in run.events[1]) > 0


def test_every_draft_is_judged_with_those_before_it(tools) -> None:
    """A strong penalty on repetition makes each choice depend on the drafts that precede it in the same round."""
    source = tools.source(seed=18)
    fields = {"sampling": SamplingParams(temperature=0.0, frequency_penalty=2.0)}
    answer, states = plain_states(tools, source, **fields)
    assert len(set(answer[:DRAWN])) > 3, "the penalty must drive the answer on"
    for drafts in range(1, 6):
        rounds = [answer[at : at + drafts] for at in range(1, ANSWER, drafts + 1)]
        run = speculative(tools, source, states, fields, drafts_from=rounds)
        assert run.tokens[1] == answer
        assert all(event.accepted == event.proposed for event in run.events[1]), "every draft was right"


def test_drafts_are_those_of_the_unrolled_layer(tools) -> None:
    """Draft j + 1 is the MTP layer's guess after draft j, at the next position, from its own hidden state."""
    source = tools.source(seed=19)
    engine = tools.engine(source, drafts=4)
    engine.add(tools.request(1, PROMPT, 30))
    engine.step()
    (lane,) = engine.running
    answers = [engine.executor.answers[lane.index]]
    draft = make_drafts(engine.executor.model, engine.executor.cache, answers, [4], 128)[0]

    model, tokens = engine.executor.model, list(lane.tokens)
    cache = Cache.for_one(model.weights, 128)
    end = len(tokens) - 1
    rope = torch.arange(end).expand(3, -1)
    hidden = model.forward(Batch(torch.tensor(tokens[:-1]), [Segment(0, 0, end)], rope, False), cache)
    for count in range(end, end + 4):
        # The whole text again for every draft: one sequence, positions 0 .. count - 1.
        batch = Batch(
            torch.tensor(tokens[1:]), [Segment(0, 0, count)], torch.arange(count).expand(3, -1), by_rows=False
        )
        state = model.draft(batch, hidden, cache)[-1:]
        tokens.append(int(model.logits(state)[0].argmax()))
        hidden = torch.cat((hidden, state))
    assert draft.tokens == tokens[-4:]
    assert len(set(draft.tokens)) > 1
    for mine, true in zip(written(engine.executor.cache, end + 3), written(cache, end + 3), strict=True):
        assert (mine - true).abs().max() < 1e-4, "keys and values of the drafted positions"


def test_mtp_cache_is_made_from_the_target_alone(tools) -> None:
    """After any mixture of accepted and refused drafts, the MTP layer's keys and values are those of the true text."""
    source = tools.source(seed=14)
    prompt = [t % DRAWN for t in PROMPT]
    engine = tools.engine(source, n_sampleable=DRAWN, drafts=4)
    engine.add(tools.request(1, prompt, 60))
    tokens = list(prompt)
    accepted = refused = 0
    while len(tokens) < 60:
        _, events = engine.step()
        for event in events:
            tokens += event.tokens
            accepted += event.accepted
            refused += event.proposed - event.accepted
    assert accepted and refused
    length = engine.executor.cache.mtp_lengths[0]
    assert length > len(prompt) + 10

    model, cache = engine.executor.model, Cache.for_one(engine.executor.model.weights, 128)

    def batch(values: list[int], start: int, by_rows: bool) -> Batch:
        count = len(values)
        rope = torch.arange(start, start + count).expand(3, -1)
        return Batch(torch.tensor(values), [Segment(0, start, count)], rope, by_rows)

    end = len(prompt)
    hidden = model.forward(batch(prompt, 0, False), cache)
    model.draft(batch(prompt[1:], 0, False), hidden[:-1], cache)
    last = hidden[-1:]
    for position in range(end, length + 1):
        model.draft(batch(tokens[position : position + 1], position - 1, True), last, cache)
        last = model.forward(batch(tokens[position : position + 1], position, True), cache)
        cache.commit(0, 1)
    for mine, true in zip(written(engine.executor.cache, length), written(cache, length), strict=True):
        assert torch.equal(mine, true)


def test_answers_near_the_limits(tools) -> None:
    source = tools.source(seed=15)
    for max_tokens in range(1, 9):
        plain = tools.drive(tools.engine(source, n_sampleable=DRAWN), tools.request(1, [1, 2, 3], max_tokens))
        for drafts in (1, 5):
            engine = tools.engine(source, n_sampleable=DRAWN, drafts=drafts)
            run = tools.drive(engine, tools.request(1, [1, 2, 3], max_tokens))
            assert run.tokens == plain.tokens
            assert len(run.tokens[1]) == max_tokens
    engine = tools.engine(source, n_sampleable=DRAWN, drafts=5, max_context=20)
    run = tools.drive(engine, tools.request(1, [1, 2, 3], 500))
    assert len(run.tokens[1]) == 17 and run.finish(1) == "length"


def test_a_stop_id_inside_a_draft_ends_the_answer(tools) -> None:
    source = tools.source(seed=16)
    plain = tools.drive(tools.engine(source), tools.request(1, PROMPT, 12)).tokens[1]
    stop = next(token for token in plain[2:] if token not in plain[:2])
    wanted = plain[: plain.index(stop) + 1]
    engine = tools.engine(source, drafts_from=[plain[1:6], plain[7:12]])
    run = tools.drive(engine, tools.request(1, PROMPT, 12, stop_ids=(stop,)))
    assert run.tokens[1] == wanted and run.finish(1) == "stop"
    assert engine.free_pages == engine.pages


def test_logprobs_come_from_the_verification(tools) -> None:
    """M04: the same values and as many as tokens, with drafts and without."""
    source = tools.source(seed=17)
    sampling = SamplingParams(temperature=0.0, logprobs=4)
    runs = [
        tools.drive(
            tools.engine(source, n_sampleable=DRAWN, drafts=drafts), tools.request(1, [1, 2], 24, sampling=sampling)
        )
        for drafts in (0, 3)
    ]
    plain, drafted = ([entry for event in run.events[1] for entry in event.logprobs] for run in runs)
    assert len(plain) == 24 and plain == drafted
    assert all(len(entry.top) == 3 and entry.top[0] == (entry.token, entry.logprob) for entry in plain)
