"""Sampling, speculation, log-probabilities, candidates."""

from functools import partial

import torch

from duovolt.kernels.candidates import candidates, spread
from duovolt.kernels.delta import Progress
from duovolt.kernels.logprobs import log_probabilities
from duovolt.kernels.sampling import DRAFT, decide
from duovolt.kernels.sampling_state import Cuts, Decision, Distributions, LaneSampling

from .launching import VOCABULARY, empty, here, ints, randn, run, touch


def _sampling(vocabulary, **wishes):
    """Two lanes; made on the host."""
    made = LaneSampling.empty(2, vocabulary, "cpu", bias="bias" in wishes)
    made.start(0, [1, 5, 9], **wishes)
    made.start(1, [1], temperature=0.0)
    return LaneSampling(*(None if part is None else part.to(here.device) for part in vars(made).values()))


def _decision(*arguments, **more):
    made = Decision.of(*arguments, "cpu", **more)
    return Decision(*(None if part is None else part.to(here.device) for part in vars(made).values()))


def _into(rows, vocabulary):
    """As the engine has it: zeros."""
    return Distributions.empty(rows, vocabulary, here.device)


FULL = {
    "temperature": 0.8,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition": 1.1,
    "presence": 0.5,
    "frequency": 0.2,
    "bias": {7: 2.0},
}


def _read_drawn(drawn, count=None):
    """Of the first sequences: of one without a lane nothing is written, which is as it should be."""
    touch(drawn.tokens[:count], drawn.produced[:count], drawn.chance[:count])


def _vocabulary(native):
    return VOCABULARY if native else 5000


def sample_lists(native):
    """A greedy lane, and short lists, with drafts that were given."""
    vocabulary = _vocabulary(native)
    drafts = [[1, 2, 3], []] if here.tool != "race" else [[1], []]
    rows = sum(len(own) + 1 for own in drafts)
    logits = randn(rows, vocabulary, scale=3)

    def go(cuts, **wishes):
        sampling, decision = _sampling(vocabulary, **wishes), _decision([0, 1], [9, 4], drafts)
        _read_drawn(
            decide(
                logits, decision, sampling, _into(rows, vocabulary), cuts=cuts, progress=Progress.empty(2, here.device)
            )
        )
        _read_drawn(decide(logits, decision, sampling, _into(rows, vocabulary), cuts=cuts, counted=False))

    run(f"greedy round of {vocabulary:,}", partial(go, Cuts(False, False, greedy=True), temperature=0.0))
    run(f"short lists of {vocabulary:,}", partial(go, Cuts(listed=True), top_k=40, **FULL))
    run(f"short lists without top-p of {vocabulary:,}", partial(go, Cuts(top_p=False, listed=True), top_k=20))

    def masked():
        sampling, decision = _sampling(vocabulary, top_k=40), _decision([0, -1], [9, 4], [[], []])
        mask = torch.full((2, -(-vocabulary // 32)), 0x55555555, dtype=torch.int32).to(here.device)
        two = torch.where((torch.arange(vocabulary) % 4 == 0).to(here.device), -torch.inf, logits[:2])
        _read_drawn(
            decide(two, decision, sampling, _into(2, vocabulary), cuts=Cuts(listed=True), mask=mask, sparse=True), 1
        )

    run(f"short lists with a mask of {vocabulary:,}", masked)


def _by_passes(native, what, cuts, wishes, small=False):
    vocabulary = 5000 if small else _vocabulary(native)
    drafts = [[1, 2], []] if here.tool != "race" else [[]]
    rows = sum(len(own) + 1 for own in drafts)

    def go():
        lanes = list(range(len(drafts)))
        decision, sampling = _decision(lanes, [9, 4][: len(lanes)], drafts), _sampling(vocabulary, **wishes)
        _read_drawn(decide(randn(rows, vocabulary, scale=3), decision, sampling, _into(rows, vocabulary), cuts=cuts))

    run(f"{what} of {vocabulary:,}", go)


def sample_passes(native):
    """Passes over whole rows: one row under racecheck, a few else; of few ids before those of the 27B."""
    for small in (True, False) if native else (True,):
        _by_passes(native, "top-p", Cuts(top_k=False), {"top_p": 0.9}, small)
        _by_passes(native, "no cut", Cuts(top_k=False, top_p=False), {}, small)
        _by_passes(native, "top-k of 100 and top-p", Cuts(), {"top_k": 100, **FULL}, small)


def sample_drafts(native):
    """A draft drawn, then judged against what it was drawn from, so that the rest of a refused one is weighed."""
    for vocabulary in (5000, VOCABULARY) if native else (5000,):
        for what, cuts, wishes in (
            ("no cut", Cuts(False, False), {}),
            ("short lists", Cuts(listed=True), {"top_k": 20, "top_p": 0.95}),
            ("top-k of 100", Cuts(top_p=False), {"top_k": 100}),
        ):
            if here.tool == "race" and vocabulary == VOCABULARY and what.startswith("top-k"):
                continue

            def go(vocabulary=vocabulary, cuts=cuts, wishes=wishes):
                sampling, source = _sampling(vocabulary, **wishes), _into(1, vocabulary)
                guess, target = randn(1, vocabulary, scale=3), randn(2, vocabulary, scale=3)
                drafting = _decision([0], [9], [[]])
                _read_drawn(decide(guess, drafting, sampling, source, cuts=cuts, purpose=DRAFT, counted=False))
                for token, chance in ((5, 0.9), (7, 1e-9)):  # mostly refused; taken if it can come
                    judging = _decision([0], [9], [[token]], sources=[[0]], chances=[[chance]])
                    _read_drawn(decide(target, judging, sampling, _into(2, vocabulary), cuts=cuts, draft_rows=source))

            run(f"drafts judged, {what}, of {vocabulary:,}", go)


def logprobs_and_candidates(native):
    vocabulary = VOCABULARY if native else 40000  # whose half takes two turns of the tournament
    rows = 2 if here.tool == "race" else 4
    logits = randn(rows, vocabulary, scale=3)
    for best in (0, 5, 20):

        def logs(best=best):
            tokens = ints(*([7, -1, 3, vocabulary][:rows]))
            touch(*(part for part in log_probabilities(logits, tokens, best) if part.numel()))

        run(f"log-probabilities of {rows} rows of {vocabulary:,}, {best} best", logs)

    share = vocabulary // 2

    def few(count, first, ids, open_rows):
        sampling = _sampling(vocabulary, temperature=0.0, repetition=1.2, presence=0.5, bias={2100: 9.0})
        decision = _decision([0, 1], [3, 3], [[2500][: rows - 2] + [8] * (rows - 3), []])
        part = logits[: decision.row_lanes.shape[0], first : first + count].contiguous()
        found = candidates(part, decision, sampling, first=first, ids=ids, open_rows=open_rows)
        touch(found)
        both = torch.cat((found, found), dim=1)
        out, room = empty(len(found), vocabulary), empty(len(found), 324)
        spread(both, out)
        spread(both, room[:, :321])
        touch(out, room[:, :321])

    run(f"candidates of {share:,}", partial(few, share, share, None, False))
    run("candidates of 1,025, open", partial(few, 1025, 0, None, True))
    run(
        "candidates of 100 ids of their own",
        partial(few, 100, 0, torch.arange(3, 303, 3, dtype=torch.int32).to(here.device), False),
    )
    run("candidates of 1", partial(few, 1, 20, None, False))
