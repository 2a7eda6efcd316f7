"""A prompt's chunks that are captured: the bits of those that are not, in every lane, at every depth, beside others."""

from typing import Any

import pytest
import torch

from duovolt.kernels.module import PORTABLE, forced_arch
from duovolt.kernels.tuning import Choice, using
from duovolt.runtime.engine.cuda.layers import CapturedChunk
from duovolt.runtime.engine.cuda.plan import plain_bytes
from duovolt.runtime.messages import SamplingParams
from duovolt.runtime.parallel.device import CpuDeviceCollective

from ..support.cuda_models import TEXT, Encoded, cuda_engine, cut_weights, mixture
from ..support.graphs import Failing, Written

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
CHUNK = 64
PROMPTS = [[(7 * n + 3 * seed) % 160 for n in range(length)] for seed, length in ((1, 250), (2, 192), (3, 64), (4, 70))]


@pytest.fixture(scope="module")
def encoded(tools) -> Encoded:
    return Encoded(tools.source(seed=3, **TEXT), mixture)


def scores(run: Any) -> list[Any]:
    return [entry for events in run.events.values() for event in events for entry in event.logprobs]


def asked(tools: Any) -> list[Any]:
    wishes = SamplingParams(temperature=0.0, logprobs=3)
    return [tools.request(number, prompt, 6, sampling=wishes) for number, prompt in enumerate(PROMPTS, 1)]


@pytest.mark.parametrize("drafts", [0, 2])
def test_what_is_kept_from_chunk_to_chunk_changes_no_bit(tools, encoded, drafts):
    weights, runs = encoded.cuda(), []
    for graphs in (None, Written()):
        engine = cuda_engine(weights, drafts=drafts, lanes=2, prefill_chunk=CHUNK, max_context=320)
        if graphs is not None:
            engine.executor.model.capture_chunks(CHUNK, graphs)
        runs.append(tools.drive(engine, *asked(tools)))
    assert runs[0].tokens == runs[1].tokens and scores(runs[0]) == scores(runs[1])
    assert graphs is not None
    attention = sum(kind == "full_attention" for kind in weights.config.text.layer_types)
    assert {key[1] for key in graphs.ran} == {0, 1}
    assert len(graphs.ran) == sum(len(prompt) // CHUNK for prompt in PROMPTS) and graphs.steps == attention * len(
        graphs.ran
    )


def test_sums_over_the_ranks_stand_between_graphs(tools):
    """Two ranks, whether both capture or one does: their exchanges meet, and bits stay."""
    source = Encoded(tools.source(seed=5, **TEXT)).source
    kinds = source.config.text.layer_types
    expected = (250 // CHUNK + 192 // CHUNK) * (2 * len(kinds) + sum(kind == "full_attention" for kind in kinds))
    found = []
    for capturing in ((), (1,), (0, 1)):

        def work(collective: Any, capturing: tuple[int, ...] = capturing) -> tuple[Any, int]:
            weights = cut_weights(tools.cut(source, 2, collective.rank))
            link, graphs = CpuDeviceCollective(collective), Written()
            engine = cuda_engine(weights, link, drafts=2, lanes=2, prefill_chunk=CHUNK, max_context=320)
            if collective.rank in capturing:
                engine.executor.model.capture_chunks(CHUNK, graphs)
            return tools.drive(engine, *asked(tools)[:2]), graphs.steps

        ranks = tools.ranks(2, work)
        assert [steps for _, steps in ranks] == [expected * (rank in capturing) for rank in range(2)]
        assert ranks[0][0].records == ranks[1][0].records
        found.append(ranks[0][0])
    for run in found[1:]:
        assert run.tokens == found[0].tokens and scores(run) == scores(found[0])


def test_other_lengths_places_and_observers_are_read_as_written(tools, encoded):
    """A chunk that is shorter, or begins between multiples of 64, or is looked at on its way."""
    engine, graphs = cuda_engine(encoded.cuda(), prefill_chunk=50, max_context=320), Written()
    model = engine.executor.model
    model.capture_chunks(CHUNK, graphs)
    tools.drive(engine, tools.request(1, PROMPTS[0], 3))
    assert graphs.ran == []
    slots = torch.full((CHUNK,), -1, dtype=torch.int32)
    for start, observe in ((1, None), (0, lambda number, x: None)):
        model.common.observe = observe
        places = torch.arange(start, start + CHUNK, dtype=torch.int32).repeat(3, 1)
        model.read(model.embed(torch.zeros(CHUNK, dtype=torch.int32)), 0, start, places, slots)
    assert graphs.ran == []
    model.common.observe = None
    model.capture_chunks(24, graphs)  # decode linears take these
    assert model._kept is not None and model._kept.slots.shape[0] == CHUNK


def test_a_capture_that_fails_costs_the_capture_alone(tools, encoded, capsys):
    """The chunk at hand is read as written, and so are those that follow, without the memory that graphs would have kept."""

    weights, runs, graphs = encoded.cuda(), [], Failing(at=2)
    for failing in (False, True):
        engine = cuda_engine(weights, drafts=2, prefill_chunk=CHUNK, max_context=320)
        if failing:
            engine.executor.model.capture_chunks(CHUNK, graphs)
        runs.append(tools.drive(engine, *asked(tools)[:2]))
    assert runs[0].tokens == runs[1].tokens and scores(runs[0]) == scores(runs[1])
    assert len(graphs.ran) == 2 and not engine.executor.model.captures_chunks
    assert capsys.readouterr().err.count("prompts' chunks are not captured: no memory is left") == 1


@pytest.mark.parametrize("place", [pytest.param("native", marks=needs_gpu), pytest.param("portable", marks=needs_gpu)])
@pytest.mark.parametrize("warm", [True, False])
def test_on_a_card_captured_chunks_have_the_bits_of_those_that_are_not(tools, encoded, place, warm):
    runs, parts = [], []
    with forced_arch(
        PORTABLE if place == "portable" else "sm_" + "".join(map(str, torch.cuda.get_device_capability()))
    ):
        weights = encoded.cuda(torch.device("cuda:0"))
        for graphs in (False, True):
            engine = cuda_engine(
                weights, drafts=2, lanes=2, prefill_chunk=CHUNK, max_context=320, graphs=graphs, int8=True
            )
            executor = engine.executor
            if warm:
                executor.warm(chunk=CHUNK)
            else:
                executor.model.capture_chunks(CHUNK, executor._graphs)
            runs += [tools.drive(engine, *asked(tools)) for _ in range(2)]
            assert executor._graphs.fault is None
            parts.append({key[1] for key in executor._graphs._parts})
            assert all(isinstance(chunk, CapturedChunk) for chunk in executor.model._chunks.values())
    assert parts == [set(), {0, 1}]
    for run in runs[1:]:
        assert run.tokens == runs[0].tokens and scores(run) == scores(runs[0])


@pytest.mark.parametrize("graphs", [pytest.param(True, marks=needs_gpu), pytest.param(False, marks=needs_gpu)])
def test_on_a_card_plain_weights_made_ahead_or_kept_change_no_bit(tools, encoded, graphs):
    """Chunks that multiply plain weights, in two lanes, captured and not, with the last ones of other lengths."""
    weights, runs = encoded.cuda(torch.device("cuda:0")), []
    every = plain_bytes(weights.config, 1)
    for ahead, keep in ((0.0, 0), (1.25, 0), (0.0, every), (1.25, every // 2)):
        with using(Choice(plain_ahead=ahead, sparing_up_to=0)):
            engine = cuda_engine(
                weights, drafts=2, lanes=2, prefill_chunk=128, max_context=320, graphs=graphs, int8=True, keep=keep
            )
            executor = engine.executor
            assert executor.model.prompts.ahead == bool(ahead)
            assert executor.facts["plain_weights"] == (f"{keep // 2 * 2 / 1e9:.2f}GB" if keep else "off")
            executor.warm(chunk=128)
            for _ in range(3):
                runs.append(tools.drive(engine, *asked(tools)))
                held = torch.cuda.memory_reserved()
            runs.append(tools.drive(engine, *asked(tools)))
            assert torch.cuda.memory_reserved() == held  # nothing grows from chunk to chunk
            assert executor._graphs.fault is None and executor._graphs.parts_fault is None
            if keep == every:  # all that its chunks multiply, to the rows of a band
                assert 0.9 * every <= 2 * executor.model.prompts._kept.used <= every
    for run in runs[1:]:
        assert run.tokens == runs[0].tokens and scores(run) == scores(runs[0])
