"""Launches in slices of K, on the host: which matrices go, what each block gets, results, bits for every T and grid."""

import ctypes

import numpy as np
import pytest
import torch

from duovolt.kernels.linear import THREADS
from duovolt.kernels.slices import KERNEL, TOKENS, cut, goes
from duovolt.kernels.slices import THREADS as SLICE_THREADS
from duovolt.kernels.task import FLOAT, SWIGLU, Task, halve, task

ROOM = 227 << 10  # of shared memory for a block of an H200
COLUMNS = 64 * 70  # slices of five fours and of four


def emulated(library, name, filled, blocks, threads, x, weights) -> None:
    """Runs a kernel, whose loads must lie within x and the weights."""
    ranges = [x.data_ptr(), x.nbytes]
    for weight in weights:
        for part in (weight.words, weight.block_scale, weight.scale):
            ranges += [part.data_ptr(), part.nbytes]
    array = (ctypes.c_size_t * len(ranges))(*ranges)
    kernel = getattr(library, name)
    assert library.emulate_linear(kernel, blocks, threads, ctypes.byref(filled), len(ranges) // 2, array) == 0


def launch(library, x, weights, outs, epilogue, *, blocks, room=ROOM, residuals=None, rows=32) -> None:
    """As the card would, for any T: in slices up to eight tokens, else in bands with the same chains."""
    filled = task(x, weights, outs, epilogue, residuals)
    if x.shape[0] <= TOKENS:
        assert cut(filled, blocks, room) <= room
        name, threads = KERNEL, SLICE_THREADS
    else:
        if rows == 16:
            halve(filled)
        name, threads = f"linear_nvfp4_sliced_{-(-x.shape[0] // 8) * 8}", THREADS
    emulated(library, name, filled, blocks, threads, x, weights)


@pytest.fixture
def slicing_kernels(request, host_kernels):
    """Those for sm_80 and newer."""
    if request.node.callspec.params["host_kernels"] == "volta":
        assert not hasattr(host_kernels, KERNEL)
        pytest.skip("sm_70 has no slices")
    return host_kernels


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    kind = torch.int32 if one.dtype == torch.float32 else torch.int16
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


def test_a_matrix_goes_by_encoding_columns_and_card():
    assert goes("nvfp4", 5120, "sm_90", ROOM) and goes("nvfp4", 5120, "sm_80", 163 << 10)
    assert goes("nvfp4", COLUMNS, "sm_90", ROOM)  # the last slices have one four less
    for encoding, columns, arch, room in (
        ("nvfp4", 5120, "compute_70", ROOM),
        ("nvfp4", 5120, "sm_86", 99 << 10),
        ("nvfp4", 5136, "sm_90", ROOM),
        ("nvfp4", 4096, "sm_90", ROOM),
        ("nvfp4", 8704, "sm_90", ROOM),
        ("fp8", 5120, "sm_90", ROOM),
        ("fp8_blocks", 5120, "sm_90", ROOM),
    ):
        assert not goes(encoding, columns, arch, room), (encoding, columns, arch, room)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("items", [1, 5, 131, 132, 160, 272, 544])
def test_every_block_has_an_even_share(items, paired):
    filled = Task(tokens=8, groups=5120 // 16, items=items, epilogue=SWIGLU if paired else FLOAT)
    assert cut(filled, 132, ROOM) <= ROOM and filled.cut.round >= 1
    units = 8 if paired else 4
    shares = [filled.cut.bands * units + filled.cut.units + (block < filled.cut.more) for block in range(132)]
    assert sum(shares) == items * units and max(shares) - min(shares) <= 1


def test_a_token_has_the_same_bits_for_every_count_grid_and_round(slicing_kernels, encode):
    rng = np.random.default_rng(21)
    rows = (64, 32)
    samples = [encode("nvfp4", rng.standard_t(3, (n, COLUMNS)).astype(np.float32)) for n in rows]
    x = torch.from_numpy(rng.standard_normal((24, COLUMNS)).astype(np.float16))
    stream = torch.from_numpy(rng.standard_normal((24, sum(rows))).astype(np.float32))

    def found(tokens: int, blocks: int, room: int) -> torch.Tensor:
        wide = stream[:tokens].clone()
        outs = list(wide.split(rows, dim=1))
        weights = [sample.weight for sample in samples]
        launch(slicing_kernels, x[:tokens].clone(), weights, outs, FLOAT, blocks=blocks, room=room, residuals=outs)
        return wide

    whole = found(24, 2, ROOM)
    exact = stream.double().numpy() + x.double().numpy() @ np.concatenate([sample.exact for sample in samples]).T
    assert np.linalg.norm(whole.numpy() - exact) <= 3e-7 * np.linalg.norm(exact)
    # Whole bands and units; units alone, and blocks without any; sums of a band or two at a time.
    for tokens, blocks, room in ((8, 2, ROOM), (3, 13, ROOM), (1, 1, 101_000)):
        assert same_bits(found(tokens, blocks, room), whole[:tokens]), (tokens, blocks)


def test_gate_and_up_have_the_same_bits_for_every_count_and_grid(slicing_kernels, encode):
    rng = np.random.default_rng(22)
    gate, up = (encode("nvfp4", rng.standard_normal((64, COLUMNS)).astype(np.float32) / 40) for _ in range(2))
    x = torch.from_numpy(rng.standard_normal((11, COLUMNS)).astype(np.float16))

    def found(tokens: int, blocks: int, room: int = ROOM, rows: int = 32) -> torch.Tensor:
        out = torch.full((tokens, 64), -7.0, dtype=torch.float16)
        weights = [gate.weight, up.weight]
        launch(slicing_kernels, x[:tokens].clone(), weights, [out], SWIGLU, blocks=blocks, room=room, rows=rows)
        return out

    whole = found(11, 1)
    opened, raised = (x.double().numpy() @ part.exact.T for part in (gate, up))
    torch.testing.assert_close(whole.double().numpy(), opened / (1 + np.exp(-opened)) * raised, rtol=1e-3, atol=1e-3)
    assert same_bits(found(11, 2, rows=16), whole)
    for tokens, blocks, room in ((3, 3, ROOM), (1, 1, 101_000)):
        assert same_bits(found(tokens, blocks, room), whole[:tokens]), (tokens, blocks)


def test_a_matrix_alone_has_the_bits_that_it_has_in_company(slicing_kernels, encode):
    """Alone its first band is known without a search for the matrix, in company it is not."""
    rng = np.random.default_rng(23)
    rows = (96, 32)
    weights = [encode("nvfp4", rng.standard_normal((n, COLUMNS)).astype(np.float32)).weight for n in rows]
    x = torch.from_numpy(rng.standard_normal((3, COLUMNS)).astype(np.float16))
    alone, *company = (torch.full((3, n), -7.0) for n in (rows[0], *rows))
    launch(slicing_kernels, x, weights[:1], [alone], FLOAT, blocks=2)
    launch(slicing_kernels, x, weights, company, FLOAT, blocks=2)
    assert same_bits(alone, company[0]) and alone.ne(-7).all()


@pytest.mark.parametrize("paired", [False, True])
def test_units_between_whole_bands_have_the_bits_of_units_alone(slicing_kernels, encode, paired):
    rng = np.random.default_rng(24)
    rows = 5 * 32  # two whole bands each for two blocks, and units between them
    weights = [encode("nvfp4", rng.standard_normal((rows, COLUMNS)).astype(np.float32) / 40).weight for _ in range(2)]
    x = torch.from_numpy(rng.standard_normal((2, COLUMNS)).astype(np.float16))

    def found(blocks: int, room: int = ROOM) -> torch.Tensor:
        out = torch.full((2, rows), -7.0, dtype=torch.float16 if paired else torch.float32)
        own = weights if paired else weights[:1]
        launch(slicing_kernels, x, own, [out], SWIGLU if paired else FLOAT, blocks=blocks, room=room)
        return out

    alone = found(40)
    assert same_bits(found(2), alone) and same_bits(found(2, 112_000), alone) and alone.ne(-7).all()
