"""`--head-split` and `--attention` change no token: on the operations' torch references here, and with mark `gpu` on a card."""

from dataclasses import replace

import msgspec
import pytest
import torch

from duovolt.kernels.candidates import CANDIDATES
from duovolt.kernels.module import PORTABLE, forced_arch
from duovolt.model.inventory import HEAD
from duovolt.runtime.messages import SamplingParams
from duovolt.runtime.parallel.device import CpuDeviceCollective

from ..support.cuda_models import TEXT, Encoded, cuda_engine, cut_weights, mixture, moved, with_draft_head

PROMPT = [5, 77, 3, 150, 9, 9, 42, 101, 7, 20, 64, 33]
SHARE = TEXT["vocab_size"] // 2  # columns of a rank's logits
FEWER = [2 * rank + 1 for rank in range(78)]  # tokens of a reduced draft head
GREEDY, DRAWN = SamplingParams(temperature=0), SamplingParams(temperature=1.0, seed=7)
CUT = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=11, presence_penalty=0.5)
SHIFTED = SamplingParams(temperature=0, repetition_penalty=1.4, logit_bias={3: 4.0, 158: 3.5})
FROM_FEW = [GREEDY, CUT, SHIFTED]
FROM_ALL = [DRAWN, msgspec.structs.replace(CUT, top_k=CANDIDATES + 1), msgspec.structs.replace(GREEDY, logprobs=1)]


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PLACES = ["cpu", pytest.param("native", marks=needs_gpu), pytest.param("portable", marks=needs_gpu)]


@pytest.fixture(params=PLACES)
def device(request):
    """The CPU, or a card with its own build or with what a V100 gets."""
    if request.param != "portable":
        yield torch.device("cpu" if request.param == "cpu" else "cuda:0")
        return
    with forced_arch(PORTABLE):
        yield torch.device("cuda:0")


class Listening(CpuDeviceCollective):
    """Remembers how many columns were gathered at a time."""

    def __init__(self, collective) -> None:
        super().__init__(collective)
        self.columns: set[int] = set()

    def gather(self, part, out) -> None:
        self.columns.add(part.shape[1])
        super().gather(part, out)


@pytest.fixture(scope="module")
def source(tools):
    return Encoded(tools.source(seed=6, **TEXT)).source


def answer(tools, source, collective, head_split, params, *, reduced=False):
    """What a rank makes of a request, what was gathered for it, and what the engine says of itself."""
    weights = cut_weights(tools.cut(source, 2, collective.rank))
    if reduced:
        share = len(FEWER) // 2
        own = FEWER[collective.rank * share :][:share]
        made = with_draft_head(weights, own, torch.from_numpy(source.read(HEAD)))
        weights = replace(made, draft_head=replace(made.draft_head, cut=True))
    link = Listening(collective)
    engine = cuda_engine(weights, link, drafts=2, head_split=head_split)
    link.columns.clear()  # the draft head's ids
    return tools.drive(engine, tools.request(1, PROMPT, 6, sampling=params)), link.columns, engine.executor.facts


def scores(run) -> list:
    return [(entry.token, entry.logprob) for event in run.events[1] for entry in event.logprobs]


@pytest.mark.parametrize("params", [*FROM_FEW, *FROM_ALL])
def test_a_split_head_changes_no_token(tools, source, params):
    """Candidates where they are enough, whole logits where they are not: by what was gathered, and by every record."""
    (off, whole, facts), _ = tools.ranks(2, lambda c: answer(tools, source, c, False, params))
    assert (whole, facts["head_split"]) == ({SHARE}, "off")
    (on, few, facts), (other, _, _) = tools.ranks(2, lambda c: answer(tools, source, c, True, params))
    assert facts["head_split"] == "on" and few == ({2 * CANDIDATES} if params in FROM_FEW else {SHARE})
    assert on.tokens == other.tokens == off.tokens and on.records == other.records == off.records
    assert scores(on) == scores(off) and len(on.tokens[1]) == 6


@pytest.mark.parametrize("params", [GREEDY, CUT])
def test_a_split_head_and_a_reduced_draft_head(tools, source, params):
    runs = [tools.ranks(2, lambda c, s=s: answer(tools, source, c, s, params, reduced=True))[0] for s in (False, True)]
    (off, whole, _), (on, few, _) = runs
    assert whole == {SHARE, len(FEWER) // 2} and few == {2 * CANDIDATES}
    assert on.tokens == off.tokens and on.records == off.records
    proposed = [sum(event.proposed for event in run.events[1]) for run in (on, off)]
    assert proposed[0] == proposed[1] > 0


@pytest.mark.parametrize("broken", [False, True])
def test_lanes_of_both_kinds_and_a_broken_head(tools, source, broken):
    """A lane that needs whole logits beside one that does not; logits that are not finite end both on both ranks."""
    asks = [tools.request(n, PROMPT[:n], 6, sampling=params) for n, params in ((4, DRAWN), (9, GREEDY))]

    def work(collective, head_split):
        weights = cut_weights(tools.cut(source, 2, collective.rank))
        if broken and collective.rank:
            weights.head.words[:] = float("nan")
        link = Listening(collective)
        run = tools.drive(cuda_engine(weights, link, drafts=2, lanes=2, head_split=head_split), *asks)
        return run.tokens, [run.finish(ask.request_id) for ask in asks], link.columns

    off, on = (tools.ranks(2, lambda c, s=s: work(c, s))[0] for s in (False, True))
    assert off[:2] == on[:2] and on[2] == {SHARE, 2 * CANDIDATES}
    assert set(on[1]) == ({"error"} if broken else {"length"})


class Lone:
    """Rank 0 of two whose twin adds nothing to sums and has no token that could be drawn. On any device, to be captured."""

    rank, size, name, halves = 0, 2, "lone", False

    def __init__(self) -> None:
        self.columns: set[int] = set()

    def reduce(self, part, out) -> None:
        out.copy_(part)

    reduce_large = reduce

    def gather(self, part, out) -> None:
        columns = part.shape[1]
        self.columns.add(columns)
        out[:, :columns] = part
        out[:, columns:] = -1.0 if columns == 2 * CANDIDATES else -1e30

    def check(self) -> None:
        return None


@pytest.mark.parametrize("params", FROM_FEW)
def test_a_split_head_in_captured_rounds(tools, source, device, params):
    """On a card the kernels, replayed and one by one; here their references."""
    ask, runs = tools.request(1, PROMPT, 12, sampling=params), []
    for head_split, graphs in ((False, True), (True, True), (True, False)):
        link = Lone()
        weights = moved(cut_weights(tools.cut(source, 2, 0)), device)
        engine = cuda_engine(weights, link, drafts=2, head_split=head_split, graphs=graphs)
        runs.append(tools.drive(engine, ask))
        assert link.columns == {2 * CANDIDATES if head_split else SHARE}
        assert (len(engine.executor._graphs) > 0) == (graphs and device.type == "cuda")
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens and len(runs[0].tokens[1]) == 12
    assert runs[0].records == runs[1].records == runs[2].records


def test_a_rank_with_the_whole_head_gathers_nothing(tools, source):
    assert cuda_engine(cut_weights(source), head_split=True).executor.facts["head_split"] == "none"


def test_plain_attention(tools, source, device):
    """On a card another kernel, with the same bits in graphs and without, whatever is drafted; here both are the reference."""
    encoded = Encoded(source, mixture)
    ask = tools.request(1, (PROMPT * 18)[:200], 6, sampling=msgspec.structs.replace(GREEDY, logprobs=1))
    runs = []
    for choices in ({"drafts": 2}, {"drafts": 2, "graphs": False}, {"drafts": 0}):
        engine = cuda_engine(encoded.cuda(device), attention="plain", **choices)
        assert engine.executor.facts["attention"] == "plain"
        runs.append(tools.drive(engine, ask))
    assert all(run.tokens == runs[0].tokens and scores(run) == scores(runs[0]) for run in runs)
    engine = cuda_engine(encoded.cuda(device), drafts=2)
    usual = tools.drive(engine, ask)
    assert engine.executor.facts["attention"] == "split"
    for (own, value), (token, wanted) in zip(scores(runs[0]), scores(usual), strict=True):
        assert abs(value - wanted) < 0.02
        if own != token:  # two that are as good as equal; behind it the answers are of different texts
            break
