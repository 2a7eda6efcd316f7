"""Launches in one pass, on the host: which matrices go, what each block gets, results, bits for every T."""

import numpy as np
import pytest
import torch

from duovolt.kernels.linear import THREADS
from duovolt.kernels.one_pass import KERNEL, TOKENS, cut, goes
from duovolt.kernels.slices import THREADS as SLICE_THREADS
from duovolt.kernels.task import FLOAT, HALF, Task, task

from .test_slices import emulated, same_bits

ROOM = 227 << 10  # of shared memory for a block of an H200
COLUMNS = 64 * 37  # slices of three fours and of two: longer and shorter than a ring's turns


def launch(library, x, weight, out, epilogue=FLOAT, residual=None, *, blocks) -> None:
    """As the card would, for any T: in one pass up to eight tokens, else in bands with the same chains."""
    filled = task(x, [weight], [out], epilogue, [residual])
    if x.shape[0] <= TOKENS:
        assert cut(filled, blocks) <= ROOM
        name, threads = KERNEL, SLICE_THREADS
    else:
        name, threads = f"linear_nvfp4_sliced_{-(-x.shape[0] // 8) * 8}", THREADS
    emulated(library, name, filled, blocks, threads, x, [weight])


@pytest.fixture
def passing_kernels(request, host_kernels):
    """Those for sm_80 and newer."""
    if request.node.callspec.params["host_kernels"] == "volta":
        assert not hasattr(host_kernels, KERNEL)
        pytest.skip("sm_70 has no launches in one pass")
    return host_kernels


def test_a_matrix_goes_by_encoding_shape_and_card():
    assert goes("nvfp4", 5120, 8704, "sm_90", ROOM, 132) and goes("nvfp4", 5120, 17408, "sm_90", ROOM, 132)
    assert goes("nvfp4", 132 * 32, 8192, "sm_80", 99 << 10, 132)  # a band each, and nothing left over
    for encoding, rows, columns, arch, room, multiprocessors in (
        ("fp8", 5120, 8704, "sm_90", ROOM, 132),
        ("nvfp4", 5120, 8720, "sm_90", ROOM, 132),
        ("nvfp4", 5120, 5120, "sm_90", ROOM, 132),
        ("nvfp4", 4192, 8704, "sm_90", ROOM, 132),
        ("nvfp4", 5312, 8704, "sm_90", ROOM, 132),
        ("nvfp4", 5120, 8704, "sm_90", ROOM, 108),
        ("nvfp4", 5120, 8704, "sm_90", 48_000, 132),
        ("nvfp4", 5120, 8704, "compute_70", ROOM, 132),
        ("nvfp4", 5120, 8704, "sm_70", ROOM, 132),
    ):
        assert not goes(encoding, rows, columns, arch, room, multiprocessors), (rows, columns, arch, multiprocessors)


@pytest.mark.parametrize("items", [132, 133, 160, 165])
def test_what_is_left_over_is_dealt_a_unit_a_block(items):
    filled = Task(tokens=8, groups=8704 // 16, items=items, matrices=1)
    cut(filled, 132)
    assert 4 * (132 * filled.cut.bands + filled.cut.units) + filled.cut.more == 4 * items and filled.cut.more <= 132


@pytest.mark.parametrize("blocks", [4, 5], ids=["a unit each", "a band each"])
def test_a_token_has_the_same_bits_for_every_count(passing_kernels, encode, blocks):
    rng = np.random.default_rng(23)
    sample = encode("nvfp4", rng.standard_t(3, (160, COLUMNS)).astype(np.float32))
    x = torch.from_numpy(rng.standard_normal((11, COLUMNS)).astype(np.float16))
    stream = torch.from_numpy(rng.standard_normal((11, 160)).astype(np.float32))

    def found(tokens: int) -> torch.Tensor:
        out = stream[:tokens].clone()
        launch(passing_kernels, x[:tokens].clone(), sample.weight, out, residual=out, blocks=blocks)
        return out

    whole = found(11)
    exact = stream.double().numpy() + x.double().numpy() @ sample.exact.T
    assert np.linalg.norm(whole.numpy() - exact) <= 3e-7 * np.linalg.norm(exact)
    for tokens in (8, 3, 1):
        assert same_bits(found(tokens), whole[:tokens]), tokens


def test_blocks_without_a_unit_leave_other_rows_alone(passing_kernels, encode):
    rng = np.random.default_rng(24)
    sample = encode("nvfp4", rng.standard_normal((7 * 32, COLUMNS)).astype(np.float32) / 50)
    x = torch.from_numpy(rng.standard_normal((2, COLUMNS)).astype(np.float16))
    wide = torch.full((2, 7 * 32 + 16), -7.0, dtype=torch.float16)
    launch(passing_kernels, x, sample.weight, wide[:, 8:-8], HALF, blocks=6)  # four of six have one
    torch.testing.assert_close(
        wide[:, 8:-8].double().numpy(), x.double().numpy() @ sample.exact.T, rtol=1e-3, atol=1e-3
    )
    assert (wide[:, :8] == -7.0).all() and (wide[:, -8:] == -7.0).all()
