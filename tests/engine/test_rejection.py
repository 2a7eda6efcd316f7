"""The rejection rule and whole sampled answers have the target's distribution, whatever is drafted."""

import itertools

import pytest
import torch
from torch import Tensor

from duovolt.kernels import reference as ops
from duovolt.runtime.engine.cache import Cache
from duovolt.runtime.engine.model import Batch, Model, Segment
from duovolt.runtime.engine.sampling import Purpose, Sampler
from duovolt.runtime.engine.speculation import Draft, judge
from duovolt.runtime.engine.weights import load_weights
from duovolt.runtime.messages import SamplingParams
from duovolt.runtime.parallel.base import SoloCollective

DRAWS = 20_000
PENALTY = 0.8  # what was drafted before must count, or the second draft's distribution is wrong
# Chi-square bounds that a right sampler passes with probability 0.999.
BOUND = {7: 24.32, 15: 37.70}

TARGET = torch.tensor([0.30, 0.22, 0.15, 0.12, 0.09, 0.07, 0.04, 0.01], dtype=torch.float64)
GUESS = torch.tensor([0.05, 0.30, 0.10, 0.20, 0.05, 0.10, 0.10, 0.10], dtype=torch.float64)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("drawn", ["from q", "forced", "equal to p"])
def test_the_rule_over_a_vocabulary_of_eight(drawn: str) -> None:
    """M03: 20,000 draws against p, the accept rate against sum min(p, q)."""
    logits = TARGET.log().float().expand(2, -1)
    guess = {"from q": GUESS, "forced": None, "equal to p": TARGET}[drawn]
    counts, after, accepted = torch.zeros(8), torch.zeros(8), 0
    for seed in range(DRAWS):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [0], 8)
        if guess is None:
            draft = Draft.forced([3])
        else:
            draft = Draft([ops.draw(guess, sampler.random(10, Purpose.DRAFT))], [guess])
        verdict = judge(sampler, logits, draft, 10)
        assert len(verdict.tokens) == verdict.accepted + 1
        counts[verdict.tokens[0]] += 1
        accepted += verdict.accepted
        if verdict.accepted:
            after[verdict.tokens[1]] += 1
    assert chi_square(counts, TARGET * DRAWS) < BOUND[7]
    assert chi_square(after, TARGET * accepted) < BOUND[7], "the bonus token has the target's distribution too"
    rate = float(TARGET[3]) if guess is None else float(torch.minimum(TARGET, guess).sum())
    # Four standard deviations of a binomial share.
    assert abs(accepted / DRAWS - rate) <= 4 * (rate * (1 - rate) / DRAWS) ** 0.5 + 1e-9


def test_a_draft_the_target_cannot_make_is_never_kept() -> None:
    logits = TARGET.log().float().expand(2, -1)
    guess = torch.full((8,), 0.125, dtype=torch.float64)
    for seed in range(300):
        sampler = Sampler(SamplingParams(temperature=1.0, top_k=2, seed=seed), [0], 8)
        verdict = judge(sampler, logits, Draft([7], [guess]), 0)
        assert verdict.accepted == 0 and verdict.tokens[0] in (0, 1)


def exact_pairs(model: Model, prompt: list[int], params: SamplingParams, vocabulary: int) -> Tensor:
    """The probability of every (second, third) answer token, from plain forward passes: float64 [V * V]."""

    def after(tokens: list[int]) -> Tensor:
        cache = Cache.for_one(model.weights, 128)
        rope = torch.arange(len(tokens)).expand(3, -1)
        batch = Batch(torch.tensor(tokens), [Segment(0, 0, len(tokens))], rope, by_rows=False)
        logits = model.logits(model.forward(batch, cache)[-1:])[0, :vocabulary]
        return Sampler(params, prompt, vocabulary).distribution(logits, tokens[len(prompt) :])

    total = torch.zeros(vocabulary, vocabulary, dtype=torch.float64)
    first = after(prompt)
    for a, b in itertools.product(range(vocabulary), repeat=2):
        if first[a] > 0:
            total[b] += first[a] * after([*prompt, a])[b] * after([*prompt, a, b])
    return total.flatten()


@pytest.mark.parametrize("drafts", [0, 3])
def test_sampled_answers_have_the_plain_distribution(tools, drafts: int) -> None:
    vocabulary, answers, prompt = 4, 1600, [1, 3, 2]
    source = tools.source(seed=25, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    params = SamplingParams(temperature=1.3, presence_penalty=PENALTY)
    engine = tools.engine(source, n_sampleable=vocabulary, drafts=drafts, lanes=4)
    expected = exact_pairs(engine.executor.model, prompt, params, vocabulary) * answers
    assert float(expected.min()) > 5, "too few answers for a chi-square test"
    requests = [
        # Four tokens, so that a round drafts two: the second of them is judged after the first.
        tools.request(seed, prompt, 4, sampling=SamplingParams(temperature=1.3, presence_penalty=PENALTY, seed=seed))
        for seed in range(answers)
    ]
    run = tools.drive(engine, *requests)
    counts = torch.zeros(vocabulary * vocabulary)
    for _, second, third, _ in run.tokens.values():
        counts[second * vocabulary + third] += 1
    assert chi_square(counts, expected) < BOUND[15]
    accepted = sum(event.accepted for events in run.events.values() for event in events)
    assert (accepted > answers / 5) == bool(drafts)


def test_exact_pairs_uses_every_weight(tools) -> None:
    """The expectation above is a distribution, and not the uniform one."""
    source = tools.source(seed=25, layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    model = Model(load_weights(source), SoloCollective(), 64)
    pairs = exact_pairs(model, [1, 3, 2], SamplingParams(temperature=1.3, presence_penalty=PENALTY), 4)
    assert abs(float(pairs.sum()) - 1) < 1e-12
    assert float(pairs.max()) > 3 * float(pairs.min())
