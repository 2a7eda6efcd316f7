"""Attention in the plain way (`--attention plain`), emulated and on a GPU: against float64, and beside the fast kernels."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels.attention import Sequences, decode_attention
from duovolt.kernels.kvcache import DIM, PAGE
from duovolt.kernels.plain_attention import plain_attention, plain_prefill_attention
from duovolt.kernels.prefill_attention import prefill_attention

from .support import HALF_ERROR, Guarded, bits, data, relative
from .test_attention import Case

FORMS = pytest.mark.parametrize("int8", [True, False], ids=["int8", "fp16"])
ONE_ROUNDING = 4e-4  # relative L2: sums in FP32, and the result to fp16 once


@FORMS
@pytest.mark.parametrize(("start", "count"), [(0, 1), (62, 3), (127, 2), (70, 8)])
def test_a_round_against_float64_and_beside_the_fast_kernel(device, int8, start, count):
    case = Case(device, int8, [start], [count], heads=(6, 2), seed=start)
    gate = data("normal", (count, 6, 2, DIM), np.random.default_rng(1), device)[:, :, 1]
    out = Guarded((count, 6 * DIM), torch.float16, device)
    got = plain_attention(case.query, case.cache, case.sequences, gate=gate, out=out.inner, **case.bounds)
    assert got is out.inner and out.intact
    assert relative(got, case.exact() / (1 + np.exp(-gate.double().cpu().numpy()))) <= ONE_ROUNDING


@FORMS
def test_the_fast_kernels_give_the_same_to_the_rounding_of_fp16(tensor_core_device, int8):
    case = Case(tensor_core_device, int8, [130, 20], [2, 1], heads=(6, 2))
    plain = plain_attention(case.query, case.cache, case.sequences, **case.bounds)
    fast = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(fast, plain.double().cpu().numpy()) <= HALF_ERROR
    one = case.query[:2].clone()
    read = prefill_attention(one, case.cache, case.tables[0], 130)
    assert relative(read, plain[:2].double().cpu().numpy()) <= HALF_ERROR


@FORMS
def test_a_token_has_the_same_bits_in_a_round_and_in_a_prompt_alone_and_among_others(device, int8):
    case = Case(device, int8, [125, 3], [4, 1], heads=(6, 2), seed=2)
    together = plain_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(together, case.exact()) <= ONE_ROUNDING
    assert torch.equal(
        bits(plain_prefill_attention(case.query[:4].clone(), case.cache, case.tables[0].clone(), 125)),
        bits(together[:4]),
    )
    for row, (sequence, position) in enumerate([(0, 125), (0, 126), (0, 127), (0, 128), (1, 3)]):
        alone = Sequences.of(case.tables[sequence : sequence + 1].contiguous(), [position], [1])
        width = case.tables.shape[1] * PAGE
        got = plain_attention(case.query[row : row + 1].clone(), case.cache, alone, max_tokens=1, max_positions=width)
        assert torch.equal(bits(got[0]), bits(together[row])), f"row {row}"


@FORMS
@pytest.mark.parametrize(("start", "count"), [(0, 1), (40, 24), (63, 2)])
def test_a_chunk_against_float64(device, int8, start, count):
    case = Case(device, int8, [start], [count], heads=(4, 2), seed=count)
    gate = data("normal", (count, 4, 2, DIM), np.random.default_rng(1), device)[:, :, 1]
    out = Guarded((count, 4 * DIM), torch.float16, device)
    got = plain_prefill_attention(case.query, case.cache, case.tables[0], start, gate=gate, out=out.inner)
    assert got is out.inner and out.intact
    assert relative(got, case.exact() / (1 + np.exp(-gate.double().cpu().numpy()))) <= ONE_ROUNDING


@FORMS
def test_rows_that_are_not_used_and_what_stands_behind_the_last_token(device, int8):
    case = Case(device, int8, [10, 20], [2, 1])
    case.sequences.positions[1] = -1
    clean = torch.full((3, 4 * DIM), 7.0, dtype=torch.float16, device=device)
    plain_attention(case.query, case.cache, case.sequences, out=clean, **case.bounds)
    assert (clean[1] == 7).all() and relative(clean[[0, 2]], case.exact()[[0, 2]]) <= ONE_ROUNDING
    for page, last in ((int(case.tables[0, 0]), 12), (int(case.tables[1, 0]), 21)):
        for pool in (case.cache.key_scales, case.cache.value_scales) if int8 else ():
            pool[page, :, last:] = float("nan")
        if not int8:
            for position in range(last, PAGE):
                case.cache.keys[page, :, position // 8, :, :, position % 8] = float("nan")
                case.cache.values[page, :, position // 8, :, position % 8] = float("inf")
    got = plain_attention(case.query, case.cache, case.sequences, out=torch.full_like(clean, 7.0), **case.bounds)
    assert torch.equal(bits(got), bits(clean))


@FORMS
def test_nan_in_a_key_stays_in_its_sequence(device, int8):
    case = Case(device, int8, [5, 5], [1, 1])
    (case.cache.key_scales if int8 else case.cache.keys)[case.tables[0, 0].long()] = float("nan")
    got = plain_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert got[0].isnan().all() and torch.isfinite(got[1]).all()


@FORMS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_far_positions_on_a_card(int8):
    case = Case(torch.device("cuda", 0), int8, [40001], [4], heads=(12, 2))
    got = plain_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(got, case.exact()) <= ONE_ROUNDING
    fast = decode_attention(case.query, case.cache, case.sequences, **case.bounds)
    assert relative(fast, got.double().cpu().numpy()) <= HALF_ERROR


def test_bad_calls_are_refused():
    case = Case(torch.device("cpu"), True, [3], [2])
    with pytest.raises(InputError, match="max_tokens is 9: expected 1 to 8"):
        plain_attention(case.query, case.cache, case.sequences, max_tokens=9, max_positions=64)
    with pytest.raises(InputError, match="length is 66"):
        plain_prefill_attention(case.query, case.cache, case.tables[0], 64)
    with pytest.raises(InputError, match="runs on a CUDA device"):
        plain_attention(case.query, case.cache, case.sequences, **case.bounds)
