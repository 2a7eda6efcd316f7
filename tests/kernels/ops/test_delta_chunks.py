"""Prefill of the gated delta rule in chunks of 64 on tensor cores, emulated and on a GPU."""

import numpy as np
import pytest
import torch

from duovolt.kernels.delta import HEAD, delta_prefill
from duovolt.kernels.delta_chunks import CHUNK, PIECE

from .support import HALF_ERROR, Guarded, bits, relative
from .test_delta import Layer, step


def prefill(layer, memory, cuts, lane=0, position=0):
    """The layer's tokens in pieces of these lengths."""
    got, first = [], 0
    for count in cuts:
        rows = slice(first, first + count)
        out = Guarded((count, layer.weights.value_heads, HEAD), torch.float32, layer.state.device)
        delta_prefill(
            *layer.parts(rows), layer.weights, *memory, lane, out.inner, chunked=True, position=position + first
        )
        assert out.intact
        got.append(out.inner)
        first += count
    return torch.cat(got)


@pytest.mark.parametrize(
    ("tokens", "kind"), [(1, "normal"), (63, "normal"), (64, "zero"), (65, "normal"), (65, "heavy"), (150, "normal")]
)
def test_against_float64(tensor_core_device, tokens, kind):
    layer = Layer(tensor_core_device, 1, 2, tokens=tokens, kind=kind, seed=tokens)
    memory = layer.memory()
    outputs, states = layer.exact(slice(None))
    assert relative(prefill(layer, memory, [tokens]), outputs) <= HALF_ERROR
    if np.abs(states[-1]).max() > 1e-30:  # else all has decayed, and float32 has no digits left
        assert relative(memory[0].state[0], states[-1]) <= HALF_ERROR


def test_slow_decay_and_equal_keys(tensor_core_device):
    """The hardest systems: nothing is forgotten, every key is the same, and every token overwrites what is there."""
    layer = Layer(tensor_core_device, 1, 1, tokens=130)
    layer.weights.a_log.fill_(-12)
    layer.projection[:] = layer.projection[:1].clone()
    layer.projection[:, -2] = 9.0  # b: beta is nearly 1
    memory = layer.memory()
    outputs, states = layer.exact(slice(None))
    assert relative(prefill(layer, memory, [130]), outputs) <= HALF_ERROR
    assert relative(memory[0].state[0], states[-1]) <= HALF_ERROR


@pytest.mark.parametrize("position", [0, 40])
def test_cuts_at_multiples_of_64_of_the_position_keep_the_bits(tensor_core_device, position):
    """However many chunks a call has; heads of one key, lanes apart, and decoding goes on from there."""
    layer = Layer(tensor_core_device, 1, 2, tokens=202)
    first = CHUNK - position % CHUNK
    memories = [layer.memory(2, 1) for _ in range(2)]
    whole = prefill(layer, memories[0], [200], 1, position)
    cut = prefill(layer, memories[1], [first, CHUNK, 200 - first - CHUNK], 1, position)
    assert torch.equal(bits(whole), bits(cut))
    assert torch.equal(bits(memories[0][0].state), bits(memories[1][0].state))
    assert (memories[0][0].state[0] == 0).all(), "the other lane"
    then = [step(layer, memory, slice(200, 202), 1) for memory in memories]
    assert torch.equal(bits(then[0]), bits(then[1]))
    assert relative(torch.cat([whole, then[0]]), layer.exact(slice(None))[0]) <= HALF_ERROR


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_long_prompt_in_pieces():
    """More than one piece of what a call works on; the recurrence is the yardstick. Too long for the emulation."""
    layer = Layer(torch.device("cuda", 0), 2, 6, tokens=2 * PIECE + 70)
    chunked, plain = layer.memory(), layer.memory()
    got = prefill(layer, chunked, [2 * PIECE + 70], position=7)
    wanted = delta_prefill(*layer.parts(slice(None)), layer.weights, *plain, 0)
    assert relative(got, wanted.double().cpu().numpy()) <= HALF_ERROR
    assert relative(chunked[0].state, plain[0].state.double().cpu().numpy()) <= HALF_ERROR
