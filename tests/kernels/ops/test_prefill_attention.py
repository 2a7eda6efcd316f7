"""Attention of a chunk: the cache in a row, bit by bit, and the products against float64."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels.kvcache import DIM, PAGE
from duovolt.kernels.prefill_attention import gather, prefill_attention, prefill_attention_reference

from .support import HALF_ERROR, data, relative
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
