"""Reading a prompt in chunks is reading it whole; token by token too."""

import pytest
import torch

from duovolt.runtime.messages import SamplingParams


def scores(tools, source, prompt: list[int], chunk: int) -> tuple[list[float], list[int]]:
    """Log-probabilities of the prompt's tokens and of the answer's, and the answer."""
    engine = tools.engine(source, prefill_chunk=chunk, drafts=1)
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    run = tools.drive(engine, tools.request(1, prompt, 8, sampling=sampling, echo_logprobs=True))
    entries = [entry for event in run.events[1] for entry in (*event.prompt_logprobs, *event.logprobs)]
    assert [entry.token for entry in entries] == prompt[1:] + run.tokens[1]
    assert [record.kind for record in run.records].count("prefill") == -(-len(prompt) // chunk)
    return [entry.logprob for entry in entries], run.tokens[1]


@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, 128])
def test_chunks_and_whole_agree(tools, chunk: int) -> None:
    source = tools.source(seed=31)
    prompt = torch.randint(128, (150,), generator=torch.Generator().manual_seed(4)).tolist()
    whole, answer = scores(tools, source, prompt, 512)
    pieces, same = scores(tools, source, prompt, chunk)
    assert same == answer
    assert max(abs(a - b) for a, b in zip(whole, pieces, strict=True)) < 1e-4


def test_states_after_chunks_and_whole_agree(tools) -> None:
    source = tools.source(seed=32)
    prompt = torch.randint(128, (150,), generator=torch.Generator().manual_seed(5)).tolist()
    found = []
    for chunk in (512, 37):
        engine = tools.engine(source, prefill_chunk=chunk)
        engine.add(tools.request(1, prompt, 4))
        while engine.executor.cache.lengths[0] < 150:
            engine.step()
        found.append(tools.snapshot(engine, 0))
    for whole, pieces in zip(*found, strict=True):
        assert (whole - pieces).abs().max() < 1e-4


def test_prompt_of_one_token(tools) -> None:
    source = tools.source(seed=33)
    run = tools.drive(tools.engine(source, drafts=3), tools.request(1, [7], 6))
    assert run.tokens == tools.drive(tools.engine(source), tools.request(1, [7], 6)).tokens
    assert len(run.tokens[1]) == 6
