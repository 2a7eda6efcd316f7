"""The scheduler of one rank: admits requests to lanes, and does one prefill chunk or one decode round a step.

Every decision follows from the messages and their order alone, so ranks that receive the same messages before the same
steps do the same work and produce the same records.
"""

from collections import deque
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint.errors import InputError
from ..grammar import GrammarFault
from ..messages import GenerateRequest, StepRecord, TokenEvent, TokenLogprob
from ..parallel.base import Collective
from .admission import answer_limit, fault_of_request
from .cache import Cache
from .constraint import Constraint
from .drafting import make_drafts
from .lane import Lane
from .model import Batch, Model, Segment
from .records import step_record
from .speculation import MAX_DRAFTS, Draft, judge

PREFILL_CHUNK = 512


class Engine:
    """Answers for up to `lanes` requests at a time; further ones wait in the order of `add`.

    max_context   tokens of prompt and answer together
    drafts        MTP drafts a round, 0 .. 5
    n_sampleable  ids 0 .. n_sampleable - 1 may be drawn; later rows of the head are padding
    pages         pages of the pools; None: enough for every lane at full context
    tokenizer     the tokenizer's file, without which requests with a grammar are refused
    drafts_from   instead of the MTP layer's drafts: those of each round of an answer, none after the last
    """

    def __init__(
        self,
        model: Model,
        collective: Collective,
        *,
        max_context: int,
        lanes: int,
        drafts: int,
        n_sampleable: int,
        prefill_chunk: int = PREFILL_CHUNK,
        pages: int | None = None,
        drafts_from: list[list[int]] | None = None,
        tokenizer: Path | None = None,
    ) -> None:
        weights = model.weights
        vocabulary = weights.config.text.vocab_size
        _check_settings(max_context, lanes, drafts, n_sampleable, prefill_chunk, vocabulary)
        if (collective.size, collective.rank) != (weights.tp_size, weights.tp_rank):
            raise InputError(
                f"the weights are those of rank {weights.tp_rank} of {weights.tp_size}, this process is rank "
                f"{collective.rank} of {collective.size}. Start each rank with its own directory."
            )
        if drafts and weights.mtp is None and drafts_from is None:
            raise InputError(f"{drafts} drafts a round asked for, but the model has no MTP layer. Use 0 drafts.")
        if drafts_from is not None:
            _check_forced(drafts_from, n_sampleable)
        self.model = model
        self.cache = Cache(weights, lanes=lanes, max_context=max_context, pages=pages)
        self.max_context = max_context
        self.drafts = drafts
        self.n_sampleable = n_sampleable
        self._chunk = prefill_chunk
        self._forced = drafts_from
        self._tokenizer = tokenizer
        self._waiting: deque[GenerateRequest] = deque()
        self._lanes: list[Lane | None] = [None] * lanes
        self._order: list[Lane] = []  # lanes in the order of admission
        self._prefilled_last = False
        self._events: list[TokenEvent] = []

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. A request that cannot be served ends with an "error" event of the next step."""
        alive = [r.request_id for r in self._waiting] + [lane.request.request_id for lane in self._order]
        fault = fault_of_request(request, self.max_context, self.n_sampleable, self.cache.pages)
        if request.request_id in alive:
            fault = f"request {request.request_id} is already being answered."
        if fault:
            self._finish_event(request, "error", fault)
        else:
            self._waiting.append(request)

    def cancel(self, request_id: int) -> None:
        """End a request, waiting or running, with a "cancelled" event of the next step; unknown ids are ignored."""
        for request in [r for r in self._waiting if r.request_id == request_id]:
            self._waiting.remove(request)
            self._finish_event(request, "cancelled")
        for lane in [x for x in self._order if x.request.request_id == request_id]:
            self._release(lane)
            self._finish_event(lane.request, "cancelled")

    def admit(self) -> list[TokenEvent]:
        """Give free lanes to waiting requests at once; the events that say so, and those that no step has given yet."""
        self._admit()
        events, self._events = self._events, []
        return events

    def has_work(self) -> bool:
        """True if a step would do anything."""
        return bool(self._waiting or self._order or self._events)

    @torch.inference_mode()
    def step(self) -> tuple[StepRecord, list[TokenEvent]]:
        """Admit what fits, then do one prefill chunk or one decode round; they alternate while both have work."""
        self._admit()
        prefilling = [lane for lane in self._order if lane.prefilling]
        decoding = [lane for lane in self._order if not lane.prefilling]
        kind = "idle"
        if prefilling and not (decoding and self._prefilled_last):
            kind = "prefill"
            self._prefill(prefilling[0])
        elif decoding:
            kind = "round"
            self._round(decoding)
        self._prefilled_last = kind == "prefill"
        self._admit()  # lanes that have just come free
        events, self._events = self._events, []
        return step_record(kind, events, self.cache, len(self._waiting)), events

    def _admit(self) -> None:
        for index, taken in enumerate(self._lanes):
            if taken is not None or not self._waiting:
                continue
            request = self._waiting[0]
            limit = answer_limit(request, self.max_context)
            if not self.cache.claim(index, len(request.prompt) + limit):
                return  # first come, first served: later and smaller requests wait behind it
            self._waiting.popleft()
            try:
                constraint = self._constraint(request)
            except GrammarFault as error:
                self.cache.release(index)
                self._finish_event(request, "error", f"the grammar: {error}")
                continue
            lane = Lane(index, request, limit, self.n_sampleable, constraint)
            self._lanes[index] = lane
            self._order.append(lane)
            self._events.append(TokenEvent(request.request_id, [], [], None, 0, 0, len(request.prompt), admitted=True))

    def _constraint(self, request: GenerateRequest) -> Constraint | None:
        if request.grammar is None:
            return None
        if self._tokenizer is None:
            raise GrammarFault("this engine has no tokenizer to read it with.")
        return Constraint(request.grammar, self._tokenizer, self.n_sampleable)

    def _release(self, lane: Lane) -> None:
        self.cache.release(lane.index)
        self._lanes[lane.index] = None
        self._order.remove(lane)

    def _prefill(self, lane: Lane) -> None:
        start, prompt = lane.read, lane.request.prompt
        count = min(self._chunk, len(prompt) - start)
        segment = Segment(lane.index, start, count)
        batch = Batch(torch.tensor(prompt[start : start + count]), [segment], lane.rope(start, count), by_rows=False)
        hidden = self.model.forward(batch, self.cache)
        lane.read += count
        self.cache.lengths[lane.index] = lane.read
        known = min(lane.read, len(prompt) - 1) - start  # tokens of the chunk whose successor is in the prompt
        if self._uses_mtp and known:
            segment = Segment(lane.index, start, known)
            after = torch.tensor(prompt[start + 1 : start + 1 + known])
            self.model.draft(
                Batch(after, [segment], lane.rope(start, known), by_rows=False), hidden[:known], self.cache
            )
            self.cache.mtp_lengths[lane.index] += known
        scores: list[TokenLogprob] = []
        if lane.request.echo_logprobs and known:
            rows = self._logits(hidden[:known], by_rows=False)
            after_ids = prompt[start + 1 : start + 1 + known]
            scores = [lane.sampler.logprob(row, token) for row, token in zip(rows, after_ids, strict=True)]
        if lane.prefilling:
            if scores:
                self._emit(lane, [], [], None, scores=scores)
            return
        if self._uses_mtp:
            lane.keep_hidden(hidden[-1:])
        if lane.remaining == 0:
            self._emit(lane, [], [], "length", scores=scores)
            return
        self._judge(lane, self._logits(hidden[-1:]), Draft([], []), scores=scores)

    def _round(self, lanes: list[Lane]) -> None:
        drafts = self._make_drafts(lanes)
        tokens: list[int] = []
        segments = []
        for lane, draft in zip(lanes, drafts, strict=True):
            tokens += [lane.tokens[-1], *draft.tokens]
            segments.append(Segment(lane.index, self.cache.lengths[lane.index], 1 + len(draft.tokens)))
        rope = torch.cat([lane.rope(s.start, s.count) for lane, s in zip(lanes, segments, strict=True)], dim=-1)
        batch = Batch(torch.tensor(tokens), segments, rope, by_rows=True)
        hidden = self.model.forward(batch, self.cache)
        logits = self._logits(hidden)
        for lane, draft, (_, rows) in zip(lanes, drafts, batch.parts(), strict=True):
            lane.rounds += 1
            self._judge(lane, logits[rows], draft, hidden=hidden[rows])

    def _make_drafts(self, lanes: list[Lane]) -> list[Draft]:
        if self._forced is not None:
            rounds = [self._forced[lane.rounds] if lane.rounds < len(self._forced) else [] for lane in lanes]
            return [Draft.forced(r[: lane.remaining - 1]) for lane, r in zip(lanes, rounds, strict=True)]
        counts = [min(self.drafts, lane.remaining - 1) for lane in lanes]
        return make_drafts(self.model, self.cache, lanes, counts, self.n_sampleable)

    def _judge(
        self,
        lane: Lane,
        logits: Tensor,
        draft: Draft,
        *,
        hidden: Tensor | None = None,
        scores: list[TokenLogprob] | None = None,
    ) -> None:
        """Choose the lane's next tokens from logits [1 + drafts, V]; `hidden`: a round's states, to be cut back."""
        if not bool(torch.isfinite(logits).all()):
            fault = f"the model's logits after token {len(lane.tokens) - 1} are not finite."
            self._release(lane)
            self._finish_event(lane.request, "error", fault)
            return
        try:
            verdict = judge(lane.sampler, logits, draft, len(lane.tokens))
        except GrammarFault as error:
            self._release(lane)
            self._finish_event(lane.request, "error", f"the grammar: {error}")
            return
        if hidden is not None:
            self.cache.commit(lane.index, verdict.accepted + 1)
            if self._uses_mtp:
                lane.keep_hidden(hidden[: verdict.accepted + 1])
        taken, reason = lane.add(verdict.tokens)
        entries: list[TokenLogprob] = []
        if lane.request.sampling.logprobs:
            entries = [lane.sampler.logprob(row, token) for row, token in zip(logits, taken, strict=False)]
        self._emit(lane, taken, entries, reason, len(draft.tokens), verdict.accepted, scores)

    @property
    def _uses_mtp(self) -> bool:
        return self.drafts > 0 and self._forced is None

    def _logits(self, hidden: Tensor, *, by_rows: bool = True) -> Tensor:
        return self.model.logits(hidden, by_rows=by_rows)[:, : self.n_sampleable]

    def _emit(
        self,
        lane: Lane,
        tokens: list[int],
        logprobs: list[TokenLogprob],
        reason: str | None,
        proposed: int = 0,
        accepted: int = 0,
        scores: list[TokenLogprob] | None = None,
    ) -> None:
        request = lane.request
        if reason:
            self._release(lane)
        self._events.append(
            TokenEvent(
                request.request_id, tokens, logprobs, reason, proposed, accepted, len(request.prompt), scores or []
            )
        )

    def _finish_event(self, request: GenerateRequest, reason: str, error: str = "") -> None:
        self._events.append(TokenEvent(request.request_id, [], [], reason, 0, 0, len(request.prompt), [], error))


def _check_settings(
    max_context: int, lanes: int, drafts: int, n_sampleable: int, prefill_chunk: int, vocabulary: int
) -> None:
    for name, value, least, most in (
        ("context", max_context, 2, 1 << 24),
        ("lanes", lanes, 1, 4),
        ("drafts", drafts, 0, MAX_DRAFTS),
        ("ids that may be drawn", n_sampleable, 1, vocabulary),
        ("prefill chunk", prefill_chunk, 1, 1 << 16),
    ):
        if not least <= value <= most:
            raise InputError(f"engine: {name} is {value}, expected {least} to {most}.")


def _check_forced(rounds: object, n_sampleable: int) -> None:
    """`rounds` may come straight from a file: it must be a list of lists of ids."""
    if not isinstance(rounds, list):
        raise InputError("forced drafts: expected a list of lists of token ids, one list a round.")
    for number, row in enumerate(rounds):
        if (
            not isinstance(row, list)
            or len(row) > MAX_DRAFTS
            or any(type(token) is not int or not 0 <= token < n_sampleable for token in row)
        ):
            raise InputError(
                f"forced drafts: round {number} is {str(row)[:60]}, expected at most {MAX_DRAFTS} token ids below "
                f"{n_sampleable}."
            )
