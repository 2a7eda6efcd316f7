"""The training network against transformers' model of the family, with the same weights."""

import copy

import pytest
import torch

from duovolt.tiny.config import TEXT
from duovolt.tiny.network import Network, parameter_name

torch.set_num_threads(1)
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def pair():
    torch.manual_seed(7)
    network = Network(TEXT)
    for parameter in network.parameters():  # no weight may sit at a value that hides it
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    config = transformers.Qwen3_5TextConfig(**{k: v for k, v in copy.deepcopy(TEXT).items() if k != "dtype"})
    reference = transformers.Qwen3_5ForCausalLM(config).float().eval()
    weights = {
        parameter_name(n).replace("model.language_model.", "model."): p
        for n, p in network.state_dict().items()
        if not n.startswith("mtp.")
    }
    reference.load_state_dict(weights, strict=True)
    return network, reference


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_logits_equal_transformers(pair, length):
    network, reference = pair
    tokens = torch.randint(0, 3000, (2, length), generator=torch.Generator().manual_seed(length))
    with torch.no_grad():
        ours = network.lm_head(network.hidden(tokens))
        theirs = reference(tokens).logits
    assert theirs.std() > 0.05
    assert (ours - theirs).abs().max() < 1e-4


def test_gradients_equal_transformers(pair):
    network, reference = pair
    tokens = torch.randint(0, 3000, (2, 100), generator=torch.Generator().manual_seed(1))
    for model, logits in (
        (network, lambda: network.lm_head(network.hidden(tokens))),
        (reference, lambda: reference(tokens).logits),
    ):
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    theirs = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in network.named_parameters():
        if not name.startswith("mtp."):
            expected = theirs[parameter_name(name).replace("model.language_model.", "model.")]
            assert torch.allclose(
                parameter.grad, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item() + 1e-7
            ), name
