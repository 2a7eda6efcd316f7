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
