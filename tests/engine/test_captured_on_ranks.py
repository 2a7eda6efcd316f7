"""Captured chunks on two ranks: cancels in their midst, a capture that fails on one rank alone, and what is left after many."""

import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from duovolt.runtime.engine.engine import Engine
from duovolt.runtime.messages import StepRecord
from duovolt.runtime.parallel.device import CpuDeviceCollective

from ..support.cuda_models import TEXT, Encoded, cuda_engine, cut_weights, mixture
from ..support.graphs import Failing, Written

CHUNK = 64


@dataclass
class Heard:
    """Records of all steps; of each request its tokens, and how it ended."""

    records: list[StepRecord] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)


def answer_many(tools: Any, engine: Engine, count: int, seed: int = 0, first: int = 1) -> Heard:
    """`count` requests that come and leave by chance, two of three before their end, as every rank is told alike."""
    chance, heard = random.Random(seed), Heard()
    due: dict[int, int] = {}
    coming = iter(range(first, first + count))
    more = True
    for step in range(10_000):
        if more and chance.random() < 0.5:
            number = next(coming, None)
            more = number is not None
            if number is not None:
                prompt = [chance.randrange(128) for _ in range(chance.choice((40, 64, 130, 200)))]
                engine.add(tools.request(number, prompt, chance.randint(1, 4)))
                if chance.random() < 0.7:
                    due[number] = step + chance.randint(1, 6)
        for number in [number for number, at in due.items() if at == step]:
            engine.cancel(number)
        if engine.has_work():
            record, events = engine.step()
            heard.records.append(record)
            for event in events:
                heard.tokens.setdefault(event.request_id, []).extend(event.tokens)
                if event.finish_reason is not None:
                    heard.ends[event.request_id] = event.finish_reason
        elif not more:
            return heard
    raise AssertionError("the engine does not come to an end")


def is_clean(engine: Engine) -> bool:
    executor = engine.executor
    held = executor._images or executor._lengths or engine.running
    return not held and engine.free_pages == engine.pages


@pytest.fixture(scope="module")
def whole(tools: Any) -> Encoded:
    return Encoded(tools.source(seed=5, **TEXT), mixture)


def test_cancels_and_a_capture_that_fails_on_one_rank_change_no_bit(tools: Any) -> None:
    """A lane is freed between two of its chunks and taken by another prompt; exchanges meet whatever a rank has captured."""
    source = Encoded(tools.source(seed=5, **TEXT)).source
    heard: list[Heard] = []
    for graphs in ((None, None), (Written(), Failing(at=4))):

        def work(collective: Any, graphs: tuple[Any, Any] = graphs) -> Heard:
            weights = cut_weights(tools.cut(source, 2, collective.rank))
            link = CpuDeviceCollective(collective)
            engine = cuda_engine(weights, link, drafts=1, lanes=2, prefill_chunk=CHUNK, max_context=320)
            own = graphs[collective.rank]
            if own is not None:
                engine.executor.model.capture_chunks(CHUNK, own)
            found = answer_many(tools, engine, 14)
            assert is_clean(engine)
            return found

        first, second = tools.ranks(2, work)
        assert first == second
        heard.append(first)
    assert heard[0] == heard[1]
    ends = list(heard[0].ends.values())
    assert len(ends) == 14 and 3 <= ends.count("cancelled") <= 11
    captured, failed = graphs
    assert len(captured.ran) > len(failed.ran) == 4


def test_ranks_meet_in_every_pass_of_the_start_whatever_one_of_them_could_not_capture(tools: Any) -> None:
    """Rank 1's rounds cannot be captured, so its chunks are not either; rank 0 captures both."""
    source = Encoded(tools.source(seed=5, **TEXT)).source

    def work(collective: Any) -> int:
        weights = cut_weights(tools.cut(source, 2, collective.rank))
        engine = cuda_engine(weights, CpuDeviceCollective(collective), lanes=2, prefill_chunk=CHUNK, max_context=320)
        graphs = engine.executor._graphs = Written()
        graphs.enabled = collective.rank == 0
        engine.executor.warm(CHUNK)
        assert engine.executor.model.captures_chunks == graphs.enabled
        return len(graphs.ran)

    assert tools.ranks(2, work) == [3, 0]


def test_nothing_is_held_after_many_requests(tools: Any, whole: Encoded) -> None:
    engine = cuda_engine(whole.cuda(), drafts=1, lanes=2, prefill_chunk=CHUNK, max_context=320)
    engine.executor.model.capture_chunks(CHUNK, Written())
    held = []
    for turn in range(3):
        answer_many(tools, engine, 14, first=1 + 14 * turn)
        assert is_clean(engine)
        held.append(sum(storages()))
    assert held[1] == held[2], "memory that grows with what was answered"


def storages() -> Iterator[int]:
    """Bytes of every tensor's memory that is in use, each once."""
    gc.collect()
    seen = {one.data_ptr(): one.untyped_storage() for one in gc.get_objects() if type(one) is torch.Tensor}
    return iter({storage.data_ptr(): storage.nbytes() for storage in seen.values()}.values())
