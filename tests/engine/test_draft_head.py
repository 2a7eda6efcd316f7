"""Drafting with a reduced head changes which tokens are guessed, never which are answered."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.checkpoint.manifest import DRAFT_HEAD
from duovolt.model.inventory import DRAFT_IDS, HEAD
from duovolt.runtime.engine import reference as reference_module
from duovolt.runtime.engine.loading import EngineSettings, load_engine
from duovolt.runtime.engine.model import Model
from duovolt.runtime.engine.sources import WeightSource
from duovolt.runtime.engine.speculation import Draft
from duovolt.runtime.engine.weights import load_weights
from duovolt.runtime.messages import SamplingParams
from duovolt.runtime.parallel.base import SoloCollective

IDS = np.array([0, 1, 3, 4, 8, 21, 22, 90], np.int32)
PROMPT = [5, 9, 2, 77, 31, 8]


def with_draft_head(source: WeightSource, ids: np.ndarray = IDS) -> WeightSource:
    """The same model with chosen rows of its head as a draft head."""
    values = {DRAFT_HEAD: source.read(HEAD)[ids], DRAFT_IDS: ids.astype(np.float32)}
    return replace(
        source,
        config=source.config.with_draft_head(len(ids)),
        shapes=source.shapes | {name: value.shape for name, value in values.items()},
        read=lambda name: values[name] if name in values else source.read(name),
    )


def test_drafts_come_from_the_kept_rows_with_the_full_heads_logits(tools: Any) -> None:
    source = with_draft_head(tools.source(seed=3))
    model = Model(load_weights(source), SoloCollective(), 64)
    hidden = torch.randn(5, source.config.text.hidden_size, generator=torch.Generator().manual_seed(1))
    full, drafted = model.logits(hidden), model.draft_logits(hidden)
    assert drafted.shape == full.shape and model.draft_rows == len(IDS)
    assert torch.equal(drafted[:, IDS], full[:, IDS])
    others = np.setdiff1d(np.arange(full.shape[1]), IDS)
    assert (drafted[:, others] == -torch.inf).all()
    assert torch.equal(Model(load_weights(source), SoloCollective(), 64, draft_head=False).draft_logits(hidden), full)


@pytest.mark.parametrize("drafts", [1, 3, 5])
def test_greedy_answers_are_the_plain_ones(tools: Any, drafts: int) -> None:
    """M02 for the reduced head: among few drawable ids, so that drafts are both kept and refused."""
    plain, drawn = tools.source(seed=11), 6
    request = tools.request(1, [t % drawn for t in PROMPT], 40)
    answer = tools.drive(tools.engine(plain, n_sampleable=drawn), request).tokens[1]
    run = tools.drive(tools.engine(with_draft_head(plain), n_sampleable=drawn, drafts=drafts), request)
    assert run.tokens[1] == answer
    accepted, proposed = (sum(getattr(e, name) for e in run.events[1]) for name in ("accepted", "proposed"))
    assert 0 < accepted < proposed


def test_sampled_drafts_state_the_distribution_they_were_drawn_from(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q has no mass off the kept rows and sums to one there: what `judge` needs for the target's own distribution."""
    seen: list[tuple[torch.Tensor, Draft]] = []
    judged = reference_module.judge

    def watch(sampler: Any, logits: torch.Tensor, draft: Draft, position: int) -> Any:
        seen.append((logits, draft))
        return judged(sampler, logits, draft, position)

    monkeypatch.setattr(reference_module, "judge", watch)
    source = with_draft_head(tools.source(seed=4))
    sampling = SamplingParams(temperature=1.3, top_p=0.9, seed=5, repetition_penalty=1.1, presence_penalty=0.3)
    run = tools.drive(tools.engine(source, drafts=3), tools.request(1, PROMPT, 60, sampling=sampling))
    assert len(run.tokens[1]) == 60 and set(run.tokens[1]) - set(IDS.tolist()), "answers go beyond the kept rows"
    drafts = [(token, q) for _, draft in seen for token, q in zip(draft.tokens, draft.distributions, strict=True)]
    others = np.setdiff1d(np.arange(128), IDS)
    for token, q in drafts:
        assert q is not None and token in IDS and q[token] > 0
        assert float(q[others].sum()) == 0 and float(q.sum()) == pytest.approx(1)
    assert len(drafts) > 50


def test_sampled_answers_have_the_plain_distribution(tools: Any) -> None:
    """M03 for the reduced head: the second token over many seeds, plain against drafted, by chi-square."""
    source, trials, drawn = tools.source(seed=6), 250, 12
    reduced = with_draft_head(source, np.array([0, 2, 5, 7], np.int32))
    counts = np.zeros((2, drawn))
    for kind, (weights, drafts) in enumerate(((source, 0), (reduced, 1))):
        engine = tools.engine(weights, n_sampleable=drawn, drafts=drafts, max_context=32)
        for seed in range(trials):
            sampling = SamplingParams(temperature=1.0, seed=seed + kind * trials)
            counts[kind, tools.drive(engine, tools.request(1, [1, 2, 3], 2, sampling=sampling)).tokens[1][1]] += 1
    total = counts.sum(axis=0)
    both = counts[:, total > 0]
    expected = both.sum(axis=0) / 2
    statistic = float((np.square(both - expected) / expected).sum())
    assert both.shape[1] >= 8 and statistic < 31.3  # chi-square, 11 degrees of freedom: 0.001


def test_two_ranks_hold_a_share_each_and_draft_alike(tools: Any) -> None:
    source = with_draft_head(tools.source(seed=8))
    request = tools.request(1, PROMPT, 20)

    def work(collective: Any) -> Any:
        cut = tools.cut(source, 2, collective.rank)
        weights = load_weights(cut)
        assert (
            weights.draft_head is not None
            and weights.draft_head.ids.tolist() == IDS[collective.rank * 4 :][:4].tolist()
        )
        return tools.drive(tools.engine(cut, collective, drafts=3), request)

    first, second = tools.ranks(2, work)
    alone = tools.drive(tools.engine(source, drafts=3), request)
    assert first.tokens == second.tokens == alone.tokens and first.records == second.records
    assert [e.proposed for e in first.events[1]] == [e.proposed for e in alone.events[1]]


def test_ids_beyond_the_vocabulary_are_refused_at_load(tools: Any) -> None:
    source = with_draft_head(tools.source(seed=1))
    moved = IDS.astype(np.float32) + 100
    beyond = replace(source, read=lambda name: moved if name == DRAFT_IDS else source.read(name))
    with pytest.raises(InputError, match="beyond the vocabulary"):
        load_weights(beyond)


def test_asked_for_and_not_there(tools: Any) -> None:
    directory: Path = tools.fixture / "checkpoint"
    load_engine(directory, SoloCollective(), EngineSettings(max_context=64, drafts=1))
    with pytest.raises(InputError, match="no draft head"):
        load_engine(directory, SoloCollective(), EngineSettings(max_context=64, drafts=1, draft_head="on"))
