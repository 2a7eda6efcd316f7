"""Rounds whose lanes have a small top-k: the reference's decisions, in three launches, and no lane hangs on another's wishes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from duovolt.kernels import sampling as operation
from duovolt.kernels.sampling import DRAFT, decide, decide_reference
from duovolt.kernels.sampling_state import LISTED, Cuts, Decision, Distributions, LaneSampling
from duovolt.runtime.engine.cuda.flights import cuts_of
from duovolt.runtime.messages import SamplingParams

from .support import bits
from .test_sampling import KINDS, WISHES, V, lanes_with, logits_of, reference_of, same, words_of

SHORT = Cuts(listed=True)
LISTS = {
    "one": {"top_k": 1},
    "usual": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "most": {"top_k": LISTED, "temperature": 2.0},
    "narrow top-p": {"top_k": 30, "top_p": 0.3, "temperature": 2.0},
    "no top-p": {"top_k": 8, "top_p": 0.0},
    "min-p": {"top_k": 40, "min_p": 0.1},
    "all": WISHES["all"],
    "everything": WISHES["everything"],
}
EMULATED = {
    *{("one", "ties"), ("usual", "normal"), ("most", "normal"), ("narrow top-p", "ties"), ("no top-p", "normal")},
    *{("min-p", "ties"), ("all", "equal"), ("everything", "ties"), ("most", "zeros"), ("min-p", "far")},
}


def decided(run, logits, decision, wishes, *, vocabulary=V, **options):
    sampling = lanes_with(wishes, logits.device, vocabulary)
    into = Distributions.empty(len(logits), vocabulary, logits.device)
    drawn = run(logits, decision, sampling, into, **{"cuts": SHORT, **options})
    return drawn, sampling, into


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wish", LISTS)
def test_a_token_is_the_references(device, wish, kind):
    if device.type == "cpu" and (wish, kind) not in EMULATED:
        pytest.skip("emulation is slow: a few cases stand for all, which a GPU runs")
    logits = logits_of(kind, 3, np.random.default_rng(len(wish)), device)
    for position in range(3 if device.type == "cpu" else 40):
        decision = Decision.of([0, 1, 2], [position, position + 1000, position], [[], [], []], device)
        wishes = [LISTS[wish], LISTS[wish], WISHES["greedy"]]
        got, wanted = (decided(run, logits, decision, wishes) for run in (decide, reference_of))
        same(got[0], wanted[0])
        assert torch.equal(got[1].counts, wanted[1].counts) and torch.equal(got[1].seen, wanted[1].seen)


@pytest.mark.parametrize("vocabulary", [1, 20, 64, 65])
def test_a_top_k_of_the_vocabulary_and_more(device, vocabulary):
    logits = logits_of("normal", 1, np.random.default_rng(vocabulary), device, vocabulary)
    for top_k in {min(vocabulary, LISTED), LISTED}:
        for position in range(3):
            decision = Decision.of([0], [position], [[]], device)
            results = []
            for run in (decide, reference_of):
                sampling = LaneSampling.empty(1, vocabulary, device)
                sampling.start(0, [], temperature=3.0, top_k=top_k)
                into = Distributions.empty(1, vocabulary, device)
                results.append(run(logits, decision, sampling, into, cuts=SHORT))
            same(*results)


@pytest.mark.parametrize("where", ["one slice", "one thread", "last ids", "first ids"])
def test_what_is_kept_wherever_it_stands(device, where):
    """The largest ones together, or far apart: the list holds exactly them, in the order of ids."""
    vocabulary, top_k = 32 * 700, LISTED
    rng = np.random.default_rng(4)
    values = rng.standard_normal(vocabulary).astype(np.float32)
    size = vocabulary // 32
    chosen = {
        "one slice": 5 * size + rng.permutation(size)[:top_k],
        "one thread": np.concatenate([s * size + 7 + 256 * np.arange(2) for s in range(32)]),
        "last ids": vocabulary - top_k + np.arange(top_k),
        "first ids": np.arange(top_k),
    }[where]
    values[chosen] = 10 + rng.permutation(top_k) % 7  # with ties inside
    logits = torch.from_numpy(values)[None].to(device)
    wishes = [{"top_k": top_k, "temperature": 5.0}]
    decision = Decision.of([0], [1], [[]], device)
    got, _, into = decided(decide, logits, decision, wishes, vocabulary=vocabulary)
    assert into.list_size.tolist() == [top_k] and into.list_ids[0].tolist() == sorted(chosen.tolist())
    weights = torch.exp((logits[0, into.list_ids[0].long()].double() - 16) / 5.0)
    torch.testing.assert_close(into.list_weights[0], weights, rtol=1e-15, atol=0)
    assert torch.equal(into.list_sums[0].cpu(), into.list_weights[0].cpu().cumsum(0))
    same(got, decided(reference_of, logits, decision, wishes, vocabulary=vocabulary)[0])


def test_ties_at_the_cut_are_kept_in_the_order_of_their_ids(device):
    logits = torch.zeros(1, V, device=device)
    logits[0, [250, 31]] = 1.0
    _, _, into = decided(decide, logits, Decision.of([0], [1], [[]], device), [{"top_k": 6}])
    assert into.list_ids[0, :6].tolist() == [0, 1, 2, 3, 31, 250] and into.list_size.tolist() == [6]


def test_a_lane_hangs_on_its_own_wishes_alone(device):
    """Beside lanes of every kind, and alone: the same bits. A top-k above the bound goes the long way."""
    rng = np.random.default_rng(9)
    logits = logits_of("normal", 14, rng, device)
    wishes = [
        LISTS["usual"],
        WISHES["greedy"],
        {"top_k": LISTED + 1, "top_p": 0.9},
        WISHES["top-p"],
        {},
        WISHES["min-p"],
    ]
    alone = [SHORT, Cuts(False, False, greedy=True), Cuts(), Cuts(False, True), Cuts(False, False), Cuts(False, False)]
    drafts = [[5, 6], [int(logits[3].argmax())], [9], [8], [], [int(logits[12].argmax())]]
    firsts = np.cumsum([0, *(len(own) + 1 for own in drafts)])
    assert firsts[-1] <= len(logits)
    logits = logits[: int(firsts[-1])]
    lanes, positions = list(range(6)), [11 * lane for lane in range(6)]
    together = Decision.of(lanes, positions, drafts, device)
    got, _, _ = decided(decide, logits, together, wishes, cuts=Cuts())
    same(got, decided(reference_of, logits, together, wishes, cuts=Cuts())[0])
    for lane, cuts in enumerate(alone):
        rows = logits[firsts[lane] : firsts[lane + 1]].clone()
        decision = Decision.of([lane], positions[lane : lane + 1], drafts[lane : lane + 1], device)
        single, _, _ = decided(decide, rows, decision, wishes, cuts=cuts)
        assert torch.equal(single.tokens[0], got.tokens[lane]) and torch.equal(single.chance[0], got.chance[lane]), lane


@pytest.mark.parametrize("close", [True, False], ids=["close", "apart"])
def test_drafts_drawn_and_judged_and_what_remains(device, close):
    """A reduced head's drafts, with minus infinity where it has no rows; refused ones are drawn again from the rest."""
    rng = np.random.default_rng(2)
    ends = set()
    for position in range(4 if device.type == "cpu" else 60):
        target = logits_of("normal", 3, rng, device)
        guess = target[:2] + logits_of("normal", 2, rng, device) * (0.05 if close else 1.0)
        guess[:, ::4] = -torch.inf
        results = []
        for run in (decide, reference_of):
            sampling = lanes_with([LISTS["usual"]], device)
            sources, drafts, chances = Distributions.empty(2, V, device), [], []
            for step in range(2):
                drafting = Decision.of([0], [position + step], [[]], device, before=[drafts])
                options = {"cuts": SHORT, "purpose": DRAFT, "counted": False}
                part = sources.part(step, 1)
                drawn = run(guess[step : step + 1], drafting, sampling, part, **options)
                if run is reference_of:  # it fills copies
                    part.logits.copy_(guess[step : step + 1])
                drafts.append(int(drawn.tokens[0, 0]))
                chances.append(float(drawn.chance[0]))
            judging = Decision.of([0], [position], [drafts], device, sources=[[0, 1]], chances=[chances])
            into = Distributions.empty(3, V, device)
            theirs = Distributions(*(x.cpu() for x in vars(sources).values())) if run is reference_of else sources
            final = run(target, judging, sampling, into, cuts=SHORT, draft_rows=theirs)
            results.append((drafts, final))
        assert results[0][0] == results[1][0] and all(token % 4 for token in results[0][0])
        same(results[0][1], results[1][1])
        ends.add(int(results[0][1].produced[0]))
    assert len(ends) > 1 or device.type == "cpu"


def test_a_refused_certain_draft_never_comes_again(device):
    rng = np.random.default_rng(3)
    for position in range(3 if device.type == "cpu" else 40):
        logits = logits_of("normal", 2, rng, device)
        draft = int(logits[0].topk(4).indices[3])
        decision = Decision.of([0], [position], [[draft]], device)
        got, wanted = (decided(run, logits, decision, [LISTS["usual"]])[0] for run in (decide, reference_of))
        same(got, wanted)
        assert int(got.produced[0]) == 2 or int(got.tokens[0, 0]) != draft


def test_a_mask_and_a_sparse_row(device):
    """Fewer ids than top-k can come: the list holds no others."""
    logits = logits_of("normal", 2, np.random.default_rng(5), device)
    allowed = torch.zeros(2, V, dtype=torch.bool, device=device)
    allowed[0, logits[0].argsort()[:7]] = True
    allowed[1, ::2] = True
    decision = Decision.of([0, 1], [4, 5], [[], []], device)
    wishes = [LISTS["min-p"], LISTS["most"]]
    got, _, into = decided(decide, logits, decision, wishes, mask=words_of(allowed))
    same(got, decided(reference_of, logits, decision, wishes, mask=words_of(allowed).cpu())[0])
    assert 1 <= int(into.list_size[0]) <= 7 and int(into.list_size[1]) == LISTED
    held = logits.masked_fill(~allowed, -torch.inf)
    few, _, sparse = decided(decide, held, decision, wishes, sparse=True)
    assert torch.equal(few.tokens, got.tokens) and torch.equal(few.chance, got.chance)
    assert torch.equal(bits(sparse.list_sums.float()), bits(into.list_sums.float()))


def test_forced_drafts_and_broken_rows(device):
    logits = logits_of("normal", 6, np.random.default_rng(7), device)
    logits[5, 17] = float("nan")
    decision = Decision.of([0, 1], [4, 9], [[11, 12, 13], [3]], device)
    forced = torch.tensor([2, -1], dtype=torch.int32, device=device)
    decision = type(decision)(**{**vars(decision), "forced": forced})
    got, wanted = (decided(run, logits, decision, [LISTS["usual"]] * 2)[0] for run in (decide, reference_of))
    same(got, wanted)
    assert got.produced.tolist() == [3, 0] and got.tokens[0, :3].tolist() == [11, 12, int(logits[2].argmax())]


@pytest.mark.parametrize("sign, size", [(1.0, 1), (-1.0, 0)])
def test_after_a_draft_of_broken_logits_the_target_alone_draws(device, sign, size):
    """No list holds what memory happened to hold, which would differ from rank to rank: some are empty. A card's arithmetic may
    give what is not a number another sign than the host's."""
    vocabulary, wishes = 32 * 12, [{"top_k": 8, "temperature": 3.0}]
    rng = np.random.default_rng(17)
    broken = torch.full((1, vocabulary), float("nan")).copysign(torch.tensor(sign)).to(device)
    first = Decision.of([0], [5], [[]], device)
    drafted, _, held = decided(decide, broken, first, wishes, vocabulary=vocabulary, purpose=DRAFT, counted=False)
    assert drafted.produced.tolist() == [0] and drafted.tokens[0, 0] == -1
    assert int(held.list_size[0]) == size or (device.type == "cuda" and int(held.list_size[0]) == 1)
    size = int(held.list_size[0])
    logits = logits_of("normal", 2, rng, device, vocabulary)
    judged = Decision.of([0], [6], [[-1]], device, sources=[[0]], chances=[[1.0]])
    found = []
    for left_behind in (0, 5):  # where nothing was written
        held.list_ids[:, size:], held.list_weights[:, size:] = left_behind, float(left_behind)
        drawn, _, into = decided(decide, logits, judged, wishes, vocabulary=vocabulary, draft_rows=held)
        assert drawn.produced.tolist() == [1] and int(drawn.tokens[0, 0]) in into.list_ids[0, :8].tolist()
        found.append(drawn.tokens)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("cuts", "names"),
    [
        (SHORT, "adjust list settle"),
        (Cuts(False, False, greedy=True), "adjust settle"),
        (Cuts(False, False), "adjust mass rest draw"),
        (Cuts(), "adjust list" + " select" * 18 + " ties mass rest draw"),
    ],
)
def test_launches(cuts, names, monkeypatch):
    started = []
    monkeypatch.setattr(operation, "launch", lambda source, name, *rest: started.append(name.removeprefix("sampling_")))
    logits = torch.zeros(1, V)
    decided(decide, logits, Decision.of([0], [1], [[]], "cpu"), [{"top_k": 5}], cuts=cuts)
    assert " ".join(started) == names


def test_a_vocabulary_too_large_for_lists_goes_the_long_way(monkeypatch):
    monkeypatch.setattr(operation, "MOST_LISTED_IDS", V - 1)
    started = []
    monkeypatch.setattr(operation, "launch", lambda source, name, *rest: started.append(name.removeprefix("sampling_")))
    decided(decide, torch.zeros(1, V), Decision.of([0], [1], [[]], "cpu"), [{"top_k": 5}])
    assert started.count("select") == 18 and "list" not in started and started[-1] == "draw"


def test_the_reference_takes_listed_cuts():
    logits = torch.zeros(1, V)
    drawn, _, _ = decided(decide_reference, logits, Decision.of([0], [1], [[]], "cpu"), [{"top_k": 1}])
    assert drawn.tokens[0, 0] == 0


@pytest.mark.parametrize(
    ("wishes", "cuts"),
    [
        ([{"temperature": 0.0}], Cuts(False, False, greedy=True)),
        ([{"top_k": 20}], SHORT),
        ([{"top_k": LISTED, "top_p": 0.5}, {"temperature": 0.0}, {"temperature": 0.0, "top_k": 500}], SHORT),
        ([{"top_k": 20}, {"top_k": LISTED + 1}], Cuts(True, False)),
        ([{"top_k": 20}, {"top_p": 0.5}], Cuts(True, True)),
        ([{"top_p": 0.5}, {"temperature": 0.0, "top_k": 20}], Cuts(False, True)),
        ([{}], Cuts(False, False)),
    ],
)
def test_a_round_has_short_lists_where_every_lane_that_draws_may(wishes, cuts):
    lanes = [
        SimpleNamespace(request=SimpleNamespace(sampling=SamplingParams(**{"temperature": 1.0, **own})))
        for own in wishes
    ]
    assert cuts_of(lanes) == cuts
