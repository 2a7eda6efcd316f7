"""Dequantised weights are a call's own, whoever else is at work; no GPU: the kernel is its reference."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from duovolt.kernels import plain, prefill
from duovolt.kernels.half_factors import shared_factors
from duovolt.kernels.tuning import Choice, using
from duovolt.kernels.weights import BAND, Weight


def dequantised(weight: Weight, out: torch.Tensor, first_band: int, factor: float) -> None:
    rows = (weight.values() * weight.scale[:, None] * factor).half()
    rows = rows[first_band * BAND : first_band * BAND + len(out)]
    out[: len(rows)] = rows


def relative(found: torch.Tensor, exact: np.ndarray) -> float:
    return float(np.linalg.norm(found.double().numpy() - exact) / np.linalg.norm(exact))


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The dequantised way on the CPU, sums through fp16; the shapes of its products."""
    made: list[list[int]] = []
    addmm = prefill._addmm

    def counted(x: torch.Tensor, plain: torch.Tensor, back: float, out: torch.Tensor) -> None:
        made.append(list(plain.shape))
        addmm(x, plain, back, out)

    monkeypatch.setattr(plain, "dequantise", dequantised)
    monkeypatch.setattr(prefill, "_addmm", counted)
    monkeypatch.setattr(prefill, "_check_device", lambda x, weights: None)
    monkeypatch.setattr(prefill, "_gives_float32", lambda: False)
    monkeypatch.setattr(prefill, "gates_together", lambda device: True)
    monkeypatch.setattr(prefill.staging, "widen", prefill.staging.widen_reference)
    monkeypatch.setattr(prefill.staging, "silu_product", prefill.staging.silu_product_reference)
    return made


def test_matrices_side_by_side(encode, on_the_host: list[list[int]]) -> None:
    """As the delta rule's four: two of fp8 and two of 24 plain rows, in one product; one whose output stands apart in its own."""
    rng, sizes = np.random.default_rng(2), (("fp8", 96, 1.0), ("fp8", 64, 0.02), ("half", 24, 0.3), ("half", 24, 1.5))
    samples = [encode(kind, (rng.standard_normal((rows, 64)) * size).astype(np.float32)) for kind, rows, size in sizes]
    x = torch.from_numpy(rng.standard_normal((100, 64)).astype(np.float16))
    wide = torch.full((100, 96 + 64 + 48 + 8 + 96), -7.0)
    parts = list(wide[:, :208].split([96, 64, 24, 24], dim=1))
    with using(Choice()):
        prefill.linear_blocks(x, [*(one.weight for one in samples), samples[0].weight], [*parts, wide[:, 216:]])
    assert on_the_host == [[208, 64], [96, 64]]
    for sample, part in zip([*samples, samples[0]], [*parts, wide[:, 216:]], strict=True):
        assert relative(part, x.double().numpy() @ sample.exact.T) <= 1e-3
    assert (wide[:, 208:216] == -7).all()


@pytest.mark.parametrize("apart", [1.0, 1.7, 0.02, 1e-5])
def test_gate_and_up_share_a_product(encode, apart: float, on_the_host: list[list[int]]) -> None:
    """nvfp4 of unlike scales, whose values stay exact; sizes too far apart go one after the other."""
    rng = np.random.default_rng(3)
    gate, up = (
        encode("nvfp4", (rng.standard_normal((64, 64)) * size).astype(np.float32)) for size in (0.2, 0.2 * apart)
    )
    x = torch.from_numpy(rng.standard_normal((100, 64)).astype(np.float16))
    opened, raised = (x.double().numpy() @ one.exact.T for one in (gate, up))
    with using(Choice()):
        got = prefill.swiglu_block(x, gate.weight, up.weight)
    assert relative(got, opened / (1 + np.exp(-opened)) * raised) <= 2e-3
    assert on_the_host == ([[128, 64]] if apart > 1e-3 else [[64, 64]] * 2)
    shared = shared_factors([gate.weight, up.weight])
    assert (shared is None) == (apart < 1e-3)
    if shared is not None:
        for weight, factor, rest in zip((gate.weight, up.weight), shared.factors, shared.rests, strict=True):
            values = weight.values() * (weight.scale * factor)
            assert 1 <= rest < 2 and factor * shared.back * rest == pytest.approx(1, rel=1e-6)
            assert torch.equal(values.half().float(), values.float()) or apart not in (1.0, 1.7)


def test_matrices_too_large_for_the_memory_go_alone(
    encode, on_the_host: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "SCRATCH_BYTES", 2 * 96 * 64)
    rng = np.random.default_rng(4)
    samples = [encode("fp8", rng.standard_normal((rows, 64)).astype(np.float32)) for rows in (64, 32, 32)]
    x, wide = torch.ones(100, 64).half(), torch.empty(100, 128)
    with using(Choice()):
        prefill.linear_blocks(x, [one.weight for one in samples], list(wide.split([64, 32, 32], dim=1)))
    assert on_the_host == [[96, 64], [32, 64]]


def test_two_threads_whose_launches_come_in_turn(encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have filled their piece before either multiplies it, as two ranks in one process may."""
    meet = threading.Barrier(2, timeout=20)

    def filled(weight: Weight, out: torch.Tensor, first_band: int, factor: float) -> None:
        dequantised(weight, out, first_band, factor)
        meet.wait()

    monkeypatch.setattr(plain, "dequantise", filled)
    monkeypatch.setattr(prefill, "SCRATCH_BYTES", 2 * 2 * BAND * 64)  # two bands a piece
    rng = np.random.default_rng(1)
    samples = [encode("fp8", rng.standard_normal((BAND * 7, 64)).astype(np.float32)) for _ in range(2)]
    x = torch.from_numpy(rng.standard_normal((100, 64)).astype(np.float16))

    def work(number: int) -> torch.Tensor:
        out = torch.empty(100, BAND * 7, dtype=torch.float16)
        with using(Choice()):
            prefill._multiply_plain(x, samples[number].weight, out)
        return out

    with ThreadPoolExecutor(2) as pool:
        for sample, out in zip(samples, pool.map(work, range(2)), strict=True):
            expected = x.double().numpy() @ sample.exact.T
            assert np.linalg.norm(out.double().numpy() - expected) <= 1e-3 * np.linalg.norm(expected)


def test_pieces_cover_a_matrix_and_stay_within_the_memory(encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole where it fits, else about equal; beside a product in pieces of `BESIDE_ROWS`, the last one smaller."""
    weight = encode("half", np.ones((BAND * 7 - 5, 16), np.float32)).weight
    out = torch.zeros(3, BAND * 7 - 5)
    for most, equal, bands in ((7, True, [7]), (3, True, [2, 2, 3]), (3, False, [3, 3, 1])):
        pieces = prefill._pieces(weight, out, most, equal=equal)
        assert [piece.bands for piece, _ in pieces] == bands
        for piece, columns in pieces:
            columns.add_(1)
            assert columns.data_ptr() == out[:, piece.first * BAND].data_ptr() and columns.shape[1] == piece.rows
        assert (out == 1).all()
        out.zero_()
    taken: list[int] = []
    monkeypatch.setattr(
        plain, "dequantise", lambda weight, out, first, factor: taken.append(out.untyped_storage().nbytes())
    )
    monkeypatch.setattr(prefill, "SCRATCH_BYTES", 2 * BAND * 16 * 4)
    with using(Choice()):
        prefill._multiply_plain(
            torch.zeros(100, 16, dtype=torch.float16), weight, torch.zeros(100, BAND * 7 - 5).half()
        )
    assert len(taken) == 2 and max(taken) <= prefill.SCRATCH_BYTES
    assert prefill.workspace_bytes(10**9) == max(prefill.SCRATCH_BYTES, prefill._PARTIAL_BYTES)
