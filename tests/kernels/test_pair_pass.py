"""Gate and up in one pass, on the host: which launches go, what each block gets, bits of launches in slices."""

import numpy as np
import pytest
import torch

from duovolt.kernels.pair_pass import KERNEL, cut, goes
from duovolt.kernels.slices import THREADS
from duovolt.kernels.task import FLOAT, SWIGLU, Task, task
from duovolt.kernels.weights import Nvfp4Weight

from . import test_slices
from .test_slices import ROOM, emulated, same_bits

COLUMNS = 64 * 37  # slices of three fours and of two


def launch(library, x, weights, out, *, blocks) -> None:
    filled = task(x, weights, [out], SWIGLU)
    assert goes(filled, blocks) and cut(filled, blocks) <= ROOM
    emulated(library, KERNEL, filled, blocks, THREADS, x, weights)


@pytest.fixture
def passing_kernels(request, host_kernels):
    """Those for sm_80 and newer."""
    if request.node.callspec.params["host_kernels"] == "volta":
        assert not hasattr(host_kernels, KERNEL)
        pytest.skip("sm_70 has no launches in one pass")
    return host_kernels


@pytest.mark.parametrize(
    ("items", "blocks", "epilogue", "wanted"),
    [
        (272, 132, SWIGLU, True),  # the 27B's on a rank of two
        (264, 132, SWIGLU, True),
        (263, 132, SWIGLU, False),
        (273, 132, SWIGLU, False),  # more units than blocks
        (544, 132, SWIGLU, False),
        (272, 108, SWIGLU, False),
        (272, 132, FLOAT, False),
    ],
)
def test_a_launch_goes_by_its_pairs_and_the_card(items, blocks, epilogue, wanted):
    filled = Task(tokens=8, groups=5120 // 16, items=items, matrices=2, epilogue=epilogue)
    assert goes(filled, blocks) == wanted
    if wanted:
        cut(filled, blocks)
        assert 16 * filled.cut.bands * blocks + filled.cut.more == 16 * items


def test_matrices_of_4_gb_go_another_way():
    assert not goes(Task(tokens=1, groups=1 << 16, items=264, matrices=2, epilogue=SWIGLU), 132)


@pytest.mark.parametrize(("bands", "blocks"), [(32, 16), (35, 17)], ids=["whole bands", "all but one have a unit"])
def test_a_token_has_the_bits_of_bands_in_slices(passing_kernels, encode, bands, blocks):
    rng = np.random.default_rng(25)
    rows = bands * 32
    gate, up = (encode("nvfp4", rng.standard_t(3, (rows, COLUMNS)).astype(np.float32) / 40) for _ in range(2))
    x = torch.from_numpy(rng.standard_normal((11, COLUMNS)).astype(np.float16))
    row_scales = torch.from_numpy(rng.uniform(0.5, 2.0, rows).astype(np.float32))
    weights = [gate.weight, Nvfp4Weight(up.weight.words, up.weight.block_scale, row_scales * up.weight.scale)]

    whole = torch.full((11, rows), -7.0, dtype=torch.float16)
    test_slices.launch(passing_kernels, x, weights, [whole], SWIGLU, blocks=bands)
    opened, raised = (x.double().numpy() @ part.exact.T for part in (gate, up))
    raised *= row_scales.double().numpy()
    torch.testing.assert_close(whole.double().numpy(), opened / (1 + np.exp(-opened)) * raised, rtol=1e-3, atol=1e-3)
    for tokens in (1, 3, 8):
        wide = torch.full((tokens, rows + 16), -7.0, dtype=torch.float16)
        launch(passing_kernels, x[:tokens].clone(), weights, wide[:, 8:-8], blocks=blocks)
        assert same_bits(wide[:, 8:-8], whole[:tokens]), tokens
        assert (wide[:, :8] == -7.0).all() and (wide[:, -8:] == -7.0).all()
