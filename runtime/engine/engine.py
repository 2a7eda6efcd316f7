"""The scheduler of one rank: admits requests to lanes, and does one prefill chunk or one decode round a step.

Every decision follows from the messages and their order alone, so ranks that receive the same messages before the same
steps do the same work and produce the same records. What computes is an executor.
"""

from collections import deque
from pathlib import Path

import torch

from ..grammar import GrammarFault
from ..images.processor import ImageProcessor
from ..messages import GenerateRequest, StepRecord, TokenEvent, TokenLogprob
from .admission import answer_limit, check_forced, check_range, check_settings, fault_of_images, fault_of_request
from .claims import Claims
from .constraint import Constraint
from .executor import Executor, Outcome
from .lane import Lane
from .pages import PagePool
from .records import step_record

PREFILL_CHUNK = 512


class Engine:
    """Answers for up to `lanes` requests at a time; further ones wait in the order of `add`.

    executor      made for the same context, lanes and ids
    max_context   tokens of prompt and answer together
    n_sampleable  ids 0 .. n_sampleable - 1 may be drawn; later rows of the head are padding
    tokenizer     the tokenizer's file, without which requests with a grammar are refused
    processor     knows the sizes of pictures, and `image_token` stands for them; None: such requests are refused
    drafts_from   instead of the MTP layer's drafts: those of each round of an answer, none after the last
    """

    def __init__(
        self,
        executor: Executor,
        *,
        max_context: int,
        lanes: int,
        n_sampleable: int,
        prefill_chunk: int = PREFILL_CHUNK,
        drafts_from: list[list[int]] | None = None,
        tokenizer: Path | None = None,
        processor: ImageProcessor | None = None,
        image_token: int | None = None,
    ) -> None:
        check_settings(max_context, lanes)
        check_range("prefill chunk", prefill_chunk, 1, 1 << 16)
        if drafts_from is not None:
            check_forced(drafts_from, n_sampleable)
        self.executor = executor
        self.max_context = max_context
        self.n_sampleable = n_sampleable
        self._chunk = prefill_chunk
        self._forced = drafts_from
        self._tokenizer = tokenizer
        self._processor, self._image_token = processor, image_token
        self._pool = PagePool(executor.pages)
        self._claims = Claims(self._pool)
        self._waiting: deque[GenerateRequest] = deque()
        self._lanes: list[Lane | None] = [None] * lanes
        self._order: list[Lane] = []  # lanes in the order of admission
        self._prefilled_last = False
        self._events: list[TokenEvent] = []

    @property
    def pages(self) -> int:
        """Pages of keys and values there are."""
        return self._pool.pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._pool.free

    @property
    def running(self) -> list[Lane]:
        """The lanes at work, in the order of admission."""
        return list(self._order)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. A request that cannot be served ends with an "error" event of the next step."""
        alive = [r.request_id for r in self._waiting] + [lane.request.request_id for lane in self._order]
        fault = fault_of_request(request, self.max_context, self.n_sampleable, self.pages)
        fault = fault or fault_of_images(request, self._processor, self._image_token)
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

    @torch.inference_mode()
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
        record = step_record(kind, events, self._order, self.free_pages, len(self._waiting), self.executor.seen())
        return record, events

    def _admit(self) -> None:
        for index, taken in enumerate(self._lanes):
            if taken is not None or not self._waiting:
                continue
            request = self._waiting[0]
            limit = answer_limit(request, self.max_context)
            pages = self._claims.claim(index, len(request.prompt), len(request.prompt) + limit)
            if pages is None:
                return  # first come, first served: later and smaller requests wait behind it
            self._waiting.popleft()
            lane = Lane(index, request, limit, pages, forced=self._forced)
            try:
                lane.constraint = self._constraint(request)
            except GrammarFault as error:
                self._claims.release(lane)
                self._finish_event(request, "error", f"the grammar: {error}")
                continue
            self.executor.open(lane)
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
        self.executor.close(lane)
        self._claims.release(lane)
        self._lanes[lane.index] = None
        self._order.remove(lane)

    def _prefill(self, lane: Lane) -> None:
        start, length = lane.read, len(lane.request.prompt)
        count = min(self._chunk, length - start)
        scores = self.executor.prefill(lane, start, count)
        lane.read += count
        if lane.read < length:
            if scores:
                self._emit(lane, Outcome([]), [], None, scores)
        elif lane.remaining == 0:
            self._emit(lane, Outcome([]), [], "length", scores)
        else:
            self._take(lane, self.executor.first(lane), scores)

    def _round(self, lanes: list[Lane]) -> None:
        for lane in lanes:
            if self._claims.grow(lane):
                self.executor.grow(lane)
        for lane, outcome in zip(lanes, self.executor.round(lanes), strict=True):
            lane.rounds += 1
            self._take(lane, outcome)

    def _take(self, lane: Lane, outcome: Outcome, scores: list[TokenLogprob] | None = None) -> None:
        if outcome.fault is not None:
            self._release(lane)
            self._finish_event(lane.request, "error", outcome.fault)
            return
        taken, reason = lane.add(outcome.tokens)
        self._emit(lane, outcome, taken, reason, scores)

    def _emit(
        self,
        lane: Lane,
        outcome: Outcome,
        taken: list[int],
        reason: str | None,
        scores: list[TokenLogprob] | None = None,
    ) -> None:
        request = lane.request
        if reason:
            self._release(lane)
        self._events.append(
            TokenEvent(
                request.request_id,
                taken,
                outcome.logprobs[: len(taken)],
                reason,
                outcome.proposed,
                outcome.accepted,
                len(request.prompt),
                scores or [],
            )
        )

    def _finish_event(self, request: GenerateRequest, reason: str, error: str = "") -> None:
        self._events.append(TokenEvent(request.request_id, [], [], reason, 0, 0, len(request.prompt), [], error))
