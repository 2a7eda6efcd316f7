"""The scheduler of one rank: admits requests to lanes, and does one prefill chunk or one decode round a step.

Every decision follows from the messages and their order alone, so ranks that receive the same messages before the same
steps do the same work and produce the same records. What computes is an executor.
"""

from collections import deque
from functools import cached_property
from pathlib import Path

import torch

from ..grammar import GrammarFault
from ..images.processor import ImageProcessor
from ..messages import GenerateRequest, StepRecord, TokenEvent, TokenLogprob
from .admission import answer_limit, check_forced, check_range, check_settings, fault_of_images, fault_of_request
from .chunks import chunk_end, next_prompt
from .claims import Claim, Claims
from .constraint import Constraint
from .content import Content
from .executor import Executor, Outcome
from .lane import Lane
from .pages import PagePool
from .prefix import INTERVAL, Prefix, PrefixCache
from .records import events_hash

PREFILL_CHUNK = 512


class _Waiting:
    """A request without a lane. Its content is looked at each time a lane comes free."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request

    @cached_property
    def content(self) -> Content:
        return Content(self.request)


class Engine:
    """Answers for up to `lanes` requests at a time; further ones wait in the order of `add`.

    executor      made for the same context, lanes and ids
    max_context   tokens of prompt and answer together
    n_sampleable  ids 0 .. n_sampleable - 1 may be drawn; later rows of the head are padding
    tokenizer     the tokenizer's file, without which requests with a grammar are refused
    processor     knows the sizes of pictures; `image_token` stands for them, `video_token` for frames of a video. None: such
                  requests are refused
    drafts_from   instead of the MTP layer's drafts: those of each round of an answer, none after the last
    prefix_bytes  memory for the states of prefixes kept for later prompts; less than one state's: none is kept
    prefix_interval  tokens between the states of a long prompt
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
        video_token: int | None = None,
        prefix_bytes: int = 0,
        prefix_interval: int = INTERVAL,
    ) -> None:
        check_settings(max_context, lanes)
        check_range("prefill chunk", prefill_chunk, 1, 1 << 16)
        check_range("prefix interval", prefix_interval, 1, 1 << 24)
        if drafts_from is not None:
            check_forced(drafts_from, n_sampleable)
        self.executor = executor
        self.max_context = max_context
        self.n_sampleable = n_sampleable
        self._chunk = prefill_chunk
        self._forced = drafts_from
        self._tokenizer = tokenizer
        self._processor, self._media_tokens = processor, (image_token, video_token)
        self._pool = PagePool(executor.pages)
        states = prefix_bytes // executor.state_bytes
        self.prefixes = PrefixCache(self._pool, executor, states, prefix_interval) if states else None
        self._claims = Claims(self._pool, self.prefixes)
        self._waiting: deque[_Waiting] = deque()
        self._lanes: list[Lane | None] = [None] * lanes
        self._order: list[Lane] = []  # lanes in the order of admission
        self._prefilled_last = False
        self._looking: Lane | None = None  # its pictures are half through, in memory that chunks of others need
        self._events: list[TokenEvent] = []
        self._unproved = False  # lanes were given out that no record has told of
        self._cached = 0  # tokens of their prompts that were found

    @property
    def facts(self) -> dict[str, str]:
        """The executor's, and how many prefixes are kept."""
        prefixes = "off" if self.prefixes is None else f"{self.prefixes.states}-states"
        return {**self.executor.facts, "prefix_cache": prefixes}

    @property
    def overflows(self) -> int:
        """Values so far that did not fit fp16 and were cut: this rank's share of them."""
        return self.executor.overflows

    @property
    def pages(self) -> int:
        """Pages of keys and values there are."""
        return self._pool.pages

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self._pool.free

    @property
    def idle_pages(self) -> int:
        """Pages that only kept prefixes hold."""
        return self._pool.idle

    @property
    def running(self) -> list[Lane]:
        """The lanes at work, in the order of admission."""
        return list(self._order)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. A request that cannot be served ends with an "error" event of the next step."""
        alive = [one.request.request_id for one in self._waiting] + [lane.request.request_id for lane in self._order]
        fault = fault_of_request(request, self.max_context, self.n_sampleable, self.pages)
        fault = fault or fault_of_images(request, self._processor, *self._media_tokens)
        if request.request_id in alive:
            fault = f"request {request.request_id} is already being answered."
        if fault:
            self._finish_event(request, "error", fault)
        else:
            self._waiting.append(_Waiting(request))

    def cancel(self, request_id: int) -> None:
        """End a request, waiting or running, with a "cancelled" event of the next step; unknown ids are ignored."""
        for waiting in [one for one in self._waiting if one.request.request_id == request_id]:
            self._waiting.remove(waiting)
            self._finish_event(waiting.request, "cancelled")
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
        """Admit what fits, then do one prefill chunk or one decode round; they alternate while both have work.

        With a prefix cache, an admission is a step of its own: the ranks agree on what they found before one of them
        reads on from there.
        """
        self._admit()
        if self._unproved and self.prefixes is not None:
            return self._record("admit")
        prefilling = [lane for lane in self._order if lane.prefilling]
        decoding = [lane for lane in self._order if not lane.prefilling]
        kind = "idle"
        if prefilling and not (decoding and self._prefilled_last):
            kind = "prefill"
            self._prefill(self._looking or next_prompt(prefilling))
        elif decoding:
            kind = "round"
            self._round(decoding)
        self._prefilled_last = kind == "prefill"
        self._admit()  # lanes that have just come free
        return self._record(kind)

    def _record(self, kind: str) -> tuple[StepRecord, list[TokenEvent]]:
        events, self._events = self._events, []
        cached, self._cached, self._unproved = self._cached, 0, False
        record = StepRecord(
            kind=kind,
            tokens_produced=sum(len(event.tokens) for event in events),
            token_hash=events_hash(events, self.executor.seen()),
            position=sum(lane.length for lane in self._order),
            free_pages=self.free_pages,
            pending=len(self._waiting),
            cached_tokens=cached,
            prefixes=0 if self.prefixes is None else len(self.prefixes),
            evicted=0 if self.prefixes is None else self.prefixes.evicted,
        )
        return record, events

    def _admit(self) -> None:
        for index, taken in enumerate(self._lanes):
            if taken is not None or not self._waiting:
                continue
            waiting = self._waiting[0]
            request = waiting.request
            limit = answer_limit(request, self.max_context)
            prompt = len(request.prompt)
            prefix = self._find(waiting)
            if self._better_soon(waiting, prefix):
                return
            claim = None
            if prefix is not None:  # it may yet have to make room itself, once the lane has what it needs of it
                claim = self._claims.claim(index, prompt, prompt + limit, prefix)
            if claim is None:  # the pages that a prefix would have to be copied from may be those that are needed
                prefix, claim = None, self._claims.claim(index, prompt, prompt + limit)
            if claim is None:
                return  # first come, first served: later and smaller requests wait behind it
            self._waiting.popleft()
            lane = Lane(index, request, limit, claim.pages, forced=self._forced)
            try:
                lane.constraint = self._constraint(request)
            except GrammarFault as error:
                self._claims.release(lane)
                self._finish_event(request, "error", f"the grammar: {error}")
                continue
            self._open(lane, claim, prefix, waiting.content)

    def _find(self, waiting: "_Waiting") -> Prefix | None:
        """What is kept of the request's prompt; nothing where all of it must be read for its scores."""
        if self.prefixes is None or waiting.request.echo_logprobs:
            return None
        prefix = self.prefixes.find(waiting.content, len(waiting.request.prompt))
        if prefix is not None:
            self.prefixes.use(prefix)
        return prefix

    def _better_soon(self, waiting: "_Waiting", prefix: Prefix | None) -> bool:
        """Whether most of the prompt will be kept when a lane has read the same."""
        if self.prefixes is None or waiting.request.echo_logprobs:
            return False
        reading = [lane for lane in self._order if lane.prefilling]
        found = 0 if prefix is None else prefix.length
        return self.prefixes.worth_waiting(waiting.content, len(waiting.request.prompt), found, reading)

    def _open(self, lane: Lane, claim: Claim, prefix: Prefix | None, content: Content) -> None:
        self.executor.open(lane)
        for source, target in claim.copies:
            self.executor.copy_page(source, target)
        if self.prefixes is not None:
            lane.content = content
        if prefix is not None and self.prefixes is not None:
            self.executor.load(lane, prefix.state)
            lane.prefixes.append(prefix.name)
            lane.read = prefix.length
        self._lanes[lane.index] = lane
        self._order.append(lane)
        self._unproved = True
        self._cached += lane.read
        request = lane.request
        admitted = TokenEvent(
            request.request_id, [], [], None, 0, 0, len(request.prompt), admitted=True, cached_tokens=lane.read
        )
        self._events.append(admitted)

    def _constraint(self, request: GenerateRequest) -> Constraint | None:
        if request.grammar is None:
            return None
        if self._tokenizer is None:
            raise GrammarFault("this engine has no tokenizer to read it with.")
        return Constraint(request.grammar, self._tokenizer, self.n_sampleable)

    def _release(self, lane: Lane) -> None:
        self.executor.close(lane)
        self._claims.release(lane)
        self._looking = None if self._looking is lane else self._looking
        self._lanes[lane.index] = None
        self._order.remove(lane)

    def _prefill(self, lane: Lane) -> None:
        start, length = lane.read, len(lane.request.prompt)
        scores: list[TokenLogprob] = []
        if start < length:
            interval = None if self.prefixes is None else self.prefixes.interval
            end = chunk_end(lane, self._chunk, interval)
            if not self.executor.look(lane, start, end - start):
                self._looking = lane
                return
            self._looking = None
            scores = self.executor.prefill(lane, start, end - start)
            lane.read = end
            if self.prefixes is not None and self.prefixes.wanted(lane):
                self.prefixes.keep(lane)
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
            if self.prefixes is not None:
                self.prefixes.distrust(lane)
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
            if self.prefixes is not None and lane.content is not None and lane.produced:
                lane.content.extend(lane.tokens[len(lane.content) :], lane.rope_delta)
                self.prefixes.keep(lane)
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
