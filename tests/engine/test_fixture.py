"""The bundled fixture: another library's logits and hidden states for the same weights."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from duovolt.runtime.engine import EngineSettings, load_engine
from duovolt.runtime.engine.cache import Cache
from duovolt.runtime.engine.model import Batch, Model, Segment
from duovolt.runtime.engine.sources import open_source
from duovolt.runtime.engine.weights import load_weights
from duovolt.runtime.parallel.base import SoloCollective


@pytest.fixture(scope="module")
def reference(tools) -> dict[str, Tensor]:
    return load_file(tools.fixture / "ref" / "reference.safetensors")


@pytest.fixture
def model(tools) -> Model:
    return Model(load_weights(open_source(tools.fixture / "checkpoint")), SoloCollective(), 256)


def text_batch(tokens: Tensor, by_rows: bool) -> Batch:
    count = len(tokens)
    return Batch(tokens, [Segment(0, 0, count)], torch.arange(count).expand(3, -1), by_rows)


@pytest.mark.parametrize("by_rows", [False, True])
def test_logits_and_hidden_states(model: Model, reference, by_rows: bool, monkeypatch) -> None:
    states: list[Tensor] = []
    plain = Model._layer

    def recording(self: Model, *args) -> Tensor:
        states.append(plain(self, *args))
        return states[-1]

    monkeypatch.setattr(Model, "_layer", recording)
    tokens = reference["input_ids"].long()
    cache = Cache.for_one(model.weights, 128)
    hidden = model.forward(text_batch(tokens, by_rows), cache)
    assert len(states) == 4
    for index, wanted in enumerate(reference["hidden_states"][1:4]):
        assert torch.allclose(states[index], wanted, rtol=0, atol=2e-3), f"after layer {index}"
    assert (hidden - reference["hidden_states"][4]).abs().max() < 2e-3
    assert (model.logits(hidden) - reference["prefill_logits"]).abs().max() < 2e-3


@pytest.mark.parametrize("by_rows", [False, True])
def test_mtp_logits(model: Model, reference, by_rows: bool) -> None:
    tokens = reference["input_ids"].long()
    cache = Cache.for_one(model.weights, 128)
    hidden = model.forward(text_batch(tokens, by_rows), cache)
    drafted = model.draft(text_batch(tokens[1:], by_rows), hidden[:-1], cache)
    assert (model.logits(drafted) - reference["mtp_logits"]).abs().max() < 2e-3


@pytest.mark.parametrize("drafts", range(6))
def test_greedy_tokens(tools, reference, drafts: int) -> None:
    settings = EngineSettings(max_context=256, drafts=drafts)
    engine = load_engine(tools.fixture / "checkpoint", SoloCollective(), settings)
    run = tools.drive(engine, tools.request(1, reference["input_ids"].tolist(), 24))
    assert run.tokens[1] == reference["greedy_tokens"].tolist()
    assert run.finish(1) == "length"
