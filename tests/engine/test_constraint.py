"""Answers held to a grammar: every token allowed, speculation lossless under it, ranks alike."""

import json

import pytest
import torch

from duovolt.kernels import reference as ops
from duovolt.runtime.engine.sampling import Purpose, Sampler
from duovolt.runtime.engine.speculation import Draft, judge
from duovolt.runtime.grammar import GrammarFault, Matcher, grammar_fault
from duovolt.runtime.messages import Grammar, SamplingParams
from duovolt.tests.runtime.stub_model import ids, make_tokenizer

VOCABULARY = 288
PROMPT = [5, 9, 2, 77, 31, 8, 100, 3]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["beta", "gamma", "Hello"]},
        "many": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 2, "maxItems": 3},
        "maybe": {"type": "boolean"},
    },
    "required": ["kind", "many"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
TEXT = f"start: document\ndocument: %json {json.dumps(SCHEMA)}"
(END,) = ids("<|im_end|>")
(THOUGHT,) = ids("</think>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    make_tokenizer().save(str(path))
    return path


def grammar(after: int | None = None, text: str = TEXT) -> Grammar:
    return Grammar(text, after, [END])


def answer(tools, tokenizer, limit: int = 120, *, seed: int | None = None, after: int | None = None, **settings):
    sampling = SamplingParams(temperature=0.0) if seed is None else SamplingParams(temperature=1.0, seed=seed)
    engine = tools.engine(
        tools.source(seed=3, vocab_size=VOCABULARY),
        n_sampleable=make_tokenizer().get_vocab_size(),
        tokenizer=tokenizer,
        **settings,
    )
    request = tools.request(1, PROMPT, limit, stop_ids=(END,), sampling=sampling, grammar=grammar(after))
    return tools.drive(engine, request)


def read(tokens: list[int]) -> dict:
    assert tokens[-1] == END
    value = json.loads(make_tokenizer().decode(tokens[:-1]))
    assert set(value) <= {"kind", "many", "maybe"} and value["kind"] in ("beta", "gamma", "Hello")
    assert 2 <= len(value["many"]) <= 3 and set(value["many"]) <= {1, 22, 333}
    return value


def test_greedy_answers_are_the_same_json_with_any_drafts(tools, tokenizer) -> None:
    plain = answer(tools, tokenizer)
    assert plain.finish(1) == "stop"
    read(plain.tokens[1])
    for drafts in (1, 3, 5):
        run = answer(tools, tokenizer, drafts=drafts)
        assert run.tokens == plain.tokens
        assert sum(event.accepted for event in run.events[1]) > 0


def test_forced_drafts_that_the_grammar_forbids_change_nothing(tools, tokenizer) -> None:
    plain = answer(tools, tokenizer).tokens[1]
    right = [plain[1:3], [plain[4], 0, 1], [END, END, 3], [], [plain[8], plain[9]]]
    run = answer(tools, tokenizer, drafts_from=right)
    assert run.tokens[1] == plain
    assert sum(event.accepted for event in run.events[1]) >= 3


def test_a_grammar_begins_anew_behind_a_prefix_that_was_kept(tools, tokenizer) -> None:
    source = tools.source(seed=3, vocab_size=VOCABULARY)
    settings = {"tokenizer": tokenizer, "drafts": 3, "n_sampleable": make_tokenizer().get_vocab_size()}
    engine = tools.engine(source, prefix_bytes=1 << 30, pages=16, **settings)
    for number in range(3):
        asked = tools.request(number, PROMPT * 20, 120, stop_ids=(END,), grammar=grammar(), checkpoints=[70])
        run = tools.drive(engine, asked)
        assert run.events[number][0].cached_tokens == (len(asked.prompt) if number else 0)
        assert run.tokens[number] == tools.drive(tools.engine(source, **settings), asked).tokens[number]
        read(run.tokens[number])


def test_sampled_answers_are_always_in_the_grammar(tools, tokenizer) -> None:
    found = [answer(tools, tokenizer, seed=seed, drafts=3).tokens[1] for seed in range(12)]
    assert len({json.dumps(read(tokens)) for tokens in found}) > 3


def test_reasoning_is_free_and_the_answer_cannot_end_in_it(tools, tokenizer) -> None:
    lengths = set()
    for seed in range(3):
        run = answer(tools, tokenizer, 250, seed=seed, after=THOUGHT, drafts=3, max_context=300)
        tokens = run.tokens[1]
        if THOUGHT not in tokens:
            assert run.finish(1) == "length" and END not in tokens
            continue
        begin = tokens.index(THOUGHT) + 1
        lengths.add(begin)
        assert END not in tokens[:begin]
        if run.finish(1) == "stop":
            read(tokens[begin:])
    assert lengths


def test_two_ranks_give_one_answer(tools, tokenizer) -> None:
    source = tools.source(seed=3, vocab_size=VOCABULARY)

    def work(collective):
        engine = tools.engine(
            tools.cut(source, 2, collective.rank),
            collective,
            n_sampleable=make_tokenizer().get_vocab_size(),
            tokenizer=tokenizer,
            drafts=3,
        )
        return tools.drive(engine, tools.request(1, PROMPT, 120, stop_ids=(END,), grammar=grammar()))

    first, second = tools.ranks(2, work)
    assert first.tokens == second.tokens and first.records == second.records
    read(first.tokens[1])


@pytest.mark.parametrize(
    ("text", "with_tokenizer", "words"),
    [
        ("start: document\ndocument: %json {\"type\": 3}", True, "the grammar"),
        (TEXT, False, "no tokenizer"),
        ("start: /[\\u4e00-\\u4e01]/ & /a/", True, "the grammar"),
    ],
)  # fmt: skip
def test_a_grammar_that_cannot_be_followed_ends_the_answer_alone(
    tools, tokenizer, text: str, with_tokenizer: bool, words: str
) -> None:
    engine = tools.engine(
        tools.source(vocab_size=VOCABULARY), n_sampleable=281, tokenizer=tokenizer if with_tokenizer else None
    )
    bad = tools.request(1, PROMPT, 9, stop_ids=(END,), grammar=grammar(text=text))
    run = tools.drive(engine, bad, tools.request(2, PROMPT, 9))
    assert run.finish(1) == "error" and words in run.events[1][-1].error
    assert len(run.tokens[2]) == 9
    assert engine.free_pages == tools.engine(tools.source(vocab_size=VOCABULARY)).free_pages


def test_ends_that_are_no_stop_ids_are_refused(tools, tokenizer) -> None:
    engine = tools.engine(tools.source(vocab_size=VOCABULARY), n_sampleable=281, tokenizer=tokenizer)
    run = tools.drive(engine, tools.request(1, PROMPT, 9, grammar=grammar()))
    assert run.finish(1) == "error" and "stop ids" in run.events[1][-1].error


class Odd:
    """A constraint over a vocabulary of eight: odd tokens, and behind a draft only others than it."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def mask(self, drafted: list[int]) -> torch.Tensor:
        self.asked.append(drafted)
        allowed = torch.arange(8) % 2 == 1
        allowed[drafted] = False
        return allowed


def test_speculation_has_the_distribution_of_the_constrained_target() -> None:
    """Chi-square over 6,000 draws; the bound is one that a right sampler passes with probability 0.999."""
    target = torch.tensor([0.30, 0.22, 0.15, 0.12, 0.09, 0.07, 0.04, 0.01], dtype=torch.float64)
    guess = torch.tensor([0.05, 0.30, 0.10, 0.20, 0.05, 0.10, 0.10, 0.10], dtype=torch.float64)
    logits, counts, after, accepted = target.log().float().expand(2, -1), torch.zeros(8), torch.zeros(8), 0
    for seed in range(6_000):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [0], 8, Odd())  # type: ignore[arg-type]
        token, source = sampler.choose(guess.log().float(), 10, Purpose.DRAFT, [])
        verdict = judge(sampler, logits, Draft([token], [source]), 10)
        counts[verdict.tokens[0]] += 1
        if verdict.accepted and verdict.tokens[0] == 1:
            accepted += 1
            after[verdict.tokens[1]] += 1
    for found, allowed, bound in ((counts, [1, 3, 5, 7], 16.27), (after, [3, 5, 7], 13.82)):
        share = target[allowed] / target[allowed].sum()
        assert found.sum() == found[allowed].sum(), "nothing that is not allowed"
        total = float(found.sum())
        assert float(((found[allowed] - share * total) ** 2 / (share * total)).sum()) < bound
    assert accepted > 800


def test_masks_depend_on_tokens_alone_and_drafts_leave_no_trace(tokenizer) -> None:
    first, second = (Matcher(TEXT, tokenizer, 281, [END]) for _ in range(2))
    begin = ids('{"kind":"')
    assert first.take(begin) == second.take(begin) == len(begin)
    before = first.allowed()
    drafted = ids('beta","many":[')
    assert first.take(drafted) == len(drafted)
    first.back(len(drafted))
    assert (first.allowed() == before).all() and (second.allowed() == before).all()
    assert first.take(ids("delta")) == 0
    assert grammar_fault(TEXT, tokenizer, 281, [END]) is None
    assert "type" in (grammar_fault('start: d\nd: %json {"type": "x"}', tokenizer, 281, [END]) or "")
    with pytest.raises(GrammarFault):
        Matcher("start: nothing", tokenizer, 281, [END])


def test_greedy_and_sampled_choices_never_leave_the_mask() -> None:
    logits = torch.tensor([9.0, 0.0, 8.0, 1.0, 7.0, 2.0, 6.0, 3.0])
    greedy = Sampler(SamplingParams(temperature=0.0), [0], 8, Odd())  # type: ignore[arg-type]
    assert greedy.choose(logits, 0, Purpose.SAMPLE, []) == (7, None)
    narrow = SamplingParams(temperature=0.5, top_k=6, top_p=0.99, min_p=0.001, repetition_penalty=1.5)
    sampler = Sampler(narrow, [1, 2], 8, Odd())  # type: ignore[arg-type]
    distribution = sampler.distribution(logits, [7])
    assert distribution[[0, 2, 4, 6, 7]].sum() == 0 and ops.draw(distribution, 0.999999) in (1, 3, 5)
