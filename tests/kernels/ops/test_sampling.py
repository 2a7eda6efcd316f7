"""Decisions on the GPU, emulated and real, are those of the reference, and of the engine that serves by it."""

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels.delta import Progress
from duovolt.kernels.logprobs import log_probabilities, log_probabilities_reference
from duovolt.kernels.sampling import DRAFT, decide, decide_reference
from duovolt.kernels.sampling_state import Cuts, Decision, Distributions, LaneSampling
from duovolt.runtime.engine.sampling import Purpose, Sampler
from duovolt.runtime.engine.speculation import Draft, judge
from duovolt.runtime.messages import SamplingParams

V = 300

WISHES = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 3.0, "seed": 2**64 - 1},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.705},
    "min-p": {"min_p": 0.2},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.92, "min_p": 0.02, "seed": 12345678901234567890},
    "penalised": {
        "temperature": 0.0,
        "repetition": 1.3,
        "presence": 0.5,
        "frequency": 0.25,
        "bias": {3: 2.5, 7: -90.0},
    },
    "everything": {"top_k": 40, "top_p": 0.96, "repetition": 1.1, "presence": 1.5, "frequency": 0.3, "bias": {1: 4.0}},
}


def logits_of(
    kind: str, rows: int, rng: np.random.Generator, device: torch.device, vocabulary: int = V
) -> torch.Tensor:
    values = rng.standard_normal((rows, vocabulary)) * 3
    if kind == "ties":
        values = np.round(values)
    elif kind == "equal":
        values[:] = 1.25
    elif kind == "far":
        values *= 100
    elif kind == "zeros":
        values = np.where(values > 0, 0.0, -0.0)
    return torch.from_numpy(values.astype(np.float32)).to(device)


def lanes_with(wishes: list[dict], device: torch.device, vocabulary: int = V) -> LaneSampling:
    sampling = LaneSampling.empty(len(wishes), vocabulary, device)
    for lane, own in enumerate(wishes):
        sampling.start(lane, [1, 5, 5, 9 + lane], **own)
    return sampling


def reference_of(logits, decision, sampling, into, **options):
    """The reference on the CPU, where ranks run it: on a GPU, torch divides by a scalar with another rounding."""

    def moved(record):
        return type(record)(*(None if x is None else x.cpu() for x in vars(record).values()))

    own = moved(sampling)
    drawn = moved(decide_reference(logits.cpu(), moved(decision), own, moved(into), **options))
    for name in ("seen", "counts"):
        getattr(sampling, name).copy_(getattr(own, name))
    return drawn


def same(got, wanted) -> None:
    assert got.tokens.tolist() == wanted.tokens.tolist()
    assert got.produced.tolist() == wanted.produced.tolist()
    torch.testing.assert_close(got.chance.cpu(), wanted.chance, rtol=1e-9, atol=1e-15)


KINDS = ("normal", "ties", "equal", "far", "zeros")
EMULATED = {("penalised", "normal"), ("top-k", "ties"), ("top-p", "equal"), ("everything", "normal"), ("min-p", "far")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wish", WISHES)
def test_a_token_is_the_references(device, wish, kind):
    if device.type == "cpu" and (wish, kind) not in EMULATED:
        pytest.skip("emulation is slow: a few cases stand for all, which a GPU runs")
    rng = np.random.default_rng(len(wish))
    many = 1 if device.type == "cpu" else 40
    logits = logits_of(kind, 2, rng, device)
    cuts = Cuts("top_k" in WISHES[wish], "top_p" in WISHES[wish])
    for position in range(many):
        results = []
        for operation in (decide, reference_of):
            sampling = lanes_with([WISHES[wish]] * 2, device)
            decision = Decision.of([0, 1], [position, position + 1000], [[], []], device)
            results.append(operation(logits, decision, sampling, Distributions.empty(2, V, device), cuts=cuts))
            results.append(sampling)
        same(results[0], results[2])
        assert torch.equal(results[1].seen, results[3].seen) and torch.equal(results[1].counts, results[3].counts)


def params_of(wish: dict) -> SamplingParams:
    names = {"repetition": "repetition_penalty", "presence": "presence_penalty", "frequency": "frequency_penalty"}
    return SamplingParams(**{names.get(k, "logit_bias" if k == "bias" else k): v for k, v in wish.items()})


@pytest.mark.parametrize("close", [True, False], ids=["close", "apart"])
@pytest.mark.parametrize("wish", ["greedy", "plain", "all", "everything"])
def test_speculation_is_the_engines(device, wish, close):
    if device.type == "cpu" and (wish, close) not in {("greedy", True), ("plain", False), ("all", False)}:
        pytest.skip("emulation is slow: a few cases stand for all, which a GPU runs")
    """Drafts drawn on the GPU under the lane's wishes, judged there: token for token what the engine does."""
    rng = np.random.default_rng(1)
    own = WISHES[wish]
    cuts = Cuts("top_k" in own, "top_p" in own)
    for position in range(1 if device.type == "cpu" else 30):
        target = logits_of("normal", 3, rng, device)
        guess = target[:2] + logits_of("normal", 2, rng, device) * (0.1 if close else 1.0)
        sampling, sampler = lanes_with([own], device), Sampler(params_of(own), [1, 5, 5, 9], V)
        progress = Progress.empty(1, device)
        draft_rows = Distributions.empty(2, V, device)
        drafts, chances, theirs = [], [], Draft([], [])
        for step in range(2):
            decision = Decision.of([0], [position + step], [[]], device, before=[drafts])
            drawn = decide(
                guess[step : step + 1],
                *(decision, sampling, draft_rows.part(step, 1)),
                **{"cuts": cuts, "purpose": DRAFT, "counted": False},
            )
            token, source = sampler.choose(guess[step].cpu(), position + step, Purpose.DRAFT, theirs.tokens)
            theirs.tokens.append(token)
            theirs.distributions.append(source)
            drafts.append(int(drawn.tokens[0, 0]))
            chances.append(float(drawn.chance[0]))
        assert drafts == theirs.tokens
        sources = [-1, -1] if wish == "greedy" else [0, 1]
        decision = Decision.of([0], [position], [drafts], device, sources=[sources], chances=[chances])
        before = progress.turn.clone()
        got = decide(
            target,
            *(decision, sampling, Distributions.empty(3, V, device)),
            **{"cuts": cuts, "draft_rows": draft_rows, "progress": progress},
        )
        verdict = judge(sampler, target.cpu(), theirs, position)
        assert got.tokens[0, : len(verdict.tokens)].tolist() == verdict.tokens
        assert got.produced.tolist() == [len(verdict.tokens)] == progress.accepted.tolist()
        assert torch.equal(progress.turn, before ^ 1)
        for token in verdict.tokens:
            sampler.accept(token)
        assert torch.equal(sampling.counts[0].cpu(), sampler._counts)


@pytest.mark.parametrize("wish", ["plain", "top-p"])
def test_certain_drafts_and_lanes_side_by_side(device, wish):
    """Given drafts, an unused sequence, and a broken one: each as if alone."""
    rng = np.random.default_rng(3)
    logits = logits_of("normal", 6, rng, device)
    logits[5, 17] = float("nan")
    results = []
    for operation in (decide, reference_of):
        sampling = lanes_with([WISHES[wish], WISHES["greedy"], WISHES[wish]], device)
        best = int(logits[3].argmax())
        decision = Decision.of([0, 1, 2], [50, 60, 70], [[7, 8], [best], []], device)
        results.append(
            operation(logits, decision, sampling, Distributions.empty(6, V, device), cuts=Cuts(False, wish == "top-p"))
        )
    same(*results)
    assert results[0].produced.tolist()[1:] == [2, 0]


@pytest.mark.parametrize("wish", ["plain", "greedy"])
def test_a_sequence_without_a_lane_has_no_token(device, wish):
    """Neither memory that nobody wrote: what is made for the result says so beforehand."""
    logits, results = logits_of("normal", 3, np.random.default_rng(4), device), []
    for operation in (decide, reference_of):
        sampling = lanes_with([WISHES[wish]], device)
        decision = Decision.of([-1, 0, -1], [0, 60, 0], [[], [], []], device)
        cuts = Cuts(False, False, greedy=wish == "greedy")
        results.append(operation(logits, decision, sampling, Distributions.empty(3, V, device), cuts=cuts))
    same(*results)
    assert results[0].produced.tolist() == [0, 1, 0]
    assert results[0].tokens[::2].eq(-1).all() and results[0].chance.tolist()[::2] == [1.0, 1.0]


def test_many_draws_follow_the_distribution(device):
    """The cut and the draw together: frequencies of 200 draws, against the reference's probabilities."""
    if device.type == "cpu":
        pytest.skip("200 emulated draws take minutes; single draws are compared above")
    logits = logits_of("normal", 1, np.random.default_rng(5), device)
    found = torch.zeros(V)
    for position in range(200):
        sampling = lanes_with([{"top_k": 4, "temperature": 2.0}], device)
        drawn = decide(
            logits,
            *(Decision.of([0], [position], [[]], device), sampling, Distributions.empty(1, V, device)),
            cuts=Cuts(),
        )
        found[int(drawn.tokens[0, 0])] += 1
    assert (found > 0).sum() == 4 and found[logits[0].cpu().topk(4).indices].sum() == 200


@pytest.mark.parametrize("best", [0, 1, 20])
@pytest.mark.parametrize("kind", ["normal", "ties", "far"])
def test_log_probabilities(device, kind, best):
    logits = logits_of(kind, 2, np.random.default_rng(best), device)
    tokens = torch.tensor([4, V], dtype=torch.int32, device=device)
    got = log_probabilities(logits, tokens, best)
    wanted = log_probabilities_reference(logits, tokens, best)
    assert torch.equal(got[2], wanted[2])
    for ours, theirs in zip(got[:2], wanted[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("wish", ["plain", "all", "everything"])
def test_the_real_vocabulary(wish):
    device, vocabulary = torch.device("cuda", 0), 248077
    logits = logits_of("normal", 4, np.random.default_rng(0), device, vocabulary + 243)[:, :vocabulary]
    for position in range(5):
        results = []
        for operation in (decide, reference_of):
            sampling = lanes_with([WISHES[wish]], device, vocabulary)
            decision = Decision.of([0], [position], [[5, 6, 7]], device)
            into = Distributions.empty(4, vocabulary, device)
            results.append(operation(logits, decision, sampling, into, cuts=Cuts()))
        same(*results)


def test_bad_calls_are_refused():
    device = torch.device("cpu")
    sampling, into = LaneSampling.empty(1, V, device, bias=False), Distributions.empty(1, V, device)
    decision, logits = Decision.of([0], [0], [[]], device), torch.zeros(1, V)
    for call, message in (
        (lambda: decide(logits.half(), decision, sampling, into, cuts=Cuts()), "logits is torch.float16"),
        (
            lambda: decide(logits[:, :9], decision, sampling, into, cuts=Cuts()),
            r"seen is \[1, 300\]: expected \[1, 9\]",
        ),
        (lambda: decide(logits, decision, sampling, into, cuts=Cuts(), purpose=2), "purpose is 2"),
        (lambda: sampling.start(0, [], bias={1: 1.0}), "made without"),
        (lambda: log_probabilities(logits, torch.zeros(1, dtype=torch.int32), 21), "best is 21: expected 0 to 20"),
        (lambda: decide(logits, decision, sampling, into, cuts=Cuts()), "runs on a CUDA device"),
    ):
        with pytest.raises(InputError, match=message):
            call()


def words_of(allowed: torch.Tensor) -> torch.Tensor:
    """bool [R, V] as the mask that `decide` takes."""
    rows, vocabulary = allowed.shape
    padded = torch.nn.functional.pad(allowed.cpu(), (0, -vocabulary % 32)).view(rows, -1, 32).long()
    words = (padded << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().to(allowed.device)


@pytest.mark.parametrize("wish", ["greedy", "top-k", "all"])
def test_tokens_that_a_mask_leaves_out_cannot_come(device, wish):
    rng = np.random.default_rng(5)
    logits = logits_of("normal", 2, rng, device)
    allowed = torch.zeros(2, V, dtype=torch.bool, device=device)
    allowed[0, logits[0].argsort()[:7]] = True  # the least likely ones: whole slices are left out
    allowed[1, ::2] = True
    cuts, results = Cuts("top_k" in WISHES[wish], "top_p" in WISHES[wish], wish == "greedy"), []
    for operation in (decide, reference_of):
        sampling = lanes_with([WISHES[wish]] * 2, device)
        decision = Decision.of([0, 1], [4, 5], [[], []], device)
        mask = words_of(allowed)
        mask = mask.cpu() if operation is reference_of else mask
        results.append(operation(logits, decision, sampling, Distributions.empty(2, V, device), cuts=cuts, mask=mask))
    same(*results)
    for row, token in enumerate(results[0].tokens[:, 0].tolist()):
        assert allowed[row, token]


def test_minus_infinity_is_a_draft_that_cannot_come_and_a_broken_answer(device):
    rng = np.random.default_rng(6)
    logits = logits_of("normal", 1, rng, device)
    logits[0, ::3] = float("-inf")
    decision = Decision.of([0], [4], [[]], device)
    for operation in (decide, reference_of):
        produced = [
            int(
                operation(
                    values,
                    *(decision, lanes_with([{}], device), Distributions.empty(1, V, device)),
                    **{"cuts": Cuts(False, False), "purpose": purpose, "counted": False},
                ).produced[0]
            )
            for values, purpose in ((logits, DRAFT), (logits, 0), (-logits, DRAFT))
        ]
        assert produced == [1, 0, 0]


def test_acceptance_can_be_forced_for_measuring(device):
    rng = np.random.default_rng(7)
    logits = logits_of("normal", 4, rng, device)
    decision = Decision.of([0], [4], [[11, 12, 13]], device)
    decision = type(decision)(**{**vars(decision), "forced": torch.tensor([2], dtype=torch.int32, device=device)})
    for operation in (decide, reference_of):
        drawn = operation(
            logits, decision, lanes_with([{}], device), Distributions.empty(4, V, device), cuts=Cuts(False, False)
        )
        assert drawn.tokens.tolist() == [[11, 12, int(logits[2].argmax()), -1, -1, -1]] and drawn.produced.tolist() == [
            3
        ]
