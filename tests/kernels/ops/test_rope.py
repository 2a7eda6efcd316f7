"""Norm, rotary embedding and the write into the paged cache, emulated and on a GPU, against float64."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import oracle, reference
from duovolt.kernels.kvcache import DIM, PAGE, KVCache, hadamard
from duovolt.kernels.rope import _FEW, qkv_rope, qkv_rope_reference

from .support import HALF_ERROR, Guarded, bits, data, relative

EPS, THETA, SECTION, FAR = 1e-6, 1e7, [11, 11, 10], 300


class Case:
    def __init__(self, device, kind, q_heads, kv_heads, tokens, int8, seed=0):
        rng = np.random.default_rng(seed)
        self.q_heads, self.kv_heads, self.tokens = q_heads, kv_heads, tokens
        width = 2 * (q_heads + kv_heads) * DIM
        self.projection = data(kind, (tokens, width + 32), rng, device)[:, :width]
        self.weights = data("normal", (2, DIM), rng, device)
        self.tables = tuple(
            t.to(device) for t in reference.rope_table(FAR, reference.inverse_frequencies(DIM, 0.25, THETA))
        )
        self.axes = reference.mrope_axes(32, SECTION).int().to(device)
        self.positions = torch.from_numpy(rng.integers(0, FAR, (3, tokens)).astype(np.int32)).to(device)
        slots = rng.permutation(4 * PAGE)[:tokens].astype(np.int32)
        self.slots = torch.from_numpy(slots).to(device)
        self.cache = KVCache.empty(4, kv_heads, int8=int8, device=device)

    def arguments(self, rows=slice(None)):
        return (
            self.projection[rows],
            *self.weights,
            self.tables,
            self.axes,
            self.positions[:, rows].contiguous(),
            self.slots[rows].contiguous(),
        )

    def exact(self):
        """Queries, keys (not turned) and values in float64."""
        wide = self.projection.cpu().numpy().astype(np.float64)
        heads = wide.reshape(self.tokens, -1, DIM)
        query, rest = heads[:, : 2 * self.q_heads : 2], heads[:, 2 * self.q_heads :]
        places = self.positions.cpu().numpy()
        turned = []
        for x, weight in zip((query, rest[:, : self.kv_heads]), self.weights.cpu().numpy(), strict=True):
            normed = oracle.rms_norm(x, weight, EPS)
            turned.append(oracle.rope(normed, places, partial=0.25, theta=THETA, section=SECTION))
        return *turned, rest[:, self.kv_heads :]

    def stored(self, slots=None):
        slots = self.slots if slots is None else slots
        return tuple(pool.flatten(0, 1)[slots.long()].cpu() for pool in self.cache.decoded())


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
@pytest.mark.parametrize("heads", [(12, 2), (2, 1), (24, 4)], ids=str)
@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_queries_keys_and_values(device, kind, heads, int8):
    case = Case(device, kind, *heads, 5, int8)
    out = Guarded((5, heads[0], DIM), torch.float16, device)
    got = qkv_rope(*case.arguments(), case.cache, EPS, out=out.inner)
    assert out.intact
    query, key, value = case.exact()
    keys, values = case.stored()
    if int8:  # the transform is orthonormal and its own inverse
        got, keys = hadamard(got.float()), hadamard(keys)
        assert relative(keys, key) <= 1e-2
        turned = hadamard(torch.from_numpy(key)).reshape(5, -1, 4, 64)
        for exact, back in ((turned, case.stored()[0]), (torch.from_numpy(value).reshape(turned.shape), values)):
            step = exact.abs().amax(-1, keepdim=True) / 127
            assert ((exact - back.reshape(exact.shape)).abs() <= step * (0.5 + 127 * 2.0**-11) + 1e-6).all()
    else:
        assert relative(keys, key) <= HALF_ERROR and relative(values, value) <= HALF_ERROR
    assert relative(got, query) <= HALF_ERROR
    other = Case(device, kind, *heads, 5, int8)
    reference_query = qkv_rope_reference(*other.arguments(), other.cache, EPS)
    torch.testing.assert_close(out.inner, reference_query, rtol=2e-3, atol=2e-3)
    for ours, theirs in zip(case.stored(), other.stored(), strict=True):
        assert relative(ours, theirs.double().numpy()) <= HALF_ERROR


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
def test_same_bits_alone_and_nothing_else_is_touched(device, int8):
    case = Case(device, "normal", 4, 2, 4, int8)
    together = qkv_rope(*case.arguments(), case.cache, EPS)
    alone = Case(device, "normal", 4, 2, 4, int8)
    got = qkv_rope(*alone.arguments(slice(2, 3)), alone.cache, EPS)
    assert torch.equal(bits(got[0]), bits(together[2]))
    untouched = torch.ones(4 * PAGE, dtype=torch.bool)
    untouched[case.slots[2].cpu()] = False
    for both, single, empty in zip(
        case.cache.decoded(), alone.cache.decoded(), KVCache.empty(4, 2, int8=int8).decoded(), strict=True
    ):
        both, single = both.flatten(0, 1).cpu(), single.flatten(0, 1).cpu()
        assert torch.equal(both[~untouched], single[~untouched])
        assert torch.equal(single[untouched], empty.flatten(0, 1)[untouched])


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
def test_slots_outside_of_the_pool_are_dropped_and_strange_positions_give_nan(device, int8):
    case = Case(device, "normal", 2, 1, 4, int8)
    case.slots[:3] = torch.tensor([-1, 4 * PAGE, 2**31 - 1], dtype=torch.int32)
    case.slots[3] = PAGE + 63
    case.positions[0, 1], case.positions[1, 0] = FAR, -1
    got = qkv_rope(*case.arguments(), case.cache, EPS)
    keys, _ = case.cache.decoded()
    written = (keys.flatten(0, 1) != 0).flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [PAGE + 63]
    assert got[:2].isnan().any() and torch.isfinite(got[2:]).all()


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
@pytest.mark.parametrize("heads", [(2, 2), (1, 1), (7, 2)], ids=str)
def test_many_tokens_have_the_bits_of_few(device, int8, heads):
    """Values that go to whole runs of a page: from any place in a run on, with padding, gaps and other orders between.

    Two heads a warp: two queries, two keys, one of each, one and nothing.
    """
    tokens = _FEW + 20
    case = Case(device, "heavy", *heads, tokens, int8)
    places = torch.arange(tokens) + 5  # tokens 11 .. 26, 27 .. 42 and so on are whole runs
    places[30], places[-4:] = -1, -1
    places[50], places[51] = places[51].item(), places[50].item()
    case.slots = places.to(torch.int32).to(device)
    case.projection[40, -7], case.projection[41, -8] = -1e6, float("nan")
    counts = [torch.zeros(tokens, dtype=torch.int32, device=device) for _ in range(2)]
    together = qkv_rope(*case.arguments(), case.cache, EPS, overflows=counts[0])
    few = KVCache.empty(4, heads[1], int8=int8, device=device)
    for rows in (slice(0, 30), slice(30, tokens)):
        alone = qkv_rope(*case.arguments(rows), few, EPS, overflows=counts[1][rows])
        assert torch.equal(bits(together[rows]), bits(alone))
    assert counts[0].tolist() == counts[1].tolist()
    assert counts[0][40] > 0 and few.values.count_nonzero() > 0
    for name in ("keys", "key_scales", "values", "value_scales"):
        ours, theirs = getattr(case.cache, name), getattr(few, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(bits(ours), bits(theirs))


def test_overflow_is_counted_and_finite(device):
    case = Case(device, "normal", 2, 1, 3, False)
    case.projection[1, -DIM:] = 0  # the value of token 1
    case.projection[1, -7] = -1e6
    overflows = torch.zeros(3, dtype=torch.int32, device=device)
    qkv_rope(*case.arguments(), case.cache, EPS, overflows=overflows)
    assert overflows.tolist() == [0, 1, 0]
    assert case.stored()[1][1, 0, -7] == -65504


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
def test_nan_in_a_value_is_not_lost(device, int8):
    case = Case(device, "normal", 2, 1, 2, int8)
    case.projection[1, -7] = float("nan")
    qkv_rope(*case.arguments(), case.cache, EPS)
    values = case.stored()[1]
    assert values[1, 0, -7].isnan() and torch.isfinite(values[0]).all()


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
@pytest.mark.parametrize("more", [0, _FEW], ids=["few", "many"])
def test_the_largest_and_the_smallest_finite_elements(device, int8, more):
    """Squares that overflow give zeros, as a norm in FP32 does, and no NaN; an infinity gives NaN and stays in its head."""
    tokens = 4 + more
    case = Case(device, "normal", 2, 1, tokens, int8)
    heads = case.projection.unflatten(1, (-1, DIM))  # query, gate, query, gate, key, value
    heads[0, ::2] = torch.finfo(torch.float32).max
    heads[1, ::2] = 1e-30
    heads[2, 0, 200] = float("inf")
    case.weights[:] = 3.0
    got = qkv_rope(*case.arguments(), case.cache, EPS)
    keys, _ = case.stored()
    assert not got[:2].count_nonzero() and not keys[:2].count_nonzero()
    assert got[2, 0].isnan().any() and torch.isfinite(got[2, 1]).all() and torch.isfinite(got[3:]).all()
    assert torch.isfinite(keys[:4]).all()


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
def test_torch_writes_and_reads_the_same_layout(int8):
    """Every element of a page comes back from where it was put, by the reference alone."""
    rng = np.random.default_rng(1)
    cache = KVCache.empty(2, 2, int8=int8)
    slots = torch.from_numpy(rng.permutation(2 * PAGE))
    keys, values = (torch.from_numpy(rng.integers(-127, 128, (128, 2, DIM)).astype(np.float32)) for _ in range(2))
    keys[..., ::64] = values[..., ::64] = 127.0  # a scale of one
    cache.store(slots, keys, values)
    for pool, exact in zip(cache.decoded(), (keys, values), strict=True):
        assert torch.equal(pool.flatten(0, 1)[slots], exact)


def test_bad_calls_are_refused():
    case = Case(torch.device("cpu"), "normal", 2, 1, 2, True)
    good = list(case.arguments())
    for index, replaced, message in (
        (0, good[0].half(), "projection is torch.float16"),
        (0, good[0][:, :-1], "projection is"),
        (1, good[1][:9], r"query_weight is \[9\]"),
        (3, (good[3][0], good[3][1][:5]), "sines is"),
        (5, good[5].long(), "positions is torch.int64"),
        (6, good[6][:1], r"slots is \[1\]: expected \[2\]"),
    ):
        bad = [*good]
        bad[index] = replaced
        with pytest.raises(InputError, match=message):
            qkv_rope(*bad, case.cache, EPS)
    with pytest.raises(InputError, match="an int8 cache has scales"):
        KVCache(case.cache.keys, case.cache.values)
    with pytest.raises(InputError, match="runs on a CUDA device"):
        qkv_rope(*good, case.cache, EPS)
