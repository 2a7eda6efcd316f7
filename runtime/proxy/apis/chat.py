"""`/v1/chat/completions`: the body of an answer, whole or as a stream of chunks, from the same pieces."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...messages import GenerateRequest, TokenLogprob
from ..answer import Answer, Plan, Update
from ..assembly import AnswerStyle, CallArguments, CallStart, Content, Piece, Reasoning
from ..delivery import Event, deliver
from ..errors import ApiError, bad_request
from ..grammar import chat_grammar
from ..pictures import place_pictures, show
from ..plan import ServePlan
from ..prompt import encode_prompt
from ..sampling import SamplingDefaults, answer_length, asked_length, build_sampling, for_choice, stop_ids, stop_strings
from ..schema import ChatBody
from ..service import Service, Stamp
from ..shared_turns import token_ends
from ..tokenizer import TextTokenizer
from .chat_request import build_chat_prompt

PREFIX = "chatcmpl-"
HEARTBEAT = b": still working\n\n"  # a comment, which clients of event streams skip


class ChatApi:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        service = self._service
        body, stamp = await service.read(request, ChatBody), service.stamp(request)
        service.hub.check_room(body.n or 1)
        plan = await service.prepare(plan_chat, body, service.plan, service.defaults)
        answer = Answer(service.hub, service.plan.tokenizer, plan, stamp.names(PREFIX))
        with_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        shape = ChatShape(answer, stamp, service.plan.tokenizer, bool(body.logprobs), with_usage)
        return await deliver(request, answer, shape, bool(body.stream), {"X-Request-Id": stamp.name})


def plan_chat(body: ChatBody, plan: ServePlan, defaults: SamplingDefaults) -> Plan:
    """The engine's requests and how to read their answers. Raises ApiError."""
    tokenizer = plan.tokenizer
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs has no effect without logprobs: true", "top_logprobs")
    logprobs = 1 + (body.top_logprobs or 0) if body.logprobs else 0
    sampling = build_sampling(body, defaults, tokenizer, logprobs)
    stops, ends, ignore_eos = stop_strings(body), stop_ids(body, tokenizer), bool(body.ignore_eos)
    prompt = build_chat_prompt(body, plan.template, plan.pictures)
    grammar = chat_grammar(body, prompt.tools, prompt.thinking, plan)
    shown = show(prompt.text, prompt.media, plan.pictures, plan.max_context, body.n or 1, prompt.shared)
    ids = encode_prompt(tokenizer, shown.text, plan.max_context)
    shared = token_ends(tokenizer, shown.text, ids, shown.ends)
    placed = place_pictures(ids, shown, plan.pictures, plan.max_context, body.n or 1)
    asked, param = asked_length(body)
    if asked == 0:
        raise bad_request(f"{param}: Expected `int` >= 1, or -1 for as many as fit", param)
    length = answer_length(len(placed.ids), asked, plan.max_context, param)
    style = AnswerStyle(
        frozenset() if ignore_eos else frozenset(ends),
        stops,
        split=True,
        thinking=prompt.thinking,
        tools=prompt.tools,
        one_call=body.parallel_tool_calls is False,
    )
    requests = [
        GenerateRequest(
            0,
            placed.ids,
            length,
            ends,
            ignore_eos,
            for_choice(sampling, number),
            rope_positions=placed.rope_positions,
            grammar=grammar,
            images=placed.images,
            checkpoints=[placed.index(count) for count in shared],
        )
        for number in range(body.n or 1)
    ]
    return Plan(requests, style)


class ChatShape:
    """One answer in the API's form; keeps what a chunk must remember of the chunks before it."""

    def __init__(
        self, answer: Answer, stamp: Stamp, tokenizer: TextTokenizer, with_logprobs: bool, with_usage: bool
    ) -> None:
        self._answer = answer
        self._stamp = stamp
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._messages = [_Message() for _ in answer.readers]

    def opening(self) -> list[Event]:
        first = {"role": "assistant", "content": ""}
        return [self._chunk(number, first) for number in range(len(self._answer.readers))]

    def events(self, choice: int, update: Update) -> list[Event]:
        logprobs = self._shape_logprobs(update.logprobs)
        deltas = [delta for piece in update.delta.pieces if (delta := self._shape_piece(choice, piece))]
        if not deltas and logprobs:
            deltas = [{"content": ""}]
        events = [self._chunk(choice, delta, logprobs if not number else []) for number, delta in enumerate(deltas)]
        if update.finish is not None:
            timings = self._answer.readers[choice].tally.timings()
            events.append(self._chunk(choice, {}, finish=update.finish, duovolt=timings))
        return events

    def closing(self) -> list[Event]:
        usage = {"choices": [], "usage": self._answer.usage().openai()}
        last = [Event(self._head("chat.completion.chunk") | usage)] if self._with_usage else []
        return [*last, Event("[DONE]")]

    def failure(self, error: ApiError) -> Event:
        return Event(error.body())

    def heartbeat(self) -> bytes:
        return HEARTBEAT

    def collect(self, choice: int, update: Update) -> None:
        message = self._messages[choice]
        for piece in update.delta.pieces:
            message.take(piece, self._call_id(choice, len(message.calls)))
        message.logprobs += self._shape_logprobs(update.logprobs)

    def whole(self) -> dict[str, Any]:
        choices = [
            {
                "index": number,
                "message": message.body(),
                "logprobs": {"content": message.logprobs} if self._with_logprobs else None,
                "finish_reason": reader.finish,
            }
            for number, (message, reader) in enumerate(zip(self._messages, self._answer.readers, strict=True))
        ]
        body = self._head("chat.completion") | {"choices": choices, "usage": self._answer.usage().openai()}
        return body | {"duovolt": self._answer.timings()}

    def _head(self, kind: str) -> dict[str, Any]:
        stamp = self._stamp
        return {"id": PREFIX + stamp.name, "object": kind, "created": stamp.created, "model": stamp.model}

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        logprobs: list[dict[str, Any]] | None = None,
        finish: str | None = None,
        **more: Any,
    ) -> Event:
        body = {
            "index": choice,
            "delta": delta,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": finish,
        }
        usage: dict[str, Any] = {"usage": None} if self._with_usage else {}
        return Event(self._head("chat.completion.chunk") | {"choices": [body]} | usage | more)

    def _shape_piece(self, choice: int, piece: Piece) -> dict[str, Any] | None:
        match piece:
            case Reasoning(text):
                return {"reasoning_content": text}
            case Content(text):
                return {"content": text} if text else None
            case CallStart(index, name):
                call = {"index": index, **_call(self._call_id(choice, index), name, "")}
                return {"tool_calls": [call]}
            case CallArguments(text, index):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        return None  # the end of a call shows by what follows

    def _call_id(self, choice: int, index: int) -> str:
        return f"call_{self._stamp.name}_{choice}_{index}"

    def _shape_logprobs(self, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        return shape_logprobs(self._tokenizer, logprobs) if self._with_logprobs else []


def shape_logprobs(tokenizer: TextTokenizer, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    """Entries of tokens as the OpenAI APIs have them."""

    def token(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}

    return [
        token(entry.token, entry.logprob) | {"top_logprobs": [token(best, value) for best, value in entry.top]}
        for entry in logprobs
    ]


class _Message:
    """The message of one choice, put together."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []

    def take(self, piece: Piece, call_id: str) -> None:
        match piece:
            case Reasoning(text):
                self._reasoning.append(text)
            case Content(text):
                self._content.append(text)
            case CallStart(_, name):
                self.calls.append(_call(call_id, name, ""))
            case CallArguments(text, index):
                self.calls[index]["function"]["arguments"] += text

    def body(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self.calls:
            message["content"] = content or None
            message["tool_calls"] = self.calls
        return message


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
