"""The executable reference of the family, on random models of other shapes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from duovolt.runtime.engine.sources import WeightSource
from duovolt.runtime.messages import SamplingParams

transformers = pytest.importorskip("transformers")

SHAPES: dict[str, dict[str, Any]] = {
    "ratio-2": {},
    "ratio-3": {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 16},
    "ratio-1": {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "num_key_value_heads": 1},
    "odd": {
        "hidden_size": 72,
        "intermediate_size": 40,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 24,
        "linear_conv_kernel_dim": 3,
        "vocab_size": 101,
        "rope_parameters": {
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
            "rope_type": "default",
        },
    },
    "tied": {"tie_word_embeddings": True, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
}


def peer(tools, source: WeightSource, overrides: dict[str, Any]) -> Any:
    """transformers' text model with the same weights, and its head."""
    from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**tools.config(**overrides)["text_config"])
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config).eval()
    state = {}
    for name in source.shapes:
        if name.startswith("mtp."):
            continue
        state[name.replace("model.language_model.", "model.")] = torch.from_numpy(source.read(name))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


@torch.no_grad()
def peer_logits(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    hidden = model.model(input_ids=tokens[None], position_ids=positions[:, None], use_cache=False).last_hidden_state
    return model.lm_head(hidden)[0]


@pytest.mark.parametrize("name", SHAPES)
def test_scores_and_greedy_tokens(tools, name: str) -> None:
    source = tools.source(seed=3, **SHAPES[name])
    model, vocabulary = peer(tools, source, SHAPES[name]), source.config.text.vocab_size
    prompt = torch.randint(vocabulary, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = tools.engine(source, drafts=2, prefill_chunk=37)
    sampling = SamplingParams(temperature=0.0, logprobs=1)
    run = tools.drive(engine, tools.request(1, prompt, 20, sampling=sampling, echo_logprobs=True))
    tokens = torch.tensor(prompt + run.tokens[1])
    logits = peer_logits(model, tokens, torch.arange(len(tokens)).expand(3, -1))
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == run.tokens[1]
    wanted = torch.log_softmax(logits[:-1].double(), -1).gather(1, tokens[1:, None])[:, 0]
    events = run.events[1]
    found = [entry.logprob for event in events for entry in (*event.prompt_logprobs, *event.logprobs)]
    assert len(found) == len(tokens) - 1
    assert (torch.tensor(found, dtype=torch.float64) - wanted).abs().max() < 5e-4


def image_positions() -> Tensor:
    """Five words, an image of 4 x 6 patches, six words: rows time, height, width, [3, 35]."""
    words = torch.arange(5).expand(3, -1)
    height, width = torch.meshgrid(torch.arange(4), torch.arange(6), indexing="ij")
    image = 5 + torch.stack((torch.zeros(24, dtype=torch.int64), height.flatten(), width.flatten()))
    after = (int(image.max()) + 1 + torch.arange(6)).expand(3, -1)
    return torch.cat((words, image, after), dim=-1)


@pytest.mark.parametrize("drafts", [0, 3])
def test_positions_of_images_carry_into_the_answer(tools, drafts: int) -> None:
    source = tools.source(seed=4)
    model, positions = peer(tools, source, {}), image_positions()
    prompt = torch.randint(128, (35,), generator=torch.Generator().manual_seed(2)).tolist()
    wanted = list(prompt)
    for step in range(12):
        rope = torch.cat((positions, (17 + torch.arange(step)).expand(3, -1)), dim=-1)
        wanted.append(int(peer_logits(model, torch.tensor(wanted), rope)[-1].argmax()))
    engine = tools.engine(source, drafts=drafts, prefill_chunk=16)
    run = tools.drive(engine, tools.request(1, prompt, 12, rope_positions=positions.tolist()))
    assert run.tokens[1] == wanted[35:]
    plain = tools.drive(tools.engine(source), tools.request(1, prompt, 12))
    assert plain.tokens[1] != run.tokens[1], "the positions must matter, or this test proves nothing"
