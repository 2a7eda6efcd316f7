"""Decode attention in both forms of the tensor-core product, emulated and on a GPU, against float64."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import checks, oracle
from duovolt.kernels.attention import (
    SOURCE,
    TIERS,
    Sequences,
    decode_attention,
    decode_attention_reference,
    segments_for,
)
from duovolt.kernels.kvcache import DIM, PAGE, KVCache

from .support import HALF_ERROR, Guarded, bits, data, relative


def words_like(cache: KVCache, rng: np.random.Generator, device: torch.device) -> KVCache:
    """The pool filled with random words: every page, also those that no sequence uses."""

    def fill(pool: torch.Tensor | None, *, scale: bool) -> torch.Tensor | None:
        if pool is None:
            return None
        if pool.dtype == torch.uint8:
            return torch.from_numpy(rng.integers(1, 256, pool.shape, dtype=np.uint8)).to(device)
        values = np.exp(rng.standard_normal(pool.shape)) * 0.01 if scale else rng.standard_t(4, pool.shape)
        return torch.from_numpy(values.astype(np.float16)).to(device)

    return KVCache(
        fill(cache.keys, scale=False),
        fill(cache.values, scale=False),
        fill(cache.key_scales, scale=True),
        fill(cache.value_scales, scale=True),
    )


class Case:
    def __init__(self, device, int8, starts, counts, heads=(4, 2), seed=0, sharp=1.0):
        rng = np.random.default_rng(seed)
        q_heads, kv_heads = heads
        width = max(-(-(s + c) // PAGE) for s, c in zip(starts, counts, strict=True))
        pages = width * len(starts) + 1
        self.cache = words_like(KVCache.empty(pages, kv_heads, int8=int8), rng, device)
        tables = rng.permutation(pages)[: width * len(starts)].reshape(len(starts), width).astype(np.int32)
        self.tables = torch.from_numpy(tables).to(device)
        self.starts, self.counts = starts, counts
        self.sequences = Sequences.of(self.tables, starts, counts)
        self.query = (data("normal", (sum(counts), q_heads, DIM), rng, device) * sharp).half()
        self.bounds = {"max_tokens": max(counts), "max_positions": width * PAGE}

    def exact(self):
        keys, values = (pool.cpu().numpy() for pool in self.cache.decoded())
        out, row = [], 0
        for table, start, count in zip(self.tables.cpu().numpy(), self.starts, self.counts, strict=True):
            length = start + count
            own = [pool[table].reshape(-1, *pool.shape[2:])[:length] for pool in (keys, values)]
            query = self.query[row : row + count].cpu().numpy().astype(np.float64)
            out.append(oracle.attention(query, *own, start))
            row += count
        return np.concatenate(out)


FORMS = pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])


@FORMS
@pytest.mark.parametrize("count", [1, 4, 6, 8])
def test_against_float64_for_every_count(tensor_core_device, int8, count):
    case = Case(tensor_core_device, int8, [70], [count], heads=(12, 2), seed=count)
    out = Guarded((count, 12 * DIM), torch.float16, tensor_core_device)
    got = decode_attention(case.query, case.cache, case.sequences, out=out.inner, **case.bounds)
    assert got is out.inner and out.intact
    assert relative(got, case.exact()) <= HALF_ERROR
    torch.testing.assert_close(
        got, decode_attention_reference(case.query, case.cache, case.sequences, **case.bounds), rtol=1e-2, atol=2e-3
    )


@FORMS
@pytest.mark.parametrize("start", [0, 62, 63, 64, 127, 128])
def test_page_and_segment_edges(tensor_core_device, int8, start):
    case = Case(tensor_core_device, int8, [start], [2], seed=start)
    got = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(got, case.exact()) <= HALF_ERROR


@FORMS
def test_same_bits_alone_and_among_others(tensor_core_device, int8):
    """One token of a batch of three sequences, alone, with other bounds and in other rows."""
    device = tensor_core_device
    case = Case(device, int8, [125, 3, 66], [4, 1, 3], heads=(12, 2))
    together = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(together, case.exact()) <= HALF_ERROR
    for row, (sequence, position) in enumerate([(0, 125), (0, 126), (0, 127), (0, 128), (1, 3), (2, 66), (2, 67)]):
        alone = Sequences.of(case.tables[sequence : sequence + 1].contiguous(), [position], [1])
        width = case.tables.shape[1] * PAGE
        got = decode_attention(
            case.query[row : row + 1].clone(), case.cache, alone, max_tokens=1 + row % 3, max_positions=width - row
        )
        assert torch.equal(bits(got[0]), bits(together[row])), f"row {row}"


@FORMS
def test_same_bits_in_every_row_for_queries_of_all_magnitudes(tensor_core_device, int8):
    """Sums of a query's own values round only where its values lie far apart: in any row they must round alike."""
    device = tensor_core_device
    case = Case(device, int8, [125], [8], heads=(12, 2), seed=5)
    rng = np.random.default_rng(6)
    spread = torch.from_numpy(np.exp2(rng.integers(-13, 2, case.query.shape)).astype(np.float32)).to(device)
    case.query = (case.query.float() * spread).half()
    together = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    for row in range(8):
        alone = Sequences.of(case.tables, [125 + row], [1])
        got = decode_attention(
            case.query[row : row + 1].clone(),
            case.cache,
            alone,
            max_tokens=1,
            max_positions=case.bounds["max_positions"],
        )
        assert torch.equal(bits(got[0]), bits(together[row])), f"row {row}"


@FORMS
@pytest.mark.parametrize("sharp", [0.0, 8.0], ids=["uniform", "one-hot"])
def test_flat_and_sharp_weights(tensor_core_device, int8, sharp):
    case = Case(tensor_core_device, int8, [199], [1], sharp=sharp)
    got = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(got, case.exact()) <= HALF_ERROR


@FORMS
def test_the_gate_and_rows_that_are_not_used(tensor_core_device, int8):
    device = tensor_core_device
    case = Case(device, int8, [10, 20], [2, 1])
    gate = data("normal", (3, 4, 2, DIM), np.random.default_rng(1), device)[:, :, 1]
    case.sequences.positions[1] = -1
    out = torch.full((3, 4 * DIM), 7.0, dtype=torch.float16, device=device)
    got = decode_attention(case.query, case.cache, case.sequences, gate=gate, out=out, **case.bounds)
    wanted = case.exact() / (1 + np.exp(-gate.double().cpu().numpy()))
    assert relative(got[[0, 2]], wanted[[0, 2]]) <= HALF_ERROR
    assert (got[1] == 7).all()


@FORMS
def test_what_stands_behind_the_last_token_does_not_matter(tensor_core_device, int8):
    """Positions behind the sequence and pages of others hold NaN, infinities and other words."""
    device = tensor_core_device
    case = Case(device, int8, [70], [2])
    clean = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    used = case.tables[0].long()
    dirty = [pool for pool in vars(case.cache).values() if pool is not None]
    for pool in dirty:
        others = torch.ones(case.cache.pages, dtype=torch.bool)
        others[used.cpu()] = False
        pool[others.to(device)] = 0xFF if pool.dtype == torch.uint8 else float("nan")
    last = used[1]
    if int8:
        case.cache.key_scales[last, :, 8:] = float("nan")
        case.cache.value_scales[last, :, 8:] = float("inf")
        case.cache.keys[last, :, 1:] = 255
    else:
        case.cache.keys[last, :, 1:] = float("nan")
        case.cache.values[last, :, 1:] = float("nan")
    got = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert torch.equal(bits(got), bits(clean))


@FORMS
def test_nan_in_a_key_stays_in_its_sequence(tensor_core_device, int8):
    case = Case(tensor_core_device, int8, [5, 5], [1, 1])
    (case.cache.key_scales if int8 else case.cache.keys)[case.tables[0, 0].long()] = float("nan")
    got = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert got[0].isnan().all() and torch.isfinite(got[1]).all()


@pytest.mark.parametrize("start", [2047, 8190, 8191, 8192, 32767, 65535, 70001])
@pytest.mark.parametrize("name", ["portable", "native"])
@FORMS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_far_positions(int8, name, start):
    from duovolt.kernels.module import PORTABLE, forced_arch

    case = Case(torch.device("cuda", 0), int8, [start], [4], heads=(12, 2))
    if name == "portable":
        with forced_arch(PORTABLE):
            got = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    else:
        got = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(got, case.exact()) <= HALF_ERROR


@pytest.mark.parametrize("position", [0, 127, 128, 8191, 8192, 32767, 32768, 65535, 65536, 262143])
def test_segments_count_up_to_a_position(position):
    begins = [
        b
        for (begin, length), end in zip(TIERS, (8192, 32768, 65536, 300000), strict=True)
        for b in range(begin, end, length)
    ]
    assert segments_for(position + 1) == sum(begin <= position for begin in begins)


def test_bad_calls_are_refused():
    case = Case(torch.device("cpu"), True, [3], [2])
    good = {"query": case.query, "sequences": case.sequences, **case.bounds}
    seven = Sequences.of(torch.zeros(7, 1, dtype=torch.int32), [0] * 7, [1] * 7)
    for change, message in (
        ({"query": case.query.float()}, "query is torch.float32"),
        ({"query": case.query[:, :3].contiguous()}, "a multiple of the 2 KV heads"),
        ({"query": case.query[..., :128].contiguous()}, r"expected \[2, 4, 256\]"),
        ({"max_tokens": 9}, "max_tokens is 9: expected 1 to 8"),
        ({"max_positions": 65}, "max_positions is 65: expected 1 to 64"),
        ({"sequences": seven}, "at most 4 sequences"),
        ({"gate": torch.zeros(2, 4, 255)}, r"gate is torch.float32 \[2, 4, 255\]"),
        ({"out": torch.zeros(2, 1024)}, "out is torch.float32"),
        ({}, "runs on a CUDA device"),
    ):
        call = {**good, **change}
        with pytest.raises(InputError, match=message):
            decode_attention(call.pop("query"), case.cache, call.pop("sequences"), **call)


@FORMS
@pytest.mark.parametrize(("start", "count"), [(5, 1), (64, 1), (126, 3), (191, 1)])
def test_pages_that_this_round_writes_are_read_once_the_launch_before_has_ended(
    emulated, monkeypatch, int8, start, count
):
    """Where launches overlap: older pages alone are asked for before the wait, and they are."""
    kernels = emulated(SOURCE, "hopper")
    monkeypatch.setattr(checks, "module_on", lambda source, device: kernels)
    case = Case(torch.device("cpu"), int8, [start], [count], heads=(2, 1), seed=start)
    written = case.tables[0, start // PAGE : (start + count - 1) // PAGE + 1].tolist()
    pools = (case.cache.keys, case.cache.values, case.cache.key_scales, case.cache.value_scales)
    fresh = [case.query, *(pool[page] for pool in pools if pool is not None for page in written)]
    monkeypatch.setattr(kernels, "fresh", fresh)
    monkeypatch.setattr(kernels, "early", {})
    got = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(got, case.exact()) <= HALF_ERROR
    (read,) = (read for name, read in kernels.early.items() if name != "attention_merge")
    assert ("keys" in read) == ("values" in read) == (start >= PAGE)
