"""Saved states in pieces of powers of two: no bit is lost where a tensor crosses from one to the next, and little room."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.kernels.delta import DeltaState, DeltaWeights
from duovolt.model.config import FULL, ModelConfig
from duovolt.perf.shapes import configuration
from duovolt.runtime.engine.cuda.packed import GRAIN, Packed, sizes


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 1 << 40))
def test_pieces_are_powers_of_two_and_waste_less_than_the_smallest(nbytes: int) -> None:
    found = sizes(nbytes)
    assert found == sorted(found, reverse=True) and len(set(found)) == len(found)
    assert all(size >= GRAIN and size & (size - 1) == 0 for size in found)
    assert 0 <= sum(found) - nbytes < GRAIN


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 70_000), min_size=1, max_size=9), st.integers(0, 2**31))
def test_what_is_put_back_is_what_was_taken(counts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(count, generator=generator) for count in counts]
    wanted = [tensor.clone() for tensor in tensors]
    packed = Packed(tensors)
    for tensor in tensors:
        tensor.fill_(float("nan"))
    packed.put_back(tensors)
    assert all(torch.equal(found, one) for found, one in zip(tensors, wanted, strict=True))
    assert packed.nbytes - sum(4 * count for count in counts) < GRAIN


def test_a_state_of_the_27b_takes_its_77_mb_on_a_rank_of_two() -> None:
    """75.5 MB of states and, in float32 with two gates a head, 2.9 of the convolution's inputs: not a power of two a layer."""
    text = ModelConfig.from_dict(configuration("qwen3.8-27b")).text
    heads, channels = text.linear_num_value_heads // 2, (2 * text.key_dim + text.value_dim) // 2
    meta = torch.device("meta")
    small = (torch.empty(heads, device=meta) for _ in range(2))
    weights = DeltaWeights(torch.empty(channels, text.linear_conv_kernel_dim, device=meta), *small)
    memory = DeltaState.empty(1, weights)
    layers = len(text.layer_types) - text.layer_types.count(FULL)
    total = layers * (memory.state[0].nbytes + memory.rows[0, 0, :3].nbytes)
    assert layers == 48 and 77e6 < total < 79e6 and sum(sizes(total)) < 79e6
    assert (
        sum(1 << (part.nbytes - 1).bit_length() for part in (memory.state[0], memory.rows[0, 0, :3])) * layers > 100e6
    )
