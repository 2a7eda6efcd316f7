"""Attention of a chunk: the cache in a row, bit by bit, and the products against float64."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import prefill_attention as module
from duovolt.kernels.kvcache import DIM, PAGE
from duovolt.kernels.prefill_attention import (
    flash_takes,
    gather,
    prefill_attention,
    prefill_attention_reference,
    torch_attends,
)

from .support import HALF_ERROR, Guarded, bits, data, relative
from .test_attention import Case

FORMS = pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])


@FORMS
@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_gather_is_the_decoded_cache(device, int8, length):
    case = Case(device, int8, [150], [1])
    keys, values = gather(case.cache, case.tables[0], length)
    for got, pool in zip((keys, values), case.cache.decoded(), strict=True):
        wanted = pool[case.tables[0].long()].flatten(0, 1)[:length].transpose(0, 1)
        assert torch.equal(got, wanted.half())


def test_memory_does_not_grow_from_chunk_to_chunk(monkeypatch):
    """A piece that is larger each time fits none that was freed before, and the allocator would keep them all."""
    case = Case(torch.device("cpu"), True, [640], [1])
    monkeypatch.setattr(module, "launch", lambda *arguments: None)
    asked = set()
    for length in (1, 64, 65, 128, 640):
        keys, values = gather(case.cache, case.tables[0], length)
        assert keys.shape == values.shape == (case.cache.kv_heads, length, DIM)
        assert keys.is_contiguous() and values.is_contiguous() and not values.data_ptr() % 16
        assert keys.data_ptr() + keys.nbytes <= values.data_ptr()
        asked.add(keys.untyped_storage().nbytes())
    pages = case.tables[0].shape[0]
    assert asked == {2 * 2 * case.cache.kv_heads * pages * PAGE * DIM}


@FORMS
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 70), (63, 2), (40, 100)])
def test_a_chunk_against_float64(device, int8, start, count):
    case = Case(device, int8, [start], [count], heads=(6, 2))
    gate = data("normal", (count, 6, 2, DIM), np.random.default_rng(1), device)[:, :, 1]
    exact = case.exact()
    got = prefill_attention(case.query, case.cache, case.tables[0], start)
    assert relative(got, exact) <= HALF_ERROR
    gated = prefill_attention(case.query, case.cache, case.tables[0], start, gate=gate)
    assert relative(gated, exact / (1 + np.exp(-gate.double().cpu().numpy()))) <= HALF_ERROR
    wanted = prefill_attention_reference(case.query, case.cache, case.tables[0], start, gate=gate)
    assert relative(gated, wanted.double().cpu().numpy()) <= HALF_ERROR


@FORMS
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 70), (63, 2), (40, 24), (130, 23)])
def test_our_own_kernel_against_float64(device, int8, start, count):
    """Blocks of 9 or 10 tokens of six heads: more than one, an uneven last one, pages that only some rows see."""
    case = Case(device, int8, [start], [count], heads=(6, 1), seed=start + count)
    gate = data("normal", (count, 6, 2, DIM), np.random.default_rng(1), device)[:, :, 1]
    exact = case.exact() / (1 + np.exp(-gate.double().cpu().numpy()))
    out = Guarded((count, 6 * DIM), torch.float16, device)
    got = prefill_attention(case.query, case.cache, case.tables[0], start, gate=gate, out=out.inner, own=True)
    assert got is out.inner and out.intact
    assert relative(got, exact) <= HALF_ERROR


@FORMS
def test_our_own_kernel_gives_a_token_the_same_bits_in_every_chunk(device, int8):
    case = Case(device, int8, [60], [14], heads=(12, 2))
    whole = prefill_attention(case.query, case.cache, case.tables[0], 60, own=True)
    assert relative(whole, case.exact()) <= HALF_ERROR
    for first, last in ((0, 3), (3, 14)):
        part = prefill_attention(case.query[first:last].clone(), case.cache, case.tables[0], 60 + first, own=True)
        assert torch.equal(bits(part), bits(whole[first:last]))


@FORMS
def test_what_stands_behind_the_last_token_does_not_matter(device, int8):
    case = Case(device, int8, [70], [2])
    clean = prefill_attention(case.query, case.cache, case.tables[0], 70, own=True)
    used = case.tables[0].long()
    for pool in (pool for pool in vars(case.cache).values() if pool is not None):
        others = torch.ones(case.cache.pages, dtype=torch.bool)
        others[used.cpu()] = False
        pool[others.to(device)] = 0xFF if pool.dtype == torch.uint8 else float("nan")
    for scales, words in ((case.cache.value_scales, case.cache.values), (case.cache.key_scales, case.cache.keys)):
        if scales is not None:
            scales[used[1], :, 8:] = float("nan")
        elif words is case.cache.values:
            words[used[1], :, 1:] = float("nan")
        else:
            words[used[1], :, 1:] = float("inf")
    got = prefill_attention(case.query, case.cache, case.tables[0], 70, own=True)
    assert torch.equal(bits(got), bits(clean))


def test_bad_calls_are_refused():
    case = Case(torch.device("cpu"), True, [3], [2])
    for call, message in (
        (lambda: gather(case.cache, case.tables[0], PAGE + 1), "length is 65: expected 1 to 64"),
        (lambda: gather(case.cache, case.tables[0].long(), 5), "table is torch.int64"),
        (lambda: prefill_attention(case.query.float(), case.cache, case.tables[0], 3), "query is torch.float32"),
        (lambda: prefill_attention(case.query, case.cache, case.tables[0], -1), "start is -1"),
        (lambda: prefill_attention(case.query, case.cache, case.tables[0], 3), "runs on a CUDA device"),
    ):
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("tokens", "length"), [(64, 64), (64, 256), (2048, 8192)])
def test_torch_s_fused_kernel_takes_a_chunk_behind_others(tokens, length):
    """A slow way that gives the same numbers is not seen by comparing them."""
    if not torch_attends(torch.cuda.get_device_capability()):
        pytest.skip("this card has our own kernel")
    query = torch.zeros(1, 12, tokens, 256, device="cuda").half()
    keys = torch.zeros(1, 2, length, 256, device="cuda").half()
    assert flash_takes(query, keys, keys, True)
