"""Random models of the family, in-memory splitting, ranks as threads, and a driver for engines."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory
from duovolt.model.partition import split_of
from duovolt.runtime.engine.engine import Engine
from duovolt.runtime.engine.model import Model
from duovolt.runtime.engine.reference import ReferenceExecutor
from duovolt.runtime.engine.sources import WeightSource
from duovolt.runtime.engine.weights import load_weights
from duovolt.runtime.messages import GenerateRequest, SamplingParams, StepRecord, TokenEvent
from duovolt.runtime.parallel.base import Collective, SoloCollective

FIXTURE = Path(__file__).parents[1] / "fixtures" / "tiny_qwen3_5"

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "mtp_num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
        "rope_type": "default",
    },
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_config(**text: Any) -> dict[str, Any]:
    """A text-only configuration with `text` overriding the defaults."""
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {**TEXT, **text},
    }


def random_source(seed: int = 0, **text: Any) -> WeightSource:
    """A whole random model in memory, scaled so that hidden states stay of order one and logits spread."""
    config = ModelConfig.from_dict(make_config(**text))
    generator = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    for name, spec in inventory(config).items():
        noise = generator.standard_normal(spec.shape).astype(np.float32)
        if len(spec.shape) == 1:
            plain = spec.role == "linear_attn.norm"
            values[name] = 0.2 * noise + np.float32(1.0 if plain else 0.0)
        elif spec.role == "linear_attn.conv1d":
            values[name] = 0.5 * noise
        else:
            values[name] = noise * np.float32(1.2 / spec.shape[-1] ** 0.5)
    shapes = {name: value.shape for name, value in values.items()}
    return WeightSource("memory", config, 1, 0, shapes, frozenset(), frozenset(), values.__getitem__)


def cut_source(source: WeightSource, size: int, rank: int) -> WeightSource:
    """Rank `rank` of `size`, cut out of a whole model by the partition table."""
    splits = {name: split_of(spec, source.config, size) for name, spec in inventory(source.config).items()}

    def cut(name: str) -> np.ndarray:
        values, split = source.read(name), splits[name]
        if split.axis is None:
            return values
        return np.concatenate([np.take(values, np.arange(a, b), split.axis) for a, b in split.ranges[rank]], split.axis)

    return replace(
        source,
        tp_size=size,
        tp_rank=rank,
        shapes={name: cut(name).shape for name in splits},
        summed=frozenset(name for name, split in splits.items() if split.axis == 1),
        cut=frozenset(name for name, split in splits.items() if split.axis == 0),
        read=cut,
    )


class ThreadCollective:
    """Ranks as threads of one process, exchanging through a list."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, desk: list[Tensor | None]) -> None:
        self.rank, self.size, self._barrier, self._desk = rank, size, barrier, desk

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._desk[self.rank] = x.clone()
        self._barrier.wait(60)
        found = [part for part in self._desk if part is not None]
        self._barrier.wait(60)
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self._exchange(x)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)


def on_ranks(size: int, work: Callable[[Collective], Any]) -> list[Any]:
    """work(collective) on every rank at once, each in its own thread; results in rank order."""
    barrier, desk = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size
    faults: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = work(ThreadCollective(rank, size, barrier, desk))
        except BaseException as fault:
            faults.append(fault)
            barrier.abort()

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise next((f for f in faults if not isinstance(f, threading.BrokenBarrierError)), faults[0])
    return results


def make_engine(source: WeightSource, collective: Collective | None = None, **settings: Any) -> Engine:
    """An engine over a source; defaults: context 256, one lane, no drafts, every id may be drawn."""
    collective = collective or SoloCollective()
    chosen = {
        "max_context": 256,
        "lanes": 1,
        "drafts": 0,
        "n_sampleable": source.config.text.vocab_size,
        **settings,
    }
    model = Model(load_weights(source), collective, chosen["max_context"])
    own = {name: chosen.pop(name) for name in ("drafts", "pages", "tower") if name in chosen}
    shared = {name: chosen[name] for name in ("max_context", "lanes", "n_sampleable")}
    if chosen.get("drafts_from") is not None:
        own["drafts"] = 0
    return Engine(ReferenceExecutor(model, **own, **shared), **chosen)


def request(
    number: int, prompt: list[int], max_tokens: int = 16, *, stop_ids: tuple[int, ...] = (), **fields: Any
) -> GenerateRequest:
    """A greedy request unless `sampling` says otherwise."""
    sampling = fields.pop("sampling", SamplingParams(temperature=0.0))
    return GenerateRequest(number, prompt, max_tokens, list(stop_ids), False, sampling, **fields)


@dataclass
class Run:
    """What an engine gave out: tokens and events by request, records by step."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    events: dict[int, list[TokenEvent]] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    def finish(self, number: int) -> str | None:
        return self.events[number][-1].finish_reason


def drive(engine: Engine, *requests: GenerateRequest, after_step: Callable[[Engine], None] | None = None) -> Run:
    """Add the requests and step until nothing is left; at most 10,000 steps."""
    run = Run()
    for one in requests:
        engine.add(one)
    for _ in range(10_000):
        if not engine.has_work():
            return run
        record, events = engine.step()
        run.records.append(record)
        for event in events:
            run.tokens.setdefault(event.request_id, []).extend(event.tokens)
            run.events.setdefault(event.request_id, []).append(event)
        if after_step:
            after_step(engine)
    raise AssertionError("the engine does not come to an end")


def snapshot(engine: Engine, lane: int) -> list[Tensor]:
    """Copies of everything a lane's next token depends on: states, histories, keys and values up to its length."""
    cache = engine.executor.cache
    length, pages = cache.lengths[lane], cache.kv.table(lane)
    kv = [pool[pages].flatten(0, 1)[:length].clone() for pool in (*cache.kv.keys, *cache.kv.values)]
    return [*kv, *(t[lane].clone() for t in (*cache.recurrent.histories, *cache.recurrent.states))]


@dataclass(frozen=True)
class Tools:
    """The helpers above, for tests."""

    config = staticmethod(make_config)
    source = staticmethod(random_source)
    cut = staticmethod(cut_source)
    ranks = staticmethod(on_ranks)
    engine = staticmethod(make_engine)
    request = staticmethod(request)
    drive = staticmethod(drive)
    snapshot = staticmethod(snapshot)
    fixture = FIXTURE


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools()
