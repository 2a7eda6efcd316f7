"""What stands between a prompt's products, emulated and on a GPU, against float64 and the references."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels.staging import silu_product, silu_product_reference, widen, widen_reference

from .support import HALF_ERROR, Guarded, data, relative


@pytest.mark.parametrize("columns", [8, 264, 2056, 6])
def test_products_become_wide_columns(device, columns):
    part = data("normal", (3, columns), np.random.default_rng(1), device).half()
    part[1, 5] = float("-inf")
    out = Guarded((3, columns), torch.float32, device, row=columns + 8)
    counts = torch.zeros(3, dtype=torch.int32, device=device)
    widen(part, out.inner, overflows=counts)
    expected = torch.empty(3, columns, device=device)
    widen_reference(part, expected)
    assert torch.equal(out.inner, expected) and out.intact
    assert out.inner[1, 5] == -65504 and counts.tolist() == [0, 1, 0]


@pytest.mark.parametrize("in_place", [True, False])
def test_the_gated_product(device, in_place):
    gate, up = (data("heavy", (3, 520), np.random.default_rng(n), device).half() for n in (1, 2))
    wide = gate.double().cpu().numpy()
    exact = wide / (1 + np.exp(-wide)) * up.double().cpu().numpy()
    gate[2, 0], up[2, 0] = 60000, 60000
    gate[2, 1], up[2, 1] = float("inf"), 1.0
    counts, ours = (torch.zeros(3, dtype=torch.int32, device=device) for _ in range(2))
    expected = silu_product_reference(gate, up, overflows=counts)
    out = Guarded((3, 520), torch.float16, device)
    into = gate if in_place else out.inner
    got = silu_product(gate, up, into, overflows=ours)
    assert out.intact and got is into
    assert relative(got[:2], exact[:2]) <= HALF_ERROR
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-6)
    assert ours.tolist() == counts.tolist() == [0, 0, 2] and got[2, 0] == 65504


def test_bad_calls_are_refused():
    part = torch.zeros(2, 16, dtype=torch.float16)
    for call, message in (
        (lambda: widen(part.float(), torch.zeros(2, 16)), "part is torch.float32"),
        (lambda: widen(part, torch.zeros(2, 8)), r"out is \[2, 8\]"),
        (lambda: silu_product(part[:, :12], part[:, :12]), "multiple of 8"),
        (lambda: silu_product(part, part[:1]), r"up is \[1, 16\]"),
        (lambda: widen(part, torch.zeros(2, 16)), "runs on a CUDA device"),
    ):
        with pytest.raises(InputError, match=message):
            call()
