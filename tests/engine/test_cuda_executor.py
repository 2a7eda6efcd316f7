"""The CUDA executor against the reference, on the operations' torch references here, and with mark `gpu` on a card."""

import pytest
import torch

from duovolt.kernels.module import PORTABLE, forced_arch
from duovolt.runtime.messages import SamplingParams

from ..support.cuda_models import TEXT, Encoded, cuda_engine, mixture, reference_engine

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PROMPT = [5, 77, 3, 150, 9, 9, 42, 101, 7, 20, 64, 33]


@pytest.fixture(scope="module")
def encoded(tools) -> Encoded:
    return Encoded(tools.source(seed=3, **TEXT), mixture)


@pytest.fixture(params=["cpu", pytest.param("native", marks=needs_gpu), pytest.param("portable", marks=needs_gpu)])
def device(request):
    if request.param != "portable":
        yield torch.device("cpu" if request.param == "cpu" else "cuda:0")
        return
    with forced_arch(PORTABLE):
        yield torch.device("cuda:0")


def wishes(kind: str, **fields) -> SamplingParams:
    return SamplingParams(
        **{
            "greedy": {"temperature": 0.0},
            "plain": {"temperature": 1.0, "seed": 7},
            "cut": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 11, "presence_penalty": 0.5},
        }[kind],
        **fields,
    )


@pytest.mark.parametrize("kind", ["greedy", "plain", "cut"])
@pytest.mark.parametrize("drafts", [0, 3])
def test_answers_are_the_references(tools, encoded, device, kind, drafts):
    """Logits differ by fp16 and int8 roundings; on a random model that seldom changes a token within a dozen."""
    ask = tools.request(1, PROMPT, 12, sampling=wishes(kind, logprobs=3))
    theirs = tools.drive(reference_engine(encoded.source, drafts=drafts), ask)
    ours = tools.drive(cuda_engine(encoded.cuda(device), drafts=drafts, int8=False), ask)
    scores = [[entry for event in run.events[1] for entry in event.logprobs] for run in (ours, theirs)]
    worst = 0.0
    for own, wanted in zip(*scores, strict=True):
        if own.token != wanted.token:
            break
        worst = max(worst, abs(own.logprob - wanted.logprob))
    print("worst", worst, ours.tokens, theirs.tokens)
    assert worst < 0.05


@pytest.mark.parametrize("kind", ["greedy", "cut"])
def test_graphs_and_looking_ahead_change_no_bit(tools, encoded, device, kind):
    """Tokens without scores, which look ahead; then with, so that the last bits of logits show."""
    for logprobs in (0, 5):
        ask = tools.request(1, PROMPT, 40, sampling=wishes(kind, logprobs=logprobs))
        weights = encoded.cuda(device)
        runs = [
            tools.drive(cuda_engine(weights, drafts=3, graphs=graphs, ahead=ahead), ask)
            for graphs, ahead in ((True, True), (False, False), (True, False))[: 3 if device.type == "cuda" else 2]
        ]
        for run in runs[1:]:
            assert run.tokens == runs[0].tokens
            assert [event.logprobs for event in run.events[1]] == [event.logprobs for event in runs[0].events[1]]


def test_the_number_of_drafts_changes_no_token(tools, encoded, device):
    length = 40 if device.type == "cpu" else 230
    ask = tools.request(1, PROMPT, length)
    weights, answers = encoded.cuda(device), []
    for drafts in range(6):
        run = tools.drive(cuda_engine(weights, drafts=drafts), ask)
        answers.append(run.tokens[1])
        assert drafts == 0 or sum(event.proposed for event in run.events[1]) > 0
    assert len(answers[0]) == length and all(answer == answers[0] for answer in answers)


def test_lanes_do_not_meet(tools, encoded, device):
    """Four answers of all kinds and lengths side by side are the answers alone, whoever comes and goes."""
    kinds = ["greedy", "cut", "plain", "greedy", "cut", "greedy"]
    asks = [
        tools.request(n, PROMPT[: 3 + n] * (1 + n % 3), 9 + 7 * n, sampling=wishes(kind))
        for n, kind in enumerate(kinds, start=1)
    ]
    weights = encoded.cuda(device)
    alone = {ask.request_id: tools.drive(cuda_engine(weights, drafts=2), ask).tokens[ask.request_id] for ask in asks}
    together = tools.drive(cuda_engine(weights, drafts=2, lanes=4), *asks)
    assert together.tokens == alone
