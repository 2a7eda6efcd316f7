"""What two ranks gather in place of whole logits: the reference's, emulated and on a GPU, and enough for the same tokens."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels.candidates import CANDIDATES, candidates, candidates_reference, spread, spread_reference
from duovolt.kernels.sampling import DRAFT, decide
from duovolt.kernels.sampling_state import Cuts, Decision, Distributions

from .support import Guarded, bits
from .test_sampling import KINDS, WISHES, lanes_with, logits_of

EXACT = ("greedy", "top-k", "all", "penalised", "everything")  # greedy, or a top-k of at most CANDIDATES


def on_the_host(logits, decision, sampling, *, ids=None, **options):
    """The reference where ranks without a card run it: on a card, torch divides by a scalar with another rounding."""

    def moved(record):
        return type(record)(*(None if x is None else x.cpu() for x in vars(record).values()))

    ids = None if ids is None else ids.cpu()
    return candidates_reference(logits.cpu(), moved(decision), moved(sampling), ids=ids, **options)


def gathered_of(logits, decision, sampling, cut, **options):
    """What two ranks would put together, the first of which has `cut` columns."""
    shares = ((logits[:, :cut], 0), (logits[:, cut:], cut))
    return torch.cat([candidates(share, decision, sampling, first=first, **options) for share, first in shares], dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wish", ["greedy", "penalised", "everything"])
def test_candidates_are_the_references(device, wish, kind):
    """Rows of a lane with and without drafts before them, and one of no lane."""
    if device.type == "cpu" and (wish, kind) not in {("greedy", "zeros"), ("penalised", "ties"), ("everything", "far")}:
        pytest.skip("emulation is slow: a few cases stand for all, which a GPU runs")
    logits = logits_of(kind, 3, np.random.default_rng(3), device, 1100)
    sampling = lanes_with([WISHES[wish], {}], device, 1100)
    decision = Decision.of([0, -1], [4, 9], [[7], []], device)
    got = candidates(logits, decision, sampling)
    assert torch.equal(bits(got.cpu()), bits(on_the_host(logits, decision, sampling)))
    assert (got.view(3, 2, CANDIDATES)[2, 1] == -1).all()


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 1024, 1025, 17000])
def test_any_number_of_columns(device, columns):
    """From fewer than there are candidates to three turns of the tournament."""
    logits = logits_of("ties", 1, np.random.default_rng(columns), device, columns)
    sampling = lanes_with([{"temperature": 0.0}], device, columns + 20)
    decision = Decision.of([0], [4], [[]], device)
    got = candidates(logits, decision, sampling, first=20)
    assert torch.equal(bits(got.cpu()), bits(on_the_host(logits, decision, sampling, first=20)))
    assert int((got[0, CANDIDATES:] >= 20).sum()) == min(columns, CANDIDATES)


def test_ids_of_their_own_and_ids_that_nobody_can_draw(device):
    """A reduced head's rows; padding behind the vocabulary is never a candidate."""
    ids = torch.arange(3, 303, 3, dtype=torch.int32, device=device)
    logits = logits_of("normal", 1, np.random.default_rng(1), device, 100)
    logits[0, 90:] = 1e6
    sampling = lanes_with([{"temperature": 0.0, "bias": {6: 50.0}}], device, 270)
    decision = Decision.of([0], [4], [[]], device)
    got = candidates(logits, decision, sampling, ids=ids)
    assert torch.equal(bits(got.cpu()), bits(on_the_host(logits, decision, sampling, ids=ids)))
    named = got[0, CANDIDATES:]
    assert int(named[0]) == 6 and float(got[0, 0]) == float(logits[0, 1]) and (named < 270).all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_logit_that_is_not_finite_comes_first(device, broken):
    logits = logits_of("normal", 2, np.random.default_rng(1), device, 200)
    logits[1, 150] = broken
    sampling = lanes_with([{"temperature": 0.0}], device, 200)
    decision = Decision.of([0], [4], [[7]], device)
    got = candidates(logits, decision, sampling)
    assert torch.isfinite(got[0]).all() and got[1, 0].isnan() and int(got[1, CANDIDATES]) == 150
    out = spread(got, torch.empty(2, 200, device=device))
    drawn = decide(out, decision, sampling, Distributions.empty(2, 200, device), cuts=Cuts(), sparse=True)
    assert drawn.produced.tolist() == [0]
    if broken < 0:  # to a draft, a token that cannot come
        opened = candidates(logits, decision, sampling, open_rows=True)
        assert torch.isfinite(opened[1, :CANDIDATES]).all()


def test_they_are_laid_out_and_the_rest_cannot_come(device):
    rng = np.random.default_rng(2)
    logits = logits_of("normal", 2, rng, device, 300)
    sampling, decision = lanes_with([{}], device, 300), Decision.of([0], [4], [[7]], device)
    gathered = gathered_of(logits, decision, sampling, 180)
    out = Guarded((2, 320), torch.float32, device, row=328)
    assert spread(gathered, out.inner) is out.inner and out.intact
    wanted = spread_reference(gathered.cpu(), torch.empty(2, 320))
    assert torch.equal(bits(out.inner.cpu()), bits(wanted))
    assert torch.isfinite(wanted).sum(dim=1).tolist() == [2 * CANDIDATES] * 2
    assert ((wanted[:, :300] == logits.cpu()) | wanted[:, :300].isinf()).all() and wanted[:, 300:].isinf().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wish", EXACT)
def test_what_is_decided_has_the_bits_of_whole_logits(device, wish, kind):
    """A draft drawn and judged: tokens, chances, histories, and what is left of the distributions inside the cut."""
    if device.type == "cpu" and (wish, kind) not in {("penalised", "ties"), ("all", "normal"), ("top-k", "equal")}:
        pytest.skip("emulation is slow: a few cases stand for all, which a GPU runs")
    rng = np.random.default_rng(len(wish))
    cuts = Cuts("top_k" in WISHES[wish], "top_p" in WISHES[wish])
    for position in range(1 if device.type == "cpu" else 20):
        target = logits_of(kind, 2, rng, device, 500)
        guess = target[:1] + logits_of("normal", 1, rng, device, 500) * 0.3
        results = []
        for sparse in (False, True):
            sampling = lanes_with([WISHES[wish]], device, 500)
            first, second = (torch.empty_like(x) for x in (guess, target))
            drafting = Decision.of([0], [position], [[]], device)
            if sparse:
                spread(gathered_of(guess, drafting, sampling, 260, open_rows=True), first)
            source = Distributions.empty(1, 500, device)
            options = {"cuts": cuts, "purpose": DRAFT, "counted": False}
            drawn = decide(first if sparse else guess, drafting, sampling, source, **options)
            token, chance = int(drawn.tokens[0, 0]), float(drawn.chance[0])
            judging = Decision.of([0], [position], [[token]], device, sources=[[0]], chances=[[chance]])
            if sparse:
                spread(gathered_of(target, judging, sampling, 260), second)
            into = Distributions.empty(2, 500, device)
            found = decide(
                second if sparse else target, judging, sampling, into, cuts=cuts, draft_rows=source, sparse=sparse
            )
            results.append([drawn.chance, found.tokens, found.produced, found.chance, sampling.seen, sampling.counts])
        for whole, few in zip(*results, strict=True):
            assert torch.equal(whole, few)


def test_bad_calls_are_refused():
    sampling, decision = lanes_with([{}], torch.device("cpu"), 10), Decision.of([0], [4], [[]], "cpu")
    for call, message in (
        (lambda: candidates(torch.zeros(2, 10), decision, sampling), r"row_lanes is \[1\]: expected \[2\]"),
        (lambda: candidates(torch.zeros(1, 10).half(), decision, sampling), "logits is torch.float16"),
        (lambda: candidates(torch.zeros(1, 10), decision, sampling, first=1 << 24), "ids from 16777216"),
        (lambda: candidates(torch.zeros(1, 9), decision, sampling, ids=torch.zeros(8).int()), r"ids is \[8\]"),
        (lambda: spread(torch.zeros(1, 127), torch.zeros(1, 10)), r"gathered is \[1, 127\]"),
        (lambda: candidates(torch.zeros(1, 10), decision, sampling), "runs on a CUDA device"),
    ):
        with pytest.raises(InputError, match=message):
            call()
