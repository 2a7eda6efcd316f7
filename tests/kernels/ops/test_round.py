"""The bookkeeping of a round, emulated and on a GPU: every pass is the reference's, and lanes near their ends are cut."""

import copy

import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels.delta import Progress
from duovolt.kernels.kvcache import PAGE
from duovolt.kernels.round import (
    round_advance,
    round_advance_reference,
    round_rows,
    round_rows_reference,
    scatter_logits,
    scatter_logits_reference,
)
from duovolt.kernels.round_state import DRAFT, KEPT, VERIFY, Pass
from duovolt.kernels.sampling_state import Drawn
from duovolt.tests.support.round_lanes import LANES, PAGES, draws_on, lanes_on


def both(device, order, drafts, kind, step, certain=False):
    rows = {KEPT: 1 + drafts, DRAFT: 1, VERIFY: 1 + drafts}[kind]
    results = []
    for function in (round_rows, round_rows_reference):
        lanes, draws = lanes_on(device), draws_on(device, drafts, len(order))
        tables = torch.full((len(order), PAGES), -9, dtype=torch.int32, device=device)
        into = Pass.empty(kind, tables, rows)
        produced = torch.full((len(order),), 5, dtype=torch.int32, device=device)
        places = torch.tensor(order, dtype=torch.int32, device=device)
        function(
            places, lanes, draws, into, produced, kind=kind, drafts=drafts, step=step, certain=certain, copies=True
        )
        results.append({"produced": produced, **vars(into)})
    return results


@pytest.mark.parametrize("order", [[0], [2, 0], [3, 1, 0, 2], [-1, 1]], ids=str)
@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
def test_passes_are_the_references(device, order, drafts):
    passes = [(VERIFY, 0), (KEPT, 0), *((DRAFT, step) for step in range(1, drafts))]
    for kind, step in passes:
        for certain in (False, True) if kind == VERIFY else (False,):
            ours, theirs = both(device, order, drafts, kind, step, certain)
            for name, tensor in theirs.items():
                assert torch.equal(ours[name].cpu(), tensor.cpu()), (kind, step, name)


@pytest.mark.parametrize("kind", [KEPT, DRAFT])
def test_a_window_hides_what_is_far(device, kind):
    """Two whole pages and the newest are left of five; where keys and values go stays as it was."""
    found = []
    for function, window in ((round_rows, 2), (round_rows_reference, 2), (round_rows, 0), (round_rows, 4)):
        lanes, draws = lanes_on(device), draws_on(device, 2, 1)
        lanes.lengths[0], lanes.limits[0] = 290, 300
        into = Pass.empty(kind, torch.full((1, PAGES), -9, dtype=torch.int32, device=device), 3 if kind == KEPT else 1)
        order, produced = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        step = 1 if kind == DRAFT else 0
        function(order, lanes, draws, into, produced, kind=kind, drafts=2, step=step, window=window, copies=True)
        found.append({name: tensor.tolist() for name, tensor in vars(into).items()})
    near, reference, whole, wide = found
    assert near == reference and wide == whole
    assert whole["tables"] == [[0, 1, 2, 3, 4]] and near["tables"] == [[2, 3, 4, -9, -9]]
    for name in near:
        shift = 2 * PAGE if name in ("starts", "places") else 0
        if name != "tables":
            assert near[name] == ([value - shift for value in whole[name]] if shift else whole[name]), name


def test_a_verification_pass_is_what_it_should_be(device):
    """Written out by hand: four lanes, three drafts."""
    ours, _ = both(device, [0, 1, 2, 3], 3, VERIFY, 0)
    assert ours["lanes"].tolist() == [0, 1, 2, -1]
    assert ours["counts"].tolist() == [2, 2, 4, 0]  # a broken draft, the limit, all, at rest
    assert ours["tokens"].tolist() == [1002, 7, 0, 0, 1006, 8, 0, 0, 1017, 9, 13, 17, 0, 0, 0, 0]
    assert ours["places"].tolist() == [100, 101, -1, -1, 70, 71, -1, -1, 127, 128, 129, 130, *[-1] * 4]
    assert ours["positions"][0].tolist() == [100, 101, 0, 0, 63, 64, 0, 0, 130, 131, 132, 133, *[0] * 4]
    slots = ours["slots"].tolist()
    assert slots[:2] == [1 * PAGE + 36, 1 * PAGE + 37] and slots[8:12] == [4 * PAGE + 63, -1, -1, -1]
    assert ours["deciding_positions"].tolist() == [101, 71, 128, 10]
    assert ours["sources"].tolist() == [0, -1, -1, -1, 1, -1, -1, -1, 2, 6, 10, *[-1] * 5]


@pytest.mark.parametrize("through", [True, False], ids=["layers", "first"])
def test_lanes_move_on_by_what_was_decided(device, through):
    """Lane 0 gets two tokens, 2 four of which the third ends the answer, 1 none: broken logits; 3 rested before."""
    order, rows, width = [0, 3, 2, 1], 4, 8
    results = []
    for advance in (round_advance, round_advance_reference):
        lanes, draws = lanes_on(device), draws_on(device, 3, 4)
        lanes.stops[2, 5] = 14
        verified = Pass.empty(VERIFY, torch.zeros(4, PAGES, dtype=torch.int32, device=device), rows)
        produced = torch.zeros(4, dtype=torch.int32, device=device)
        places = torch.tensor(order, dtype=torch.int32, device=device)
        round_rows_reference(places, lanes, draws, verified, produced, kind=VERIFY, drafts=3)
        drawn = Drawn(
            torch.arange(24, dtype=torch.int32, device=device).view(4, 6),
            torch.tensor([2, 1, 4, 0], dtype=torch.int32, device=device),
            torch.ones(4, dtype=torch.float64, device=device),
        )
        progress = Progress.empty(LANES, device)
        progress.accepted.copy_(torch.tensor([2, 0, 4, 1]))
        wide = torch.arange(16 * width, dtype=torch.float32, device=device).view(16, width)
        hidden = torch.zeros(LANES, 6, width, device=device)
        report = torch.full((5, 8), -1, dtype=torch.int32, device=device)
        counters = torch.tensor([1, 0, 4], dtype=torch.int32, device=device)
        advance(lanes, verified, drawn, progress if through else None, wide, hidden, counters, report)
        results.append((copy.deepcopy(vars(lanes)), progress, hidden, report))
    (ours, progress, hidden, report), (theirs, their_progress, their_hidden, their_report) = results
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
    assert torch.equal(report, their_report) and torch.equal(hidden, their_hidden)
    assert torch.equal(progress.accepted, their_progress.accepted)
    assert progress.accepted.tolist() == [2, 0, 3 if through else 4, 1]
    assert hidden[2, 2, 0] == (2 * rows + 2) * width and hidden[3].abs().max() == 0
    assert ours["lengths"].tolist() == [102, 70, 130, 9] and ours["limits"].tolist() == [300, 0, 0, 0]
    assert ours["kept"].tolist() == [2, 1, 3, 1] and ours["next"][2].tolist() == [12, 13, 14, 1015, 1016, 1017]
    assert report[:, :4].tolist() == [[2, 1, 0, 1], [0, -1, -1, -1], [4, 3, 12, 13], [0, 1, -1, -1], [5, -1, -1, -1]]


def test_logits_of_a_reduced_head_go_to_their_places(device):
    values = torch.arange(600.0, device=device).view(2, 300)[:, :260]
    ids = torch.randperm(500, generator=torch.Generator().manual_seed(3))[:260].int().to(device)
    ids[5], ids[6] = -1, 500
    ours, theirs = (torch.full((2, 500), float("-inf"), device=device) for _ in range(2))
    scatter_logits(values, ids, ours)
    scatter_logits_reference(values, ids, theirs)
    assert torch.equal(ours, theirs) and int(torch.isfinite(ours).sum()) == 2 * 258


def test_bad_calls_are_refused():
    device = torch.device("cpu")
    lanes, draws = lanes_on(device), draws_on(device, 2, 1)
    into = Pass.empty(VERIFY, torch.zeros(1, PAGES, dtype=torch.int32), 3)
    order, produced = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for change, message in (
        ({"kind": 7}, "a pass of kind 7"),
        ({"drafts": 4}, "draft 0 of 4"),
        ({"order": order.long()}, "order is torch.int64"),
        ({"into": Pass.empty(VERIFY, torch.zeros(1, PAGES + 1, dtype=torch.int32), 3)}, "tables is"),
        ({}, "runs on a CUDA device"),
    ):
        call = {"order": order, "into": into, "kind": VERIFY, "drafts": 2, **change}
        with pytest.raises(InputError, match=message):
            round_rows(call["order"], lanes, draws, call["into"], produced, kind=call["kind"], drafts=call["drafts"])
