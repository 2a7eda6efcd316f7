"""The prefix cache over the CUDA executor: on the operations' torch references here, with mark `gpu` on a card."""

import pytest
import torch

from duovolt.runtime.messages import SamplingParams

from ..support.cuda_models import TEXT, Encoded, cuda_engine, mixture

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
MUCH = 1 << 30
SCORED = SamplingParams(temperature=0.0, logprobs=2)


@pytest.fixture(scope="module")
def encoded(tools) -> Encoded:
    return Encoded(tools.source(seed=3, **TEXT), mixture)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def device(request) -> torch.device:
    return torch.device(request.param)


def text(seed: int, count: int) -> list[int]:
    return torch.randint(160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def engine_of(weights, **changes):
    return cuda_engine(
        weights, **({"prefix_bytes": MUCH, "prefill_chunk": 32, "drafts": 3, "max_context": 320} | changes)
    )


def cached(run, number: int) -> int:
    return next(event.cached_tokens for event in run.events[number] if event.admitted)


def scores(run, number: int) -> list:
    return [entry for event in run.events[number] for entry in event.logprobs]


@pytest.mark.parametrize("at", [64, 70])
def test_from_a_kept_state_on_all_bits_are_those_of_the_whole_prompt(tools, encoded, device, at: int) -> None:
    """On a page's edge and within a page. Scores are the logits' bits; acceptance shows the MTP layer's."""
    weights, count = encoded.cuda(device), 6 if device.type == "cpu" else 40
    second = tools.request(2, text(1, 90)[:at] + text(2, 20), count, checkpoints=[at], sampling=SCORED)
    again = tools.request(3, second.prompt, count, checkpoints=[at], sampling=SCORED)
    engine = engine_of(weights)
    tools.drive(engine, tools.request(1, text(1, 90), 3, checkpoints=[at]))
    run = tools.drive(engine, second)
    plain = tools.drive(engine_of(weights), second)
    assert cached(run, 2) == at and cached(plain, 2) == 0
    whole = tools.drive(engine, again)
    assert cached(whole, 3) == at + 20
    for found, number in ((run, 2), (whole, 3)):
        assert scores(found, number) == scores(plain, 2)
        drafts = [(event.proposed, event.accepted) for event in found.events[number] if event.tokens]
        assert drafts == [(event.proposed, event.accepted) for event in plain.events[2] if event.tokens]


def test_a_prompt_again_and_again_beside_others(tools, encoded, device) -> None:
    """M01 on this executor, looking ahead: every A is the answer without cache and drafts, whatever was pushed out."""
    weights, card = encoded.cuda(device), device.type == "cuda"
    count, times = (40, 20) if card else (5, 2)
    a = tools.request(1, text(6, 100), count, checkpoints=[96])
    wanted = tools.drive(engine_of(weights, prefix_bytes=0, drafts=0), a)
    one = cuda_engine(weights).executor.state_bytes
    for states in (2, 1000):
        engine = engine_of(weights, prefix_bytes=states * one, lanes=2, pages=40)
        hits = 0
        for number in range(times):
            long = tools.request(2 * number + 1, text(100 + number % 2, 130), 2)
            run = tools.drive(engine, tools.request(2 * number, a.prompt, count, checkpoints=[96]), long)
            assert run.tokens[2 * number] == wanted.tokens[1]
            hits += cached(run, 2 * number) > 0
        assert hits == times - 1 if states == 1000 else engine.prefixes.evicted


def test_an_answer_that_ends_by_itself_is_gone_on_from(tools, encoded, device) -> None:
    """With a round ahead of the stop: the state is the one before it, and what follows is within bounds."""
    weights, prompt = encoded.cuda(device), text(4, 66)
    plain = tools.drive(engine_of(weights), tools.request(1, prompt, 9)).tokens[1]
    stop = next(token for token in plain[3:] if token not in plain[:3])
    engine = engine_of(weights)
    answer = tools.drive(engine, tools.request(1, prompt, 30, stop_ids=(stop,))).tokens[1]
    assert answer == plain[: plain.index(stop) + 1]
    longer = tools.request(2, [*prompt, *answer, *text(5, 10)], 4, sampling=SCORED)
    run, uncached = tools.drive(engine, longer), tools.drive(engine_of(weights, prefix_bytes=0), longer)
    assert cached(run, 2) == len(prompt) + len(answer) - 1
    assert scores(run, 2)[0].token == scores(uncached, 2)[0].token
    assert abs(scores(run, 2)[0].logprob - scores(uncached, 2)[0].logprob) < 0.02
