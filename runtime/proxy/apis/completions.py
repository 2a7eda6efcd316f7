"""`/v1/completions`: plain continuation of texts or of token ids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...messages import GenerateRequest, TokenLogprob
from ..answer import Answer, Plan, Update
from ..assembly import AnswerStyle, Content
from ..delivery import Event, deliver
from ..errors import ApiError, bad_request
from ..grammar import completion_grammar
from ..plan import ServePlan
from ..prompt import encode_prompt
from ..sampling import SamplingDefaults, answer_length, asked_length, build_sampling, for_choice, stop_ids, stop_strings
from ..schema import CompletionBody
from ..service import Service, Stamp
from ..tokenizer import TextTokenizer
from .chat import HEARTBEAT

PREFIX = "cmpl-"
_DEFAULT_LENGTH = 16  # as OpenAI's
_NO_IMAGES = "images go with messages, as to /v1/chat/completions"


class CompletionsApi:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        service = self._service
        body, stamp = await service.read(request, CompletionBody), service.stamp(request)
        service.hub.check_room(len(_listed(body.prompt)) * (body.n or 1))
        plan = await service.prepare(plan_completion, body, service.plan, service.defaults)
        answer = Answer(service.hub, service.plan.tokenizer, plan, stamp.names(PREFIX))
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        echoes = [one.prompt for one in plan.requests] if body.echo else None
        shape = CompletionShape(
            answer, stamp, service.plan.tokenizer, body.logprobs is not None, with_usage, body.logprobs or 0, echoes
        )
        return await deliver(request, answer, shape, bool(body.stream), {"X-Request-Id": stamp.name})


def plan_completion(body: CompletionBody, plan: ServePlan, defaults: SamplingDefaults) -> Plan:
    """The engine's requests and how to read their answers. Raises ApiError."""
    tokenizer = plan.tokenizer
    if body.best_of not in (None, 1):
        raise bad_request(f"best_of is {body.best_of}; this server gives every answer that it makes: use n", "best_of")
    if body.suffix:
        raise bad_request("suffix is not supported", "suffix")
    logprobs = 0 if body.logprobs is None else 1 + body.logprobs
    sampling = build_sampling(body, defaults, tokenizer, logprobs)
    grammar = completion_grammar(body, plan)
    prompts = _prompts(body.prompt, tokenizer, plan.max_context)
    for name, pad in ({} if plan.pictures is None else plan.pictures.pads).items():
        if any(pad in ids for ids in prompts):
            raise bad_request(f"prompt: {name} stands for a picture; {_NO_IMAGES}", "prompt")
    asked, param = asked_length(body, _DEFAULT_LENGTH)
    if asked == 0 and not body.echo:
        raise bad_request("max_tokens: 0 makes sense with echo only", "max_tokens")
    ends, ignore_eos = stop_ids(body, tokenizer), bool(body.ignore_eos)
    style = AnswerStyle(frozenset() if ignore_eos else frozenset(ends), stop_strings(body))
    echo_logprobs = bool(body.echo) and logprobs > 0
    if echo_logprobs and body.stream:
        raise bad_request("echo with logprobs cannot be streamed", "stream")
    lengths = [answer_length(len(ids), asked, plan.max_context, param) for ids in prompts]
    each = [(ids, length) for ids, length in zip(prompts, lengths, strict=True) for _ in range(body.n or 1)]
    requests = [
        GenerateRequest(0, ids, length, ends, ignore_eos, for_choice(sampling, number), echo_logprobs, grammar=grammar)
        for number, (ids, length) in enumerate(each)
    ]
    return Plan(requests, style, len(prompts))


def _prompts(prompt: str | list[Any], tokenizer: TextTokenizer, max_context: int) -> list[list[int]]:
    return [_prompt_ids(one, tokenizer, max_context) for one in _listed(prompt)]


def _listed(prompt: str | list[Any]) -> list[Any]:
    """The prompts of a body, one or several."""
    return [prompt] if isinstance(prompt, str) or not any(isinstance(entry, str | list) for entry in prompt) else prompt


def _prompt_ids(prompt: Any, tokenizer: TextTokenizer, max_context: int) -> list[int]:
    if isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt, max_context)
    if not isinstance(prompt, list):
        raise bad_request(f"prompt: {prompt!r} is neither a text nor a list of token ids", "prompt")
    for token in prompt:
        if isinstance(token, dict):
            raise bad_request(f"prompt: text or token ids, no parts; {_NO_IMAGES}", "prompt")
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < tokenizer.size:
            raise bad_request(f"prompt: {token!r} is not a token id below {tokenizer.size}", "prompt")
    return list(prompt)


@dataclass
class _Choice:
    """What a choice must remember: pieces for the body, and where its next token stands in the text."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    offset: int = 0


class CompletionShape:
    """One answer in the API's form. `best`: how many of the most likely tokens `logprobs` shows.

    `echoes` are the prompts' ids, one for each choice, where the client wants them in front.
    """

    def __init__(
        self,
        answer: Answer,
        stamp: Stamp,
        tokenizer: TextTokenizer,
        with_logprobs: bool,
        with_usage: bool,
        best: int,
        echoes: list[list[int]] | None,
    ) -> None:
        self._answer = answer
        self._stamp = stamp
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._best = best
        self._echoes = echoes
        self._choices = [_Choice() for _ in answer.readers]

    def opening(self) -> list[Event]:
        """The prompts, if they are echoed."""
        events = []
        for number, ids in enumerate(self._echoes or []):
            text = self._tokenizer.decode(ids)
            self._choices[number].offset = len(text)
            events.append(self._chunk(number, text, None))
        return events

    def events(self, choice: int, update: Update) -> list[Event]:
        text, events = _content(update), []
        if text or (self._with_logprobs and update.logprobs):
            logprobs = self._shape(self._choices[choice], update.logprobs) if self._with_logprobs else None
            events.append(self._chunk(choice, text, logprobs))
        if update.finish is not None:
            timings = self._answer.readers[choice].tally.timings()
            events.append(self._chunk(choice, "", None, update.finish, duovolt=timings))
        return events

    def closing(self) -> list[Event]:
        usage = {"choices": [], "usage": self._answer.usage().openai()}
        return [*([Event(self._head() | usage)] if self._with_usage else []), Event("[DONE]")]

    def failure(self, error: ApiError) -> Event:
        return Event(error.body())

    def heartbeat(self) -> bytes:
        return HEARTBEAT

    def collect(self, choice: int, update: Update) -> None:
        kept = self._choices[choice]
        kept.text.append(_content(update))
        kept.logprobs += update.logprobs
        kept.prompt_logprobs += update.prompt_logprobs

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(number, kept) for number, kept in enumerate(self._choices)]
        body = self._head() | {"choices": choices, "usage": self._answer.usage().openai()}
        return body | {"duovolt": self._answer.timings()}

    def _whole_choice(self, number: int, kept: _Choice) -> dict[str, Any]:
        """The first prompt token has no probability: nothing stands before it."""
        text, entries = "".join(kept.text), kept.logprobs
        if self._echoes is not None:
            ids = self._echoes[number]
            text = self._tokenizer.decode(ids) + text
            entries = [TokenLogprob(ids[0], math.nan, []), *kept.prompt_logprobs, *entries]
        logprobs = self._shape(kept, entries) if self._with_logprobs else None
        finish = self._answer.readers[number].finish
        return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _head(self) -> dict[str, Any]:
        stamp = self._stamp
        return {"id": PREFIX + stamp.name, "object": "text_completion", "created": stamp.created, "model": stamp.model}

    def _chunk(
        self, choice: int, text: str, logprobs: dict[str, Any] | None, finish: str | None = None, **more: Any
    ) -> Event:
        body = {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish}
        usage: dict[str, Any] = {"usage": None} if self._with_usage else {}
        return Event(self._head() | {"choices": [body]} | usage | more)

    def _shape(self, kept: _Choice, entries: list[TokenLogprob]) -> dict[str, Any]:
        texts = [self._tokenizer.decode([entry.token]) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(kept.offset)
            kept.offset += len(text)
        known = [not math.isnan(entry.logprob) for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob if have else None for entry, have in zip(entries, known, strict=True)],
            "top_logprobs": [self._top(entry) if have else None for entry, have in zip(entries, known, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """The most likely tokens by text, and the one that stands there; of those that read the same the likeliest."""
        found: dict[str, float] = {}
        for token, value in [*entry.top[: self._best], (entry.token, entry.logprob)]:
            found.setdefault(self._tokenizer.decode([token]), value)
        return found


def _content(update: Update) -> str:
    return "".join(piece.text for piece in update.delta.pieces if isinstance(piece, Content))
