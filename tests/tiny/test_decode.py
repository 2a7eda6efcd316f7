"""Step-by-step decoding and the unrolled MTP layer against plain recomputation and transformers' layer."""

import copy

import pytest
import torch

from duovolt.tiny.config import TEXT
from duovolt.tiny.decode import EMITTED, greedy
from duovolt.tiny.network import DRAFTS, Network, rope_table

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(3)
    network = Network(TEXT)
    network.lm_head.weight.data.mul_(30)
    return network.eval()


def test_greedy_equals_recomputation(network):
    prompts = [[5, 900, 17, 33, 2], [700, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    tokens = greedy(network, prompts, 14)
    assert tokens.shape == (3, 14)
    for row, prompt in zip(tokens, prompts, strict=True):
        assert row[: len(prompt)].tolist() == prompt
        with torch.no_grad():
            logits = network.lm_head(network.hidden(row[None]))[0, :, :EMITTED]
        assert row[len(prompt) :].tolist() == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()


def test_unrolled_drafts_equal_one_chain_at_a_time(network):
    """Chain i by transformers' own decoder layer on the sequence of first-step entries up to i, then its own."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    config = transformers.Qwen3_5TextConfig(**{k: v for k, v in copy.deepcopy(TEXT).items() if k != "dtype"})
    config._attn_implementation = "eager"
    reference = Qwen3_5DecoderLayer(config, 3).float().eval()
    reference.load_state_dict(network.mtp.layers[0].state_dict(), strict=True)
    tokens = torch.randint(0, 3000, (1, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        hidden = network.hidden(tokens)
        states = network.drafts(tokens, hidden)
        assert [s.shape for s in states] == [(1, 20 - DRAFTS, 128)] * DRAFTS
        mtp = network.mtp

        def mix(position, state):
            embedding = mtp.pre_fc_norm_embedding(network.embed_tokens(tokens[:, position + 1]))
            return mtp.fc(torch.cat((embedding, mtp.pre_fc_norm_hidden(state)), dim=-1))

        for chain in (0, 1, 9, 16):
            inputs = [mix(at, hidden[:, at]) for at in range(chain + 1)]
            for step in range(1, DRAFTS + 1):
                x = torch.stack(inputs, dim=1)
                length = x.shape[1]
                cosine, sine = rope_table(torch.arange(length), TEXT)
                rope = (cosine.repeat(1, 2)[None], sine.repeat(1, 2)[None])
                mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
                out = reference(x, position_embeddings=rope, attention_mask=mask)
                state = mtp.norm((out[0] if isinstance(out, tuple) else out)[:, -1])
                assert (state - states[step - 1][:, chain]).abs().max() < 1e-4, (chain, step)
                if step < DRAFTS:
                    inputs.append(mix(chain + step, state))
