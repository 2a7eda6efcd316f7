"""Kernels of a round as compute capability 9 has them, emulated: the right numbers, and nothing read or written too early.

What each may read before it has waited for the launch before it is held against `EARLY_READS` of conftest.py at every
launch. The delta rule, attention and the exchanges are tried so in their own modules, products in test_emulation.py.
"""

import pytest
import torch

from duovolt.kernels import checks, norm, rope
from duovolt.kernels.kvcache import PAGE

from .conftest import EARLY_READS
from .support import bits
from .test_rope import EPS, Case


@pytest.fixture
def kernels(request, emulated, monkeypatch):
    """The source that the test names, as compute capability 9 compiles it."""
    made = emulated(request.param, "hopper")
    monkeypatch.setattr(checks, "module_on", lambda source, device: made)
    monkeypatch.setattr(made, "early", {})
    return made


@pytest.mark.parametrize("kernels", [norm.SOURCE], indirect=True)
@pytest.mark.parametrize("tokens", [1, norm._FEW + 1])
def test_norms_and_embedding(kernels, tokens):
    generator = torch.Generator().manual_seed(tokens)
    x, delta = (torch.randn(tokens, 1032, generator=generator) for _ in range(2))
    weight, wide = torch.randn(1032, generator=generator), torch.empty(tokens, 1032)
    got = norm.rms_norm(x.clone(), weight, EPS, delta=delta, wide=wide)
    torch.testing.assert_close(got, norm.rms_norm_reference(x + delta, weight, EPS), rtol=2e-3, atol=1e-5)
    states, gate = torch.randn(tokens, 5, 128, generator=generator), torch.randn(tokens, 5 * 128, generator=generator)
    got = norm.gated_rms_norm(states, gate, weight[:128].contiguous(), EPS)
    expected = norm.gated_rms_norm_reference(states, gate, weight[:128].contiguous(), EPS)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-5)
    ids = torch.arange(tokens, dtype=torch.int32) % 3
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        table = torch.randn(3, 64, generator=generator).to(dtype)
        assert torch.equal(norm.embed(ids, table), table[ids.long()].float())
    gated = "gated_rms_norm" if tokens == 1 else "gated_rms_norm_many"
    assert kernels.early["rms_norm"] == kernels.early[gated] == {"weight"}
    many = "" if tokens == 1 else "many_"
    assert not any(kernels.early[f"embed_{many}{name}"] for name in ("bf16", "fp16", "fp32"))


@pytest.mark.parametrize("kernels", [norm.SOURCE], indirect=True)
@pytest.mark.parametrize("columns", [8, 1032, 5120, 8192])
def test_a_row_in_a_cluster_has_the_bits_of_a_block(kernels, monkeypatch, columns):
    generator = torch.Generator().manual_seed(columns)
    x, delta = (300 * torch.randn(3, columns, generator=generator) for _ in range(2))
    weight, found = 100 * torch.randn(columns, generator=generator), []
    for most in (1, norm.MAX_CLUSTER):
        monkeypatch.setattr(norm, "MAX_CLUSTER", most)
        own, wide, overflows = x.clone(), torch.empty_like(x), torch.zeros(3, dtype=torch.int32)
        got = norm.rms_norm(own, weight, EPS, delta=delta, wide=wide, overflows=overflows)
        found.append((got, own, wide, overflows))
    assert norm._blocks_a_row(norm.row_threads(columns) // 32) == {8: 1, 1032: 3, 5120: 5, 8192: 8}[columns]
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("kernels", [rope.SOURCE], indirect=True)
@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
@pytest.mark.parametrize(("heads", "tokens"), [((1, 1), 3), ((6, 2), 3), ((1, 1), rope._FEW + 1)])
def test_queries_and_keys(kernels, emulated, monkeypatch, int8, heads, tokens):
    """With the bits of the form that does not overlap, unknown positions and unused slots too."""
    case = Case(torch.device("cpu"), "normal", *heads, tokens, int8)
    case.positions[:, 1], case.slots[2] = 10**6, -1
    found = []
    for arch in ("hopper", "volta"):
        made = emulated(rope.SOURCE, arch)
        monkeypatch.setattr(checks, "module_on", lambda source, device, made=made: made)
        for pool in (case.cache.keys, case.cache.values, case.cache.key_scales, case.cache.value_scales):
            if pool is not None:
                pool.zero_()
        query = rope.qkv_rope(*case.arguments(), case.cache, EPS)
        found.append([query, *case.stored(torch.arange(4 * PAGE))])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(bits(ours), bits(theirs))
    assert found[0][0][1].isnan().any() and not found[0][0][0].isnan().any()
    name = f"qkv_rope_{'' if tokens <= rope._FEW else 'many_'}{'int8' if int8 else 'fp16'}"
    assert kernels.early[name] == EARLY_READS["qkv_rope"]
