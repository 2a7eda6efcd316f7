"""Norms, gates and the embedding gather, emulated and on a GPU, against float64."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import norm, oracle

from .support import HALF_ERROR, WIDE_ERROR, Guarded, bits, data, relative

EPS = 1e-6


@pytest.mark.parametrize("kind", ["normal", "heavy", "zero", "tiny"])
@pytest.mark.parametrize("columns", [8, 128, 1016, 1024, 1032, 5120])
def test_rms_norm(device, columns, kind):
    rng = np.random.default_rng(columns)
    tokens = 2 if device.type == "cpu" else 33
    x, delta = data(kind, (tokens, columns), rng, device), data(kind, (tokens, columns), rng, device)
    weight = data("normal", (columns,), rng, device)
    stream = Guarded((tokens, columns), torch.float32, device, columns + 8)
    out = Guarded((tokens, columns), torch.float16, device, columns + 8)
    wide = Guarded((tokens, columns), torch.float32, device)
    stream.inner.copy_(x)
    overflows = torch.zeros(tokens, dtype=torch.int32, device=device)
    got = norm.rms_norm(stream.inner, weight, EPS, delta=delta, out=out.inner, wide=wide.inner, overflows=overflows)
    assert got is out.inner and stream.intact and out.intact and wide.intact
    assert torch.equal(stream.inner, x + delta) and not overflows.any()
    expected = oracle.rms_norm((x + delta).cpu().numpy(), weight.cpu().numpy(), EPS)
    if kind == "zero":
        assert not wide.inner.any() and not got.any()
    else:
        assert relative(wide.inner, expected) <= WIDE_ERROR
    if kind != "tiny":
        assert relative(got, expected) <= HALF_ERROR
    alone = norm.rms_norm(x[1:2].clone(), weight, EPS, delta=delta[1:2])
    assert torch.equal(bits(alone[0]), bits(got[1]))
    reference = norm.rms_norm_reference(x.clone(), weight, EPS, delta=delta)
    torch.testing.assert_close(got, reference, rtol=2e-3, atol=1e-6)


def test_what_overflows_is_the_largest_and_counted(device):
    x = torch.zeros(3, 64, device=device)
    x[0, 3], x[2, 5] = 1e4, float("nan")
    weight = torch.full((64,), 1e5, device=device)
    overflows = torch.full((3,), 10, dtype=torch.int32, device=device)
    got = norm.rms_norm(x, weight, EPS, overflows=overflows)
    assert overflows.tolist() == [11, 10, 10]
    assert got[0, 3] == 65504 and torch.isnan(got[2]).all() and not got[1].any()


@pytest.mark.parametrize("columns", [1024, 5120])
def test_the_largest_finite_elements_give_zeros_and_no_nan(device, columns):
    """As a norm in FP32 whose squares overflow; an infinity gives NaN, in its row."""
    x = torch.ones(4, columns, device=device)
    x[0], x[1, 7], x[2, 9] = torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, float("inf")
    weight, wide = torch.full((columns,), 60000.0, device=device), torch.empty_like(x)
    got = norm.rms_norm(x, weight, EPS, wide=wide)
    assert not wide[:2].count_nonzero() and not got[:2].count_nonzero()
    assert wide[2].isnan().any() and got[2].isnan().any()
    assert (wide[3] - 60001).abs().max() < 0.1 and got[3].eq(torch.tensor(60001.0).half().item()).all()


@pytest.mark.parametrize("heads", [1, 24, 48])
def test_gated_rms_norm(device, heads):
    rng = np.random.default_rng(heads)
    x, weight = data("heavy", (2, heads, 128), rng, device), data("normal", (128,), rng, device)
    gate = data("normal", (2, heads * 128 + 16), rng, device)[:, : heads * 128]
    out = Guarded((2, heads * 128), torch.float16, device)
    got = norm.gated_rms_norm(x, gate, weight, EPS, out=out.inner)
    assert out.intact
    wide = gate.reshape(2, heads, 128)
    expected = oracle.gated_rms_norm(x.cpu().numpy(), wide.cpu().numpy(), weight.cpu().numpy(), EPS)
    assert relative(got, expected) <= HALF_ERROR
    torch.testing.assert_close(got, norm.gated_rms_norm_reference(x, gate, weight, EPS), rtol=2e-3, atol=1e-5)
    alone = norm.gated_rms_norm(x[1:].clone(), gate[1:].clone(), weight, EPS)
    assert torch.equal(bits(alone[0]), bits(got[1]))


def test_output_gate_between_queries(device):
    rng = np.random.default_rng(3)
    attended = data("heavy", (3, 4, 256), rng, device)
    gate = data("heavy", (3, 4, 2, 256), rng, device)[:, :, 1]
    out = Guarded((3, 1024), torch.float16, device)
    got = norm.output_gate(attended, gate, out=out.inner)
    assert out.intact
    expected = (attended.double() / (1 + torch.exp(-gate.double()))).cpu().numpy()
    assert relative(got, expected) <= HALF_ERROR
    torch.testing.assert_close(got, norm.output_gate_reference(attended, gate), rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("columns", "repeats"), [(72, 1), (72, 12), (5208, 12)])
def test_embed_gathers_every_bit_and_marks_strangers(device, dtype, columns, repeats):
    """Few tokens and many, rows that a block takes in one turn and in more."""
    table = data("heavy", (50, columns), np.random.default_rng(4), device).to(dtype)
    tokens = torch.tensor([49, 0, -1, 50, 7, 2**31 - 1] * repeats, dtype=torch.int32, device=device)
    out = Guarded((6 * repeats, columns), torch.float32, device)
    got = norm.embed(tokens, table, out.inner)
    rows = got.view(repeats, 6, columns)
    assert out.intact and torch.equal(rows[:, [0, 1, 4]], table[[49, 0, 7]].float().expand(repeats, 3, columns))
    assert torch.isnan(rows[:, [2, 3, 5]]).all() and (repeats == 1) == (6 * repeats <= norm._FEW)
    assert torch.equal(got.isnan(), norm.embed_reference(tokens, table).isnan())


X = torch.zeros(2, 16)
REFUSED = {
    "columns": (lambda: norm.rms_norm(torch.zeros(2, 12), torch.zeros(12), EPS), "a multiple of 8 columns"),
    "too wide": (lambda: norm.rms_norm(torch.zeros(1, 8200), torch.zeros(8200), EPS), "at most 8192"),
    "weight": (lambda: norm.rms_norm(X, torch.zeros(8), EPS), r"weight is \[8\]: expected \[16\]"),
    "delta": (lambda: norm.rms_norm(X, torch.zeros(16), EPS, delta=X.half()), "delta is torch.float16"),
    "columns apart": (lambda: norm.rms_norm(torch.zeros(16, 2).t(), torch.zeros(16), EPS), "rows are not contiguous"),
    "odd rows": (lambda: norm.rms_norm(torch.zeros(2, 17)[:, :16], torch.zeros(16), EPS), "17 elements apart"),
    "misaligned": (
        lambda: norm.rms_norm(torch.zeros(40)[1:33].view(2, 16), torch.zeros(16), EPS),
        "not a multiple of 16",
    ),
    "count": (
        lambda: norm.rms_norm(X, torch.zeros(16), EPS, overflows=torch.zeros(2)),
        "overflows is torch.float32: expected torch.int32",
    ),
    "heads": (lambda: norm.gated_rms_norm(torch.zeros(2, 3, 64), X, X[0], EPS), r"expected \[2, 3, 128\]"),
    "gate": (lambda: norm.output_gate(torch.zeros(2, 2, 8), torch.zeros(2, 2, 9)[..., :8]), "contiguous heads"),
    "tokens": (lambda: norm.embed(torch.zeros(2), torch.zeros(4, 8)), "tokens is torch.float32: expected torch.int32"),
    "table": (
        lambda: norm.embed(torch.zeros(2, dtype=torch.int32), torch.zeros(4, 8).double()),
        "table is torch.float64",
    ),
    "a CPU": (lambda: norm.rms_norm(X, torch.zeros(16), EPS), "runs on a CUDA device"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_calls_are_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        call()
