"""What each sampling parameter does to the distribution, in numbers."""

import math

import pytest
import torch

from duovolt.kernels import reference as ops
from duovolt.runtime.engine.sampling import Purpose, Sampler, fault_of
from duovolt.runtime.messages import SamplingParams

LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()


def probabilities(logits: torch.Tensor = LOGITS, prompt: tuple[int, ...] = (), answer: tuple[int, ...] = (), **fields):
    sampler = Sampler(SamplingParams(**fields), list(prompt), len(logits))
    for token in answer:
        sampler.accept(token)
    return sampler.distribution(logits, []).tolist()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 100}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"min_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 1.0}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [4 / 7, 3 / 7, 0, 0]),  # the mass is that of the three: 4/9 + 3/9 > 0.7
        ({"logit_bias": {3: math.log(4)}}, [0.4 / 1.3, 0.3 / 1.3, 0.2 / 1.3, 0.4 / 1.3]),
    ],
)
def test_distribution(fields, wanted: list[float]) -> None:
    assert probabilities(**fields) == pytest.approx(wanted, abs=1e-6)


def test_equal_logits_keep_exactly_top_k_lowest_ids() -> None:
    assert probabilities(torch.zeros(6), top_k=2) == pytest.approx([0.5, 0.5, 0, 0, 0, 0])


def test_penalties() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0, 0.5])
    sampler = Sampler(SamplingParams(repetition_penalty=2.0), [0, 1], 4)
    assert sampler.adjusted(logits, []).tolist() == [0.5, -2.0, 2.0, 0.5]
    sampler.accept(2)
    assert sampler.adjusted(logits, []).tolist() == [0.5, -2.0, 1.0, 0.5]
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [0, 1], 4)
    assert sampler.adjusted(logits, []).tolist() == logits.tolist(), "the prompt does not count"
    for token in (2, 2, 3):
        sampler.accept(token)
    assert sampler.adjusted(logits, []).tolist() == [1.0, -1.0, 1.0, -0.25]
    assert sampler.adjusted(logits, [3, 0]).tolist() == [0.25, -1.0, 1.0, -0.5], "drafts count as if accepted"
    assert sampler.adjusted(logits, []).tolist() == [1.0, -1.0, 1.0, -0.25], "and are forgotten again"


def test_greedy_takes_the_lowest_of_equals_and_obeys_bias() -> None:
    logits = torch.tensor([-5.0, -5.0, -5.0])
    assert Sampler(SamplingParams(temperature=0.0), [], 3).choose(logits, 0, Purpose.SAMPLE, []) == (0, None)
    biased = Sampler(SamplingParams(temperature=0.0, logit_bias={2: 1.0}), [], 3)
    assert biased.choose(logits, 0, Purpose.SAMPLE, []) == (2, None)


@pytest.mark.parametrize(
    ("random", "wanted"), [(0.0, 1), (0.24, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-53, 4)]
)
def test_draw_inverts_the_running_sum(random: float, wanted: int) -> None:
    weights = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64)
    assert ops.draw(weights, random) == wanted


def test_draw_never_returns_a_token_without_mass() -> None:
    weights = torch.full((1000,), 0.1, dtype=torch.float64)
    weights[-10:] = 0.0
    assert ops.draw(weights, 1 - 2**-53) == 989


def test_residual() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)
    assert ops.residual(p, q).tolist() == [1.0, 0.0, 0.0]
    assert torch.equal(ops.residual(p, p), p)


def test_choices_depend_on_seed_and_position_only() -> None:
    logits = torch.zeros(1000)
    a, b = (Sampler(SamplingParams(seed=seed), [], 1000) for seed in (1, 2))
    first = [a.choose(logits, position, Purpose.SAMPLE, [])[0] for position in range(20)]
    assert first == [a.choose(logits, position, Purpose.SAMPLE, [])[0] for position in range(20)]
    assert len(set(first)) > 15
    assert first != [b.choose(logits, position, Purpose.SAMPLE, [])[0] for position in range(20)]
    assert first != [a.choose(logits, position, Purpose.DRAFT, [])[0] for position in range(20)]


def test_logprob_entries() -> None:
    sampler = Sampler(SamplingParams(logprobs=3, temperature=0.3, logit_bias={0: 9.0}), [], 4)
    entry = sampler.logprob(LOGITS, 3)
    assert (entry.token, entry.logprob) == (3, pytest.approx(math.log(0.1), abs=1e-6))
    assert [token for token, _ in entry.top] == [0, 1]
    assert [value for _, value in entry.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": 1e9}, "repetition_penalty"),
        ({"frequency_penalty": math.inf}, "frequency_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"logit_bias": {1: 1e39}}, "logit_bias"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: math.nan}}, "logit_bias"),
        ({"logprobs": 22}, "logprobs"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
    ],
)
def test_bad_parameters_are_named(fields, word: str) -> None:
    assert word in str(fault_of(SamplingParams(**fields), 10))
    assert fault_of(SamplingParams(), 10) is None


def test_the_widest_parameters_still_give_a_distribution() -> None:
    fields = {"repetition_penalty": 100.0, "presence_penalty": 1000.0, "frequency_penalty": -1000.0}
    found = probabilities(
        LOGITS * 1000, prompt=(0, 1), answer=(2, 2, 3), temperature=1e-300, logit_bias={0: 1000.0, 1: -1000.0}, **fields
    )
    assert sum(found) == pytest.approx(1.0) and max(found) == 1.0
