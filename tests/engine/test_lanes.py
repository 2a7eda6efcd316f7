"""Lanes do not disturb one another: an answer beside others has the bits of the answer alone."""

import pytest
import torch

from duovolt.runtime.engine.lane import Lane
from duovolt.runtime.messages import SamplingParams


def some_requests(tools, temperature: float) -> list:
    generator = torch.Generator().manual_seed(6)
    found = []
    for number, (length, answer) in enumerate([(70, 30), (3, 45), (131, 12), (20, 33), (9, 20), (64, 25)], start=1):
        prompt = torch.randint(64, (length,), generator=generator).tolist()
        sampling = SamplingParams(temperature=temperature, top_p=0.95, seed=number, logprobs=3)
        found.append(tools.request(number, prompt, answer, sampling=sampling))
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("lanes", "drafts"), [(2, 0), (4, 0), (3, 3), (4, 5)])
def test_answers_alone_and_beside_others(tools, lanes: int, drafts: int, temperature: float) -> None:
    source = tools.source(seed=41)
    requests = some_requests(tools, temperature)
    settings = {"drafts": drafts, "n_sampleable": 64, "prefill_chunk": 32}
    together = tools.drive(tools.engine(source, lanes=lanes, **settings), *requests)
    for one in requests:
        alone = tools.drive(tools.engine(source, **settings), one)
        number = one.request_id
        assert together.tokens[number] == alone.tokens[number]
        assert together.events[number] == alone.events[number], "equal events: log-probabilities are equal bits"


@pytest.mark.parametrize("lane_of_first", [0, 1])
def test_states_beside_another_lane_are_equal_bits(tools, lane_of_first: int) -> None:
    source = tools.source(seed=42)
    first, other = tools.request(1, [4, 5, 6, 7], 30), tools.request(2, [9] * 40, 30)
    alone = tools.engine(source)
    both = tools.engine(source, lanes=2)
    alone.add(first)
    for one in (first, other) if lane_of_first == 0 else (other, first):
        both.add(one)
    for _ in range(15):
        alone.step()
    while both.executor.cache.lengths[lane_of_first] < alone.executor.cache.lengths[0]:
        both.step()
    assert both.executor.cache.lengths[lane_of_first] == alone.executor.cache.lengths[0] > 10
    for found, wanted in zip(tools.snapshot(both, lane_of_first), tools.snapshot(alone, 0), strict=True):
        assert torch.equal(found, wanted)


def test_a_used_lane_is_as_good_as_new(tools) -> None:
    source = tools.source(seed=43)
    engine = tools.engine(source, drafts=2)
    tools.drive(engine, tools.request(1, [1, 2, 3] * 30, 40))
    again = tools.drive(engine, tools.request(2, [8, 9], 20))
    assert again.tokens[2] == tools.drive(tools.engine(source, drafts=2), tools.request(2, [8, 9], 20)).tokens[2]


class Endless(list):
    """Stop ids that a client may send by the hundred thousand: walking through them at every token is an error."""

    def __contains__(self, token: object) -> bool:
        raise AssertionError("the list was walked through")


def test_a_token_is_looked_up_among_the_stop_ids_not_searched_for(tools) -> None:
    request = tools.request(1, [1], 9)
    request.stop_ids = Endless([7])
    lane = Lane(0, request, 9, [0])
    assert lane.cut([5, 7, 8]) == ([5, 7], "stop")
