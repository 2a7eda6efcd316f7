"""Reference operations against their float64 oracles, and the promise that a row's bits do not depend on the others."""

import numpy as np
import pytest
import torch
from torch import Tensor

from duovolt.kernels import oracle
from duovolt.kernels import reference as ops
from duovolt.runtime.engine.kv import PagedKV


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def relative_error(found: Tensor, wanted: np.ndarray) -> float:
    """Relative L2; a value that is not finite counts as infinite."""
    assert found.shape == wanted.shape
    values = found.double().numpy()
    if not np.isfinite(values).all():
        return float("inf")
    return float(np.linalg.norm(values - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("shape", [(1, 64), (7, 128), (3, 4, 256)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, gate, weight = random(*shape), random(*shape, seed=1), random(shape[-1], seed=2, scale=0.3)
    assert relative_error(ops.rms_norm(x, weight, 1e-6), oracle.rms_norm(x.numpy(), weight.numpy(), 1e-6)) < 1e-6
    wanted = oracle.gated_rms_norm(x.numpy(), gate.numpy(), weight.numpy(), 1e-6)
    assert relative_error(ops.gated_rms_norm(x, gate, weight, 1e-6), wanted) < 1e-6


def test_a_tiny_norm_weight_survives() -> None:
    """Q07: the gain of a zero-centred norm."""
    x = torch.ones(1, 64)
    gain = ops.rms_norm(x, torch.full((64,), 2.0**-12), 0.0)
    assert torch.equal(gain, torch.full((1, 64), 1.000244140625))


@pytest.mark.parametrize(
    ("dim", "partial", "section"), [(256, 0.25, [11, 11, 10]), (32, 0.5, [3, 3, 2]), (8, 1.0, [2, 1, 1])]
)
@pytest.mark.parametrize("positions", ["text", "image"])
def test_rope(dim: int, partial: float, section: list[int], positions: str) -> None:
    x = random(9, 3, dim)
    rows = torch.randint(2000, (3, 9), generator=torch.Generator().manual_seed(5))
    if positions == "text":
        rows = rows[:1].expand(3, -1)
    frequencies = ops.inverse_frequencies(dim, partial, 1e7)
    axes = ops.mrope_axes(len(frequencies), section)
    found = ops.apply_rope(x, *ops.rope_angles(rows, axes, ops.rope_table(2000, frequencies)))
    wanted = oracle.rope(x.numpy(), rows.numpy(), partial=partial, theta=1e7, section=section)
    # A float32 angle below 2,000 is within 2^-14 of the exact one.
    assert relative_error(found, wanted) < 2e-4
    assert torch.equal(found[..., int(dim * partial) :], x[..., int(dim * partial) :])


def test_rope_of_position_zero_changes_nothing() -> None:
    x = random(1, 2, 64)
    frequencies = ops.inverse_frequencies(64, 0.5, 1e4)
    angles = ops.rope_angles(
        torch.zeros(3, 1, dtype=torch.int64), ops.mrope_axes(16, [6, 5, 5]), ops.rope_table(1, frequencies)
    )
    assert torch.equal(ops.apply_rope(x, *angles), x)


@pytest.mark.parametrize("start", [0, 62, 63, 64, 65, 200])
@pytest.mark.parametrize("count", [1, 2, 5, 130])
@pytest.mark.parametrize("attend", [ops.attend_rows, ops.attend_block])
def test_attention_over_pages(attend, start: int, count: int) -> None:
    heads, kv_heads, dim, length = 6, 2, 32, start + count
    keys, values, query = (
        random(length, kv_heads, dim),
        random(length, kv_heads, dim, seed=1),
        random(count, heads, dim, seed=2),
    )
    pages = torch.tensor([5, 0, 7, 2, 6, 1])
    key_pool = torch.full((8, 64, kv_heads, dim), float("nan"))  # whatever lies beyond the context must not be read
    value_pool = torch.full((8, 64, kv_heads, dim), float("nan"))
    at = torch.arange(length)
    ops.write_kv(key_pool, value_pool, keys, values, pages[at // 64] * 64 + at % 64)
    found = attend(query, key_pool, value_pool, pages, start)
    wanted = oracle.attention(query.numpy(), keys.numpy(), values.numpy(), start)
    assert relative_error(found, wanted) < 1e-6


def delta_inputs(tokens: int, key_heads: int, value_heads: int, seed: int = 0) -> list[Tensor]:
    log_decay, beta = ops.delta_gates(
        random(tokens, value_heads, seed=seed + 3),
        random(tokens, value_heads, seed=seed + 4),
        random(value_heads, seed=seed + 5),
        random(value_heads, seed=seed + 6),
    )
    return [
        ops.l2_normalize(random(tokens, key_heads, 16, seed=seed)),
        ops.l2_normalize(random(tokens, key_heads, 16, seed=seed + 1)),
        random(tokens, value_heads, 24, seed=seed + 2),
        log_decay,
        beta,
        random(value_heads, 24, 16, seed=seed + 7),
    ]


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 150])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 6)])
def test_delta_rule(tokens: int, key_heads: int, value_heads: int) -> None:
    inputs = delta_inputs(tokens, key_heads, value_heads)
    outputs, states = oracle.delta_rule(*(x.numpy() for x in inputs))
    stepped, trail = ops.delta_rule_steps(*inputs)
    assert relative_error(stepped, outputs) < 2e-6
    assert relative_error(trail, states) < 2e-6
    chunked, last = ops.delta_rule_chunked(*inputs)
    assert relative_error(chunked, outputs) < 1e-5
    assert relative_error(last, states[-1]) < 1e-5


def test_delta_rule_with_strong_decay_stays_finite() -> None:
    query, key, value, _, beta, state = delta_inputs(64, 2, 2)
    log_decay = torch.full((64, 2), -20.0)  # e^1280 above the diagonal, if it were computed
    outputs, _ = oracle.delta_rule(*(x.numpy() for x in (query, key, value, log_decay, beta, state)))
    chunked, _ = ops.delta_rule_chunked(query, key, value, log_decay, beta, state)
    assert relative_error(chunked, outputs) < 1e-5


def test_delta_gates() -> None:
    a, b, a_log, bias = random(5, 3, scale=30.0), random(5, 3, seed=1, scale=30.0), random(3, seed=2), random(3, seed=3)
    wanted = oracle.delta_gates(a.numpy(), b.numpy(), a_log.numpy(), bias.numpy())
    for found, expected in zip(ops.delta_gates(a, b, a_log, bias), wanted, strict=True):
        assert relative_error(found, expected) < 1e-6


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_causal_convolution(tokens: int, width: int) -> None:
    x, history, weight = random(tokens, 10), random(width - 1, 10, seed=1), random(10, width, seed=2)
    found, rows = ops.causal_conv(x, history, weight)
    assert relative_error(found, oracle.causal_conv(x.numpy(), history.numpy(), weight.numpy())) < 1e-6
    assert torch.equal(rows, torch.cat((history, x)))


WIDTHS = [1, 5, 16, 48, 100, 128, 384]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [2, 3, 6, 24])
def test_rows_alone_and_together_have_the_same_bits(width: int, count: int) -> None:
    x, y = random(count, width + 3, scale=4.0)[:, :width], random(count, width, seed=1, scale=4.0)
    weight, square = random(width, seed=2), random(77, width, seed=3)
    rows = {
        "linear_rows": lambda a, b: ops.linear_rows(a, square),
        "rms_norm": lambda a, b: ops.rms_norm(a, weight, 1e-6),
        "gated_rms_norm": lambda a, b: ops.gated_rms_norm(a, b, weight, 1e-6),
        "l2_normalize": lambda a, b: ops.l2_normalize(a),
        "output_gate": lambda a, b: ops.output_gate(a, b),
        "silu_gate": lambda a, b: ops.silu_gate(torch.cat((a, b), dim=-1)),
        "delta_gates": lambda a, b: torch.cat(ops.delta_gates(a, b, weight, weight), dim=-1),
    }
    for name, op in rows.items():
        together = op(x, y)
        for index in range(count):
            alone = op(x[index : index + 1].clone(), y[index : index + 1].clone())
            assert torch.equal(together[index : index + 1], alone), f"{name}, row {index} of {count} x {width}"


@pytest.mark.parametrize("dim", [8, 24, 32, 256])
@pytest.mark.parametrize("start", [0, 60, 300])
def test_attention_rows_alone_and_together_have_the_same_bits(dim: int, start: int) -> None:
    count, heads, kv_heads = 6, 4, 2
    length = start + count
    pages = torch.arange(7, -1, -1)
    pools = random(8, 64, kv_heads, dim), random(8, 64, kv_heads, dim, seed=1)
    query = random(count, heads, 2 * dim, seed=2)[..., :dim]
    together = ops.attend_rows(query, *pools, pages, start)
    for index in range(count):
        alone = ops.attend_rows(query[index : index + 1], *pools, pages[: (length + 63) // 64], start + index)
        assert torch.equal(alone[0], together[index])


@pytest.mark.parametrize("dim", [8, 24, 32])
@pytest.mark.parametrize("attend", [ops.attend_rows, ops.attend_block])
def test_attention_over_adjoining_and_scattered_pages_has_the_same_bits(attend, dim: int) -> None:
    pools, query = (random(3, 64, 2, dim), random(3, 64, 2, dim, seed=1)), random(2, 4, dim, seed=2)
    found = []
    for pages in ([2, 3, 4], [6, 3, 1], [0, 1, 6], [4, 3, 2]):
        kv = PagedKV(1, 2, dim, 7, 1)
        for pool, content in zip((kv.keys[0], kv.values[0]), pools, strict=True):
            pool[pages] = content
        found.append(attend(query, kv.keys[0], kv.values[0], torch.tensor(pages), 150))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_delta_steps_alone_and_together_have_the_same_bits() -> None:
    inputs = delta_inputs(6, 2, 6)
    outputs, states = ops.delta_rule_steps(*inputs)
    state = inputs[-1]
    for index in range(6):
        alone, trail = ops.delta_rule_steps(*(x[index : index + 1].clone() for x in inputs[:-1]), state)
        assert torch.equal(alone[0], outputs[index])
        assert torch.equal(trail[0], states[index])
        state = trail[0]


def test_silu_sigmoid_softplus_at_the_ends() -> None:
    x = torch.tensor([-200.0, -20.0, 0.0, 20.0, 200.0])
    assert torch.allclose(ops.sigmoid(x), torch.sigmoid(x))
    assert torch.allclose(ops.silu(x), torch.nn.functional.silu(x))
    assert torch.allclose(ops.softplus(x), torch.nn.functional.softplus(x))


def test_philox_known_answers() -> None:
    """The known-answer vectors that the authors publish with their library."""
    ones = 0xFFFFFFFF
    assert ops.philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert ops.philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert ops.philox4x32(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_numbers_are_uniform_and_distinct() -> None:
    numbers = [
        ops.uniform(seed, position, purpose) for seed in range(10) for position in range(100) for purpose in range(4)
    ]
    assert len(set(numbers)) == 4000
    assert min(numbers) >= 0.0 and max(numbers) < 1.0
    counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees, p = 0.001
    assert ops.uniform(1 << 40, 3, 0) != ops.uniform(0, 3, 0)
