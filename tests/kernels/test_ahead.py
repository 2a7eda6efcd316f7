"""What is asked for of the next launch's weights: shares, and never a byte outside of them."""

import pytest
import torch

from duovolt.kernels import mailbox
from duovolt.kernels.ahead import BLOCKS, LINE, SPANS, ahead
from duovolt.kernels.tuning import ASKED_BYTES, ASKED_SHARE, Choice, asked_bytes, using
from duovolt.perf.kernels import random_weight

CPU = torch.device("cpu")
MATRICES = [random_weight(*shape, CPU) for shape in (("nvfp4", 96, 80), ("fp8", 64, 80), ("half", 32, 80))]
PARTS = [MATRICES[0].words, MATRICES[0].block_scale, MATRICES[1].words, MATRICES[2].words]
TOTAL = sum(part.nbytes for part in PARTS)


@pytest.mark.parametrize("nbytes", [0, 1, 127, 128, 1000, TOTAL // 2, TOTAL - 1, TOTAL, 10**9])
def test_each_part_has_its_share_in_whole_lines_of_its_own(nbytes):
    asked = ahead(MATRICES, nbytes)
    spans = {span.first: span.lines for span in asked.span[: asked.spans]}
    for part in PARTS:
        lines = spans.pop(part.data_ptr(), 0)
        assert lines == int(min(1, nbytes / TOTAL) * part.nbytes / LINE + 1e-9)
        assert lines * LINE <= part.nbytes
    assert spans == {} and sum(span.lines for span in asked.span[: asked.spans]) * LINE <= min(nbytes, TOTAL)
    assert asked.blocks == (BLOCKS if asked.spans else 0)


def test_of_no_matrix_nothing_is_asked_for_and_of_many_the_first():
    assert ahead([], 1000).spans == 0 and ahead([], 1000).blocks == 0
    many = ahead([MATRICES[0]] * 9, 10**9)
    assert many.spans == SPANS and {span.first for span in many.span} == {part.data_ptr() for part in PARTS[:2]}


def test_how_much_is_the_cards_choice():
    assert asked_bytes(CPU) == 0
    with using(Choice(asked=3)):
        assert asked_bytes(CPU) == 3_000_000


@pytest.mark.parametrize(("rows", "blocks"), [(24, 40), (496, 512), (497, 497), (512, 512)])
def test_no_block_asks_that_would_have_no_counter(monkeypatch, rows, blocks):
    grids = []
    monkeypatch.setattr(mailbox.checks, "launch", lambda source, name, grid, *rest, **more: grids.append(grid))
    inboxes, state, expired = (1 << 20, 1 << 21), mailbox.new_state(CPU), torch.zeros(1, dtype=torch.int32)
    link = mailbox.Link(*inboxes, state, expired, 1.0, 6000, 0, far=False)
    part, x = torch.zeros(rows, 8, dtype=torch.float16), torch.zeros(rows, 8)
    with using(Choice(asked=1)):
        mailbox.reduce_norm(link, part, x, torch.zeros(8), 1e-6, torch.empty_like(part), then=MATRICES)
    assert grids == [blocks] and blocks <= mailbox.MAX_BLOCKS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_left_open_it_is_half_of_the_second_level_cache():
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    with using(Choice()):
        assert asked_bytes(torch.device("cuda")) == min(ASKED_BYTES, int(ASKED_SHARE * cache)) > 0
