"""Dequantised weights are a call's own, whoever else is at work; no GPU: the kernel is its reference."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from duovolt.kernels import prefill
from duovolt.kernels.tuning import Choice, using
from duovolt.kernels.weights import BAND, Weight


def dequantised(weight: Weight, out: torch.Tensor, first_band: int, factor: float) -> None:
    rows = (weight.values() * weight.scale[:, None] * factor).half()
    rows = rows[first_band * BAND : first_band * BAND + len(out)]
    out[: len(rows)] = rows


def test_two_threads_whose_launches_come_in_turn(encode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have filled their piece before either multiplies it, as two ranks in one process may."""
    meet = threading.Barrier(2, timeout=20)

    def filled(weight: Weight, out: torch.Tensor, first_band: int, factor: float) -> None:
        dequantised(weight, out, first_band, factor)
        meet.wait()

    monkeypatch.setattr(prefill, "dequantise", filled)
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
        assert [piece.bands for piece in pieces] == bands
        for piece in pieces:
            piece.out.add_(1)
            assert piece.out.data_ptr() == out[:, piece.first * BAND].data_ptr()
        assert (out == 1).all()
        out.zero_()
    taken: list[int] = []
    monkeypatch.setattr(
        prefill, "dequantise", lambda weight, out, first, factor: taken.append(out.untyped_storage().nbytes())
    )
    monkeypatch.setattr(prefill, "SCRATCH_BYTES", 2 * BAND * 16 * 4)
    with using(Choice()):
        prefill._multiply_plain(
            torch.zeros(100, 16, dtype=torch.float16), weight, torch.zeros(100, BAND * 7 - 5).half()
        )
    assert len(taken) == 2 and max(taken) <= prefill.SCRATCH_BYTES
    assert prefill.workspace_bytes(10**9) == max(prefill.SCRATCH_BYTES, prefill._PARTIAL_BYTES)
