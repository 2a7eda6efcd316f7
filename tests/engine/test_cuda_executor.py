"""The CUDA executor against the reference, on the operations' torch references here, and with mark `gpu` on a card."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from duovolt.kernels.module import PORTABLE, forced_arch
from duovolt.kernels.weights import HalfWeight
from duovolt.model.inventory import HEAD
from duovolt.runtime.engine.cuda import executor as executor_module
from duovolt.runtime.engine.cuda import model
from duovolt.runtime.grammar import GrammarFault
from duovolt.runtime.messages import Grammar, ImageInput, SamplingParams
from duovolt.runtime.parallel.device import CpuDeviceCollective
from duovolt.runtime.parallel.region import ProgressCounter, Region, region_bytes
from duovolt.tests.runtime.stub_model import ids, make_tokenizer

from ..support.cuda_models import TEXT, Encoded, cuda_engine, cut_weights, mixture, reference_engine, with_draft_head

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PROMPT = [5, 77, 3, 150, 9, 9, 42, 101, 7, 20, 64, 33]
PLACES = ["cpu", pytest.param("native", marks=needs_gpu), pytest.param("portable", marks=needs_gpu)]


@pytest.fixture(scope="module")
def encoded(tools) -> Encoded:
    return Encoded(tools.source(seed=3, **TEXT), mixture)


@pytest.fixture(params=PLACES)
def device(request):
    """The CPU, or a card with its own build or with what a V100 gets."""
    if request.param != "portable":
        yield torch.device("cpu" if request.param == "cpu" else "cuda:0")
        return
    with forced_arch(PORTABLE):
        yield torch.device("cuda:0")


def wishes(kind: str, **fields) -> SamplingParams:
    return SamplingParams(
        **{
            "greedy": {"temperature": 0.0},
            "plain": {"temperature": 1.0, "seed": 7},
            "cut": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 11, "presence_penalty": 0.5},
        }[kind],
        **fields,
    )


def scores(run, number: int = 1) -> list:
    return [entry for event in run.events[number] for entry in event.logprobs]


def apart(run, other) -> float:
    """The largest difference of scores, up to the first token that differs."""
    worst, count = 0.0, 0
    for own, wanted in zip(scores(run), scores(other), strict=True):
        if own.token != wanted.token:
            break
        worst, count = max(worst, abs(own.logprob - wanted.logprob)), count + 1
    assert count >= 3, (run.tokens, other.tokens)
    return worst


@pytest.mark.parametrize(
    ("kind", "drafts", "int8"),
    [("greedy", 0, False), ("greedy", 3, True), ("plain", 3, False), ("cut", 0, True), ("cut", 3, False)],
)
def test_scores_are_the_references(tools, encoded, device, kind, drafts, int8):
    """They differ by what fp16 and int8 round; seen: 0.005 and 0.02."""
    ask = tools.request(1, PROMPT, 8, sampling=wishes(kind, logprobs=3, logit_bias={4: -2.0, 9: 1.5}))
    theirs = tools.drive(reference_engine(encoded.source, drafts=drafts), ask)
    ours = tools.drive(cuda_engine(encoded.cuda(device), drafts=drafts, int8=int8), ask)
    assert apart(ours, theirs) < (0.06 if int8 else 0.02)
    for own, wanted in zip(scores(ours)[:3], scores(theirs)[:3], strict=True):
        assert [token for token, _ in own.top] == [token for token, _ in wanted.top]


@pytest.mark.parametrize("kind", ["greedy", "cut"])
def test_graphs_and_looking_ahead_change_no_bit(tools, encoded, device, kind):
    """Tokens without scores, which look ahead; then with, so that the last bits of logits show."""
    for logprobs in (0, 5):
        ask = tools.request(1, PROMPT, 12 if device.type == "cpu" else 60, sampling=wishes(kind, logprobs=logprobs))
        weights = encoded.cuda(device)
        runs = [
            tools.drive(cuda_engine(weights, drafts=3, graphs=graphs, ahead=ahead), ask)
            for graphs, ahead in ((True, True), (False, False), (True, False))[: 3 if device.type == "cuda" else 2]
        ]
        for run in runs[1:]:
            assert run.tokens == runs[0].tokens and scores(run) == scores(runs[0])


def test_the_number_of_drafts_changes_no_token(tools, encoded, device):
    length = 14 if device.type == "cpu" else 230
    ask = tools.request(1, PROMPT, length)
    weights, answers = encoded.cuda(device), []
    for drafts in (0, 1, 2, 5) if device.type == "cpu" else range(6):
        run = tools.drive(cuda_engine(weights, drafts=drafts), ask)
        answers.append(run.tokens[1])
        assert drafts == 0 or sum(event.proposed for event in run.events[1]) > 0
    assert len(answers[0]) == length and all(answer == answers[0] for answer in answers)


def test_given_drafts_leave_the_plain_paths_state(tools, encoded, device):
    """Right drafts, wrong ones at every place, too many at the end: at each length the saved state is the plain one's."""
    ask, weights, found = tools.request(1, PROMPT, 16), encoded.cuda(device), []

    def saving(states: dict[int, object]):
        def save(engine) -> None:
            for lane in engine.running:
                if not lane.prefilling:
                    states[lane.length] = engine.executor.save(lane)

        return save

    for rounds in (None, "right and wrong"):
        states: dict[int, object] = {}
        settings = {"ahead": False, "int8": True}
        if rounds:
            plain = found[0][0]
            settings["drafts_from"] = [
                *(plain[1:4], [plain[5], 0, plain[7]], [0, 1], [], [*plain[9:12], 0, 0]),
                *(plain[13:16], [3, 3, 3, 3, 3]),
            ]
        run = tools.drive(cuda_engine(weights, **settings), ask, after_step=saving(states))
        found.append((run.tokens[1], states, run))
    (plain, states, _), (speculated, cut_back, run) = found
    assert speculated == plain and sum(event.accepted for event in run.events[1]) >= 8
    assert len(cut_back) >= 6 and set(cut_back) <= set(states)
    for length, state in cut_back.items():
        own, wanted = (torch.cat(one.delta.blocks)[: one.delta.used] for one in (state, states[length]))
        assert len(own) > 0 and torch.equal(own, wanted), length
        assert torch.equal(state.hidden[-1], states[length].hidden[-1]), length


def test_lanes_do_not_meet(tools, encoded, device):
    """Four answers of all kinds and lengths side by side are the answers alone, whoever comes and goes."""
    kinds = ["greedy", "cut", "plain", "greedy", "cut", "greedy"]
    step = 2 if device.type == "cpu" else 20
    asks = [
        tools.request(n, PROMPT[: 3 + n] * (1 + n % 3), 2 + step * n, sampling=wishes(kind))
        for n, kind in enumerate(kinds, start=1)
    ]
    weights = encoded.cuda(device)
    alone = {ask.request_id: tools.drive(cuda_engine(weights, drafts=2), ask).tokens[ask.request_id] for ask in asks}
    together = tools.drive(cuda_engine(weights, drafts=2, lanes=4), *asks)
    assert together.tokens == alone


def test_a_saved_state_is_where_it_was(tools, encoded, device):
    """Saved after a chunk, after the prompt and behind a stop id; loaded into another lane; same bits from there on."""
    weights = encoded.cuda(device)
    stop = tools.drive(cuda_engine(weights, drafts=2), tools.request(1, PROMPT, 8)).tokens[1][5]
    ask = tools.request(1, PROMPT, 8, stop_ids=(stop,), sampling=wishes("greedy", logprobs=2))
    engine, saved = cuda_engine(weights, drafts=2, lanes=2, prefill_chunk=8), {}
    take = engine.executor.close

    def closing(lane) -> None:
        saved["end"] = (lane.length, list(lane.tokens), engine.executor.save(lane))
        take(lane)

    engine.executor.close = closing
    whole = tools.drive(engine, ask, after_step=lambda e: [_keep(e, lane, saved) for lane in e.running])
    assert set(saved) == {8, 12, "end"} and whole.finish(1) == "stop"
    length, tokens, state = saved["end"]
    assert state is not None and state.length == length == len(tokens) - 1
    assert state.nbytes <= engine.executor.state_bytes
    again = tools.request(1, tokens, 4, sampling=wishes("greedy", logprobs=2))  # on from the end of the answer
    uncached = tools.drive(cuda_engine(weights, drafts=2), again)
    for begin, asked, wanted in ((8, ask, whole), (12, ask, whole), (length, again, uncached)):
        other = cuda_engine(weights, drafts=2, lanes=2, prefill_chunk=8)
        other.add(tools.request(7, PROMPT[:5], 30))
        other.admit()  # takes lane 0 and the first pages
        other.add(asked)
        other.admit()
        lane = other.running[1]
        for page, source in zip(lane.pages, range(4), strict=False):
            for ours, theirs in zip(other.executor.state.pools, engine.executor.state.pools, strict=True):
                for name in ("keys", "values", "key_scales", "value_scales"):
                    getattr(ours, name)[page] = getattr(theirs, name)[source]
        with torch.inference_mode():
            other.executor.load(lane, saved.get(begin, state))
            if begin < len(asked.prompt):
                other.executor.prefill(lane, begin, len(asked.prompt) - begin)
            lane.read = len(asked.prompt)
            outcome = other.executor.first(lane)
        if asked is again:  # what was decoded is now read as a prompt: other roundings
            assert outcome.tokens == wanted.tokens[1][:1]
            assert abs(outcome.logprobs[0].logprob - scores(wanted)[0].logprob) < 0.02
        else:
            assert outcome.tokens == wanted.tokens[1][:1] and outcome.logprobs == scores(wanted)[:1]


def test_kept_prefixes_change_no_answer(tools, encoded, device, kind="greedy"):
    """A talk of four turns, each going on from the last answer, which ended by a stop id or by length."""
    weights, plain = encoded.cuda(device), {"drafts": 2, "lanes": 2, "max_context": 512}
    stop = tools.drive(cuda_engine(weights, **plain), tools.request(1, PROMPT * 6, 9, sampling=wishes(kind))).tokens[1][
        6
    ]
    kept, fresh = cuda_engine(weights, prefix_bytes=1 << 30, **plain), cuda_engine(weights, **plain)
    text, cached = PROMPT * 6, []
    for turn in range(4):
        ask = tools.request(turn, text, 9, stop_ids=(stop,) if turn % 2 == 0 else (), sampling=wishes(kind))
        runs = [tools.drive(engine, ask) for engine in (kept, fresh)]
        assert runs[0].tokens == runs[1].tokens
        cached.append(max(event.cached_tokens for event in runs[0].events[turn]))
        text = [*text, *runs[0].tokens[turn], *PROMPT[:5]]
    assert cached[0] == 0 and cached == sorted(set(cached))
    assert cached[1] > 72  # not only the prompt's end: the answer's, too


def _keep(engine, lane, saved) -> None:
    if lane.length in (8, 12) and lane.produced <= 1:
        saved.setdefault(lane.length, engine.executor.save(lane))


def test_answers_end_where_they_should(tools, encoded, device):
    """By a stop id among accepted drafts, by more stop ids than the device knows, by the limit, and at fault."""
    weights = encoded.cuda(device)
    plain = tools.drive(cuda_engine(weights), tools.request(1, PROMPT, 10)).tokens[1]
    for stops in ((plain[4],), (*range(140, 150), plain[4])):
        engine = cuda_engine(weights, drafts_from=[plain[1:4], plain[5:9]])
        run = tools.drive(engine, tools.request(1, PROMPT, 10, stop_ids=stops), tools.request(2, PROMPT, 6))
        assert run.tokens[1] == plain[: plain.index(plain[4]) + 1] and run.finish(1) == "stop"
        assert run.tokens[2] == plain[:6] and run.finish(2) == "length"
    broken = replace(weights, norm=torch.full_like(weights.norm, float("nan")))
    run = tools.drive(cuda_engine(broken, drafts=2), tools.request(1, PROMPT, 6))
    assert run.finish(1) == "error" and "not finite" in run.events[1][-1].error


def test_a_prompt_is_scored_and_may_be_cut_anywhere(tools, encoded, device):
    ask = tools.request(1, PROMPT * 3, 4, echo_logprobs=True, sampling=wishes("greedy", logprobs=2))
    theirs = tools.drive(reference_engine(encoded.source), ask)
    wanted = [entry for event in theirs.events[1] for entry in event.prompt_logprobs]
    for chunk in (512, 7):
        run = tools.drive(cuda_engine(encoded.cuda(device), drafts=1, int8=False, prefill_chunk=chunk), ask)
        found = [entry for event in run.events[1] for entry in event.prompt_logprobs]
        assert [entry.token for entry in found] == [entry.token for entry in wanted] == (PROMPT * 3)[1:]
        assert max(abs(a.logprob - b.logprob) for a, b in zip(found, wanted, strict=True)) < 0.02
        assert run.tokens == theirs.tokens


def test_a_reduced_head_only_drafts(tools, encoded, device):
    """Half of the vocabulary, then none of what the model says: the answer is the same, drafts are of it alone."""
    weights, rows = encoded.cuda(device), torch.from_numpy(encoded.source.read(HEAD))
    ask = tools.request(1, PROMPT, 10)
    plain = tools.drive(cuda_engine(weights), ask).tokens[1]
    for tokens in (sorted({*range(0, 160, 2), *plain}), [n for n in range(160) if n not in plain]):
        engine = cuda_engine(with_draft_head(weights, tokens, rows), drafts=3)
        run = tools.drive(engine, ask)
        assert run.tokens[1] == plain and engine.executor.facts["draft_head"] == f"{len(tokens)}-rows"
        accepted = sum(event.accepted for event in run.events[1])
        assert accepted == 0 or tokens[0] == 0


def test_a_draft_window_changes_drafts_and_no_token(tools, encoded, device):
    """A window beyond the context is none, one within it gives other drafts; the answer stays."""
    ask, weights = tools.request(1, (PROMPT * 18)[:200], 8), encoded.cuda(device)
    plain = tools.drive(cuda_engine(weights), ask).tokens[1]
    logits = {}
    assert cuda_engine(weights).executor.facts["prompts"].partition(",")[0] == "plain"
    for window in (0, 64, 256):
        engine = cuda_engine(weights, drafts=3, draft_window=window)
        assert tools.drive(engine, ask).tokens[1] == plain
        assert engine.executor.facts["draft_window"] == (str(window) if window else "off")
        logits[window] = engine.executor._flights.canvas.draft_logits.clone()
    assert torch.equal(logits[0], logits[256])
    assert 0.01 < float((logits[0] - logits[64]).norm() / logits[0].norm()) < 2


class Tower:
    """Pictures of three tokens, whose embeddings are their numbers."""

    def tokens(self, image: ImageInput) -> int:
        return 3

    def look(self, image: ImageInput) -> Iterator[int]:
        yield 1
        return torch.sin(torch.arange(3 * 128.0).view(3, 128) + image.pixels[0])


class Processor:
    """Lets every picture in."""

    factor, max_pixels = 1, 1

    def tokens(self, height: int, width: int) -> int:
        return 3


@pytest.mark.parametrize("chunk", [512, 5])
def test_pictures_are_read_at_their_places(tools, encoded, device, chunk):
    prompt = [*PROMPT[:4], 50, 50, 50, *PROMPT]
    places = [*range(4), 4, 4, 4, *range(6, 18)]
    ask = tools.request(
        1,
        prompt,
        8,
        images=[ImageInput(4, 1, 1, b"\x05\x00\x00")],
        rope_positions=[places, [*range(4), 4, 5, 5, *range(6, 18)], [*range(4), 4, 4, 5, *range(6, 18)]],
        sampling=wishes("greedy", logprobs=1),
    )
    settings = {"processor": Processor(), "image_token": 50, "drafts": 2, "prefill_chunk": chunk, "tower": Tower()}
    theirs = tools.drive(reference_engine(encoded.source, **settings), ask)
    ours = tools.drive(cuda_engine(encoded.cuda(device), int8=False, **settings), ask)
    assert apart(ours, theirs) < 0.02
    if chunk == 512:
        assert ours.records[0].token_hash == theirs.records[0].token_hash  # both saw the same embeddings


@pytest.mark.parametrize("half", [512, 4], ids=["whole chunks", "chunks in halves"])
def test_two_ranks_give_one_answer(tools, monkeypatch, half):
    """Each rank its half, on the CPU: both draw the same, and nearly what one rank draws."""
    monkeypatch.setattr(model, "HALF", half)
    monkeypatch.setattr(model, "STEP", 2)
    source = Encoded(tools.source(seed=5, **TEXT)).source
    asks = [
        tools.request(n, PROMPT[:n], 8, sampling=wishes(kind, logprobs=2)) for n, kind in ((4, "plain"), (9, "greedy"))
    ]
    whole = tools.drive(cuda_engine(cut_weights(source), drafts=2, lanes=2), *asks)

    def work(collective):
        weights = cut_weights(tools.cut(source, 2, collective.rank))
        engine = cuda_engine(weights, CpuDeviceCollective(collective), drafts=2, lanes=2)
        return tools.drive(engine, *asks)

    first, second = tools.ranks(2, work)
    assert first.tokens == second.tokens and first.records == second.records
    for number in (4, 9):
        assert scores(first, number) == scores(second, number)
        for own, wanted in zip(scores(first, number)[:4], scores(whole, number)[:4], strict=True):
            assert own.token == wanted.token and abs(own.logprob - wanted.logprob) < 0.02


SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["beta", "gamma", "Hello"]}, "many": {"enum": [1, 22, 333]}},
    "required": ["kind", "many"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.mark.parametrize("kind", ["greedy", "plain"])
def test_answers_are_held_to_their_grammar(tools, device, tmp_path, kind):
    """Beside a lane that may say anything; with and without drafts the same, where nothing is drawn."""
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (end,) = ids("<|im_end|>")
    weights = Encoded(tools.source(seed=3, **TEXT | {"vocab_size": 288})).cuda(device)
    form = Grammar(f"start: document\ndocument: %json {json.dumps(SCHEMA)}", None, [end])
    sampleable, answers = make_tokenizer().get_vocab_size(), []
    for drafts in (0, 2):
        engine = cuda_engine(
            weights, drafts=drafts, lanes=2, n_sampleable=sampleable, tokenizer=tmp_path / "tokenizer.json"
        )
        run = tools.drive(
            engine,
            tools.request(1, PROMPT, 60, stop_ids=(end,), sampling=wishes(kind), grammar=form),
            tools.request(2, PROMPT[::-1], 5, sampling=wishes(kind)),
        )
        value = json.loads(make_tokenizer().decode(run.tokens[1][:-1]))
        assert run.finish(1) == "stop" and value["kind"] in ("beta", "gamma", "Hello") and value["many"] in (1, 22, 333)
        answers.append(run.tokens)
    assert kind != "greedy" or answers[0] == answers[1]


class DeadEnd:
    """A constraint that lets three tokens come, and then none."""

    def __init__(self) -> None:
        self.taken = 0

    def accept(self, token: int) -> None:
        self.taken += 1

    def mask(self, drafted: list[int]) -> torch.Tensor:
        if self.taken + len(drafted) >= 3:
            raise GrammarFault("nothing may follow.")
        return torch.ones(160, dtype=torch.bool)


@pytest.mark.parametrize("given", [[1, 2], [0, 2], [9, 9]], ids=["reached", "one stands", "none stands"])
def test_where_nothing_may_follow_the_answer_is_at_fault(tools, encoded, device, given):
    """As on the reference: only where a token would have to be drawn there."""
    plain = tools.drive(reference_engine(encoded.source), tools.request(1, PROMPT, 6)).tokens[1]
    rounds, found = [[plain[n] if n < 9 else 3 for n in given]], []
    for engine in (
        cuda_engine(encoded.cuda(device), drafts_from=rounds),
        reference_engine(encoded.source, drafts_from=rounds),
    ):
        engine._constraint = lambda request: DeadEnd()
        run = tools.drive(engine, tools.request(1, PROMPT, 6))
        found.append([(event.tokens, event.finish_reason, event.error) for event in run.events[1]])
    assert found[0] == found[1] and found[0][-1][1:] == ("error", "the grammar: nothing may follow.")


def test_what_fp16_cannot_hold_is_counted(tools, encoded, device):
    weights = encoded.cuda(device)
    assert _overflows(tools, weights) == 0
    layer = weights.layers[0]
    matrix = torch.full((128, 160), 6e4, dtype=torch.float16, device=device)
    loud = replace(layer, down=HalfWeight.of(matrix), post_norm=torch.full_like(layer.post_norm, 3e4))
    assert _overflows(tools, replace(weights, layers=[loud, *weights.layers[1:]])) > 0


def test_overflows_are_said_once(tools, encoded, capsys):
    executor = cuda_engine(encoded.cuda()).executor
    for total in (0, 3, 3, 2000, 2_000_000):
        executor._count(total)
    assert capsys.readouterr().err.count("did not fit fp16") == 2 and executor.overflows == 2_000_000


def test_a_count_of_32_bits_goes_on_where_the_cards_begins_anew_and_never_back(encoded):
    executor = cuda_engine(encoded.cuda()).executor
    progress = ProgressCounter(Region(bytearray(region_bytes())), 0)
    for card, total in (
        (2**31 - 5, 2**31 - 5),
        (-(2**31) + 10, 2**31 + 10),
        (-3, 2**32 - 3),
        (4, 2**32 + 4),
        (1, 2**32 + 4),
    ):
        executor._count(card)
        progress.tick(True, executor.overflows)
        assert executor.overflows == total == progress.overflows


def _overflows(tools, weights) -> int:
    engine = cuda_engine(weights, drafts=1)
    tools.drive(engine, tools.request(1, PROMPT, 3))
    return engine.overflows


def test_warming_leaves_no_trace(tools, encoded, device):
    ask, weights = tools.request(1, PROMPT, 10, sampling=wishes("cut")), encoded.cuda(device)
    answers = []
    for warm in (False, True):
        engine = cuda_engine(weights, drafts=2, lanes=2)
        if warm:
            engine.executor.warm(chunk=16)
        answers.append(tools.drive(engine, ask).tokens)
    assert answers[0] == answers[1]


def test_rounds_at_depth_can_be_measured(tools, encoded, device, monkeypatch):
    """The doors: pages filled with random keys and values, a few at a time, and acceptance by decree."""
    monkeypatch.setattr(executor_module, "PAGES_FILLED", 2)
    engine = cuda_engine(encoded.cuda(device), drafts=3, max_context=512)
    executor, ask = engine.executor, tools.request(1, [1] * 300, 100)
    engine.add(ask)
    engine.admit()
    (lane,) = engine.running
    with torch.inference_mode():
        engine._claims.grow(lane)
        executor.fill(lane, 300, 7)
        filled = [page for page in lane.pages if executor.state.kv[0].keys[page].any()]
        assert filled == lane.pages[:5] and all(
            (pool.values[filled] != 0).any(dim=(1, 2, 3)).all() for pool in executor.state.pools
        )
        executor.force(lane, 2)
        lane.read = 300
        lane.add([7])
        for _ in range(3):
            (outcome,) = executor.round([lane])
            assert outcome.fault is None and (outcome.proposed, outcome.accepted) == (3, 2)
            lane.add(outcome.tokens)
    assert lane.length == 309 and math.isfinite(float(executor.state.hidden.abs().max()))
