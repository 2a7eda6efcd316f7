"""The executor of the torch reference: any device's oracle, eager, in float32."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...checkpoint.errors import InputError
from ..grammar import GrammarFault
from ..messages import TokenLogprob
from .admission import check_range, check_settings
from .answering import Answering
from .cache import Cache
from .drafting import make_drafts
from .executor import Outcome
from .lane import Lane
from .model import Batch, Model, Segment
from .pages import pages_for
from .speculation import MAX_DRAFTS, Draft, judge
from .vision import VisionTower, rows_hash


@dataclass(frozen=True)
class SavedState:
    """A lane's state after `length` tokens: what `Cache.recurrent` holds of it, and what the MTP layer has yet to read."""

    length: int
    recurrent: list[Tensor]
    hidden: Tensor
    mtp_length: int


class ReferenceExecutor:
    """Computes for `lanes` lanes at a time.

    drafts        MTP drafts a round, 0 .. 5
    n_sampleable  ids 0 .. n_sampleable - 1 may be drawn; later rows of the head are padding
    pages         pages of the pools; None: enough for every lane at full context
    tower         reads pictures
    """

    overflows = 0  # all is float32

    def __init__(
        self,
        model: Model,
        *,
        max_context: int,
        lanes: int,
        drafts: int,
        n_sampleable: int,
        pages: int | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        check_settings(max_context, lanes)
        check_range("drafts", drafts, 0, MAX_DRAFTS)
        check_range("ids that may be drawn", n_sampleable, 1, model.weights.config.text.vocab_size)
        if drafts and model.weights.mtp is None:
            raise InputError(f"{drafts} drafts a round asked for, but the model has no MTP layer. Use 0 drafts.")
        self.model = model
        self.cache = Cache(model.weights, lanes=lanes, pages=lanes * pages_for(max_context) if pages is None else pages)
        self.answers: dict[int, Answering] = {}
        self._drafts = drafts
        self._n_sampleable = n_sampleable
        self._tower = tower
        self._seen = b""
        kept = self.cache.recurrent.of_lane(0)
        self.state_bytes = sum(tensor.nbytes for tensor in kept) + 4 * model.weights.config.text.hidden_size

    @property
    def pages(self) -> int:
        return self.cache.pages

    @property
    def facts(self) -> dict[str, str]:
        rows = self.model.draft_rows
        return {
            "kv": "float32",
            "kv_pages": str(self.pages),
            "attention": "plain",
            "head_split": "off" if self.model.shared_head else "none",
            "draft_head": f"{rows}-rows" if rows else "full",
            "draft_window": "off",
            "plain_weights": "off",
            "graphs": "off",
        }

    def open(self, lane: Lane) -> None:
        self.answers[lane.index] = Answering(lane, self._n_sampleable, self._tower)
        self.cache.open(lane.index, lane.pages)

    def grow(self, lane: Lane) -> None:
        self.cache.set_pages(lane.index, lane.pages)

    def close(self, lane: Lane) -> None:
        del self.answers[lane.index]
        self.cache.close(lane.index)

    def look(self, lane: Lane, start: int, count: int) -> bool:
        return self.answers[lane.index].images.look(start, count)

    def prefill(self, lane: Lane, start: int, count: int) -> list[TokenLogprob]:
        answer, prompt = self.answers[lane.index], lane.request.prompt
        assert self.cache.lengths[lane.index] == start, "a prompt is read in order"
        images = answer.images.rows(start, count)
        self._seen += rows_hash(images)
        tokens = torch.tensor(prompt[start : start + count])
        batch = Batch(
            tokens, [Segment(lane.index, start, count)], lane.rope(start, count), by_rows=False, images=images
        )
        hidden = self.model.forward(batch, self.cache)
        self.cache.lengths[lane.index] = start + count
        answer.keep_hidden(hidden)
        if self._uses_mtp(lane):
            self._follow(answer, by_rows=False)
        answer.hidden = hidden[-1:]
        answer.images.release(start + count)
        if not lane.request.echo_logprobs:
            return []
        after = prompt[start + 1 : start + 1 + count]  # one less than rows at the prompt's end
        if not after:  # the prompt's last token alone: nothing to score, and no rows for ranks to gather
            return []
        rows = self._logits(hidden[: len(after)], by_rows=False)
        return [answer.sampler.logprob(row, token) for row, token in zip(rows, after, strict=True)]

    def _follow(self, answer: Answering, by_rows: bool) -> None:
        """Let the MTP layer read all that the target has passed but the last token, whose successor may yet be another."""
        lane, hidden = answer.lane, answer.hidden
        assert hidden is not None
        start, count = self.cache.mtp_lengths[lane.index], len(hidden) - 1
        if count:
            after = torch.tensor(lane.tokens[start + 1 : start + 1 + count])
            images = answer.images.rows(start + 1, count)
            segment = Segment(lane.index, start, count)
            batch = Batch(after, [segment], lane.rope(start, count), by_rows, images)
            self.model.draft(batch, hidden[:-1], self.cache)
            self.cache.mtp_lengths[lane.index] += count
        answer.hidden = hidden[-1:]

    def first(self, lane: Lane) -> Outcome:
        answer = self.answers[lane.index]
        assert answer.hidden is not None
        return self._judge(answer, self._logits(answer.hidden[-1:]), Draft([], []))

    def round(self, lanes: list[Lane]) -> list[Outcome]:
        answers = [self.answers[lane.index] for lane in lanes]
        drafts = self._make_drafts(answers)
        tokens: list[int] = []
        segments = []
        for lane, draft in zip(lanes, drafts, strict=True):
            tokens += [lane.tokens[-1], *draft.tokens]
            segments.append(Segment(lane.index, self.cache.lengths[lane.index], 1 + len(draft.tokens)))
        rope = torch.cat([lane.rope(s.start, s.count) for lane, s in zip(lanes, segments, strict=True)], dim=-1)
        batch = Batch(torch.tensor(tokens), segments, rope, by_rows=True)
        hidden = self.model.forward(batch, self.cache)
        logits = self._logits(hidden)
        outcomes = []
        for answer, draft, (segment, rows) in zip(answers, drafts, batch.parts(), strict=True):
            outcome = self._judge(answer, logits[rows], draft)
            if outcome.fault is None:
                kept = len(outcome.tokens)
                self.cache.commit(segment.lane, kept)
                if not self._uses_mtp(answer.lane):
                    answer.hidden = None
                answer.keep_hidden(hidden[rows][:kept])
            outcomes.append(outcome)
        return outcomes

    def _make_drafts(self, answers: list[Answering]) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        guessing = []
        for answer in answers:
            given = answer.lane.forced_drafts()
            if given is None:
                guessing.append(answer)
            else:
                drafts[answer.lane.index] = Draft.forced(given)
        counts = [min(self._drafts, answer.lane.remaining - 1) for answer in guessing]
        made = make_drafts(self.model, self.cache, guessing, counts, self._n_sampleable)
        drafts |= {answer.lane.index: draft for answer, draft in zip(guessing, made, strict=True)}
        return [drafts[answer.lane.index] for answer in answers]

    def _judge(self, answer: Answering, logits: Tensor, draft: Draft) -> Outcome:
        """Choose the lane's next tokens from logits [1 + drafts, V], up to the answer's end."""
        lane = answer.lane
        if not bool(torch.isfinite(logits).all()):
            return Outcome([], fault=f"the model's logits after token {len(lane.tokens) - 1} are not finite.")
        try:
            verdict = judge(answer.sampler, logits, draft, len(lane.tokens))
        except GrammarFault as error:
            return Outcome([], fault=f"the grammar: {error}")
        tokens, _ = lane.cut(verdict.tokens)
        for token in tokens:
            answer.sampler.accept(token)
        entries: list[TokenLogprob] = []
        if lane.request.sampling.logprobs:
            entries = [answer.sampler.logprob(row, token) for row, token in zip(logits, tokens, strict=False)]
        return Outcome(tokens, len(draft.tokens), verdict.accepted, entries)

    def save(self, lane: Lane) -> SavedState | None:
        answer = self.answers[lane.index]
        assert self.cache.lengths[lane.index] == lane.length and answer.hidden is not None
        if self._uses_mtp(lane):
            self._follow(answer, by_rows=lane.produced > 0)
        kept = [tensor.clone() for tensor in self.cache.recurrent.of_lane(lane.index)]
        return SavedState(lane.length, kept, answer.hidden.clone(), self.cache.mtp_lengths[lane.index])

    def load(self, lane: Lane, state: object) -> None:
        assert isinstance(state, SavedState)
        answer = self.answers[lane.index]
        for tensor, kept in zip(self.cache.recurrent.of_lane(lane.index), state.recurrent, strict=True):
            tensor.copy_(kept)
        answer.hidden = state.hidden
        answer.images.release(state.length)
        self.cache.lengths[lane.index] = state.length
        self.cache.mtp_lengths[lane.index] = state.mtp_length

    def copy_page(self, source: int, target: int) -> None:
        self.cache.copy_page(source, target)

    def seen(self) -> bytes:
        seen, self._seen = self._seen, b""
        return seen

    def _uses_mtp(self, lane: Lane) -> bool:
        return self._drafts > 0 and lane.forced is None

    def _logits(self, hidden: Tensor, *, by_rows: bool = True) -> Tensor:
        return self.model.logits(hidden, by_rows=by_rows)[:, : self._n_sampleable]
