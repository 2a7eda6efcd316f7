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


@pytest.mark.parametrize("rests", [(1.0, 1.0), (1.0, 1.625), (1.3, 1.0)])
def test_gate_and_up_side_by_side(device, rests):
    """Halves of one product, of which one is still to be multiplied by what its weights' scale has more."""
    both = data("normal", (5, 2 * 264), np.random.default_rng(3), device).half()
    both[3, 7], both[3, 264 + 7] = 60000, 1.0
    both[4, 8], both[4, 264 + 8] = 0.5, float("-inf")
    gate, up = both[:, :264], both[:, 264:]
    wide = [part.double().cpu().numpy() * rest for part, rest in zip((gate, up), rests, strict=True)]
    exact = wide[0] / (1 + np.exp(-wide[0])) * wide[1]
    counts, ours = (torch.zeros(5, dtype=torch.int32, device=device) for _ in range(2))
    out = Guarded((5, 264), torch.float16, device)
    got = silu_product(gate, up, out.inner, rests=rests, overflows=ours)
    expected = silu_product_reference(gate, up, rests=rests, overflows=counts)
    assert out.intact and relative(got[:3], exact[:3]) <= HALF_ERROR
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=1e-6)
    assert ours.tolist() == counts.tolist() == [0, 0, 0, int(rests != (1.0, 1.0)), 1]
    if rests == (1.0, 1.0):
        assert torch.equal(got, silu_product(gate.contiguous(), up.contiguous()))


def test_bad_calls_are_refused():
    part = torch.zeros(2, 16, dtype=torch.float16)
    for call, message in (
        (lambda: widen(part.float(), torch.zeros(2, 16)), "part is torch.float32"),
        (lambda: widen(part, torch.zeros(2, 8)), r"out is \[2, 8\]"),
        (lambda: silu_product(part[:, :12], part[:, :12]), "multiple of 8"),
        (lambda: silu_product(part, part[:1]), r"up is \[1, 16\]"),
        (lambda: silu_product(torch.zeros(2, 32).half()[:, :16], part), "rows of gate stand 32 apart, those of up 16"),
        (lambda: widen(part, torch.zeros(2, 16)), "runs on a CUDA device"),
    ):
        with pytest.raises(InputError, match=message):
            call()
