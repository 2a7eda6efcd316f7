"""OpenAI's `/v1/responses`, its stateless core: items of reasoning, message and function call, whole or as events."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...messages import SamplingParams
from ..answer import Answer, Update
from ..assembly import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning
from ..delivery import Event, deliver
from ..errors import ApiError
from ..schema import ResponsesBody
from ..service import Service, Stamp
from ..tokenizer import TextTokenizer
from .chat import HEARTBEAT, plan_chat, shape_logprobs
from .responses_request import CHAT_NAMES, chat_of

PREFIX = "resp_"


class ResponsesApi:
    """The handler."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        service = self._service
        body, stamp = await service.read(request, ResponsesBody), service.stamp(request)
        service.hub.check_room()
        chat = chat_of(body)
        try:
            plan = await service.prepare(plan_chat, chat, service.plan, service.defaults)
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from error
        answer = Answer(service.hub, service.plan.tokenizer, plan, stamp.names(PREFIX))
        fixed = _echo(body, plan.requests[0].sampling)
        shape = ResponsesShape(answer, stamp, service.plan.tokenizer, fixed, bool(chat.logprobs))
        return await deliver(request, answer, shape, bool(body.stream), {"X-Request-Id": stamp.name})


def _echo(body: ResponsesBody, sampling: SamplingParams) -> dict[str, Any]:
    """The fields of a response that say what was asked."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "background": False,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "truncation": "disabled",
    }


class ResponsesShape:
    """One answer in the API's form: one output item after the other. Events are numbered over the whole stream.

    Log-probabilities stand with the message that their token belongs to; those of other tokens have no place.
    """

    def __init__(
        self, answer: Answer, stamp: Stamp, tokenizer: TextTokenizer, fixed: dict[str, Any], with_logprobs: bool
    ) -> None:
        self._answer = answer
        self._stamp = stamp
        self._tokenizer = tokenizer
        self._fixed = fixed
        self._with_logprobs = with_logprobs
        self._items: list[dict[str, Any]] = []
        self._open = False
        self._parts: list[str] = []
        self._coming: list[dict[str, Any]] = []  # entries of content tokens whose piece is yet to come
        self._waiting: list[dict[str, Any]] = []  # of tokens that have shown no text yet
        self._logprobs: list[dict[str, Any]] = []  # of the open message
        self._sequence = 0

    def opening(self) -> list[Event]:
        begun = self._response("in_progress")
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def events(self, choice: int, update: Update) -> list[Event]:
        if self._with_logprobs:
            shown = zip(update.logprobs, update.delta.in_content, strict=True)
            self._coming += shape_logprobs(self._tokenizer, [entry for entry, in_content in shown if in_content])
        events = [event for piece in update.delta.pieces for event in self._take(piece)]
        if update.finish is not None:
            events += self._stop("incomplete" if update.finish == "length" else "completed")
        return events

    def closing(self) -> list[Event]:
        status = self._status()
        return [self._event(f"response.{status}", response=self._response(status))]

    def failure(self, error: ApiError) -> Event:
        return self._event("error", code=error.code or error.kind, message=error.message, param=error.param)

    def heartbeat(self) -> bytes:
        return HEARTBEAT

    def collect(self, choice: int, update: Update) -> None:
        self.events(choice, update)

    def whole(self) -> dict[str, Any]:
        return self._response(self._status())

    def _status(self) -> str:
        return "incomplete" if self._answer.readers[0].finish == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        stamp, ended = self._stamp, status != "in_progress"
        usage = self._answer.usage()
        return {
            "id": PREFIX + stamp.name,
            "object": "response",
            "created_at": stamp.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": stamp.model,
            "output": list(self._items) if ended else [],
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            }
            if ended
            else None,
            **self._fixed,
            **({"duovolt": self._answer.timings()} if ended else {}),
        }

    def _take(self, piece: Piece) -> list[Event]:
        match piece:
            case Reasoning(text):
                started = self._switch("reasoning")
                return [*started, self._delta("response.reasoning_text.delta", text, content_index=0)]
            case Content(text, tokens):
                self._waiting += self._coming[:tokens]
                del self._coming[:tokens]
                if not text:
                    return []
                logprobs, self._waiting = self._waiting, []
                started = self._switch("message")
                self._logprobs += logprobs
                return [*started, self._delta("response.output_text.delta", text, content_index=0, logprobs=logprobs)]
            case CallStart(index, name):
                call = {"call_id": f"call_{self._stamp.name}_{index}", "name": name, "arguments": ""}
                return [*self._stop(), *self._start("function_call", call)]
            case CallArguments(text, _):
                return [self._delta("response.function_call_arguments.delta", text)]
            case CallEnd(_, whole, _):
                return self._stop("completed" if whole else "incomplete")

    def _switch(self, kind: str) -> list[Event]:
        """Events that make an item of this kind the open one."""
        if self._open and self._items[-1]["type"] == kind:
            return []
        return [*self._stop(), *self._start(kind, {})]

    def _start(self, kind: str, fields: dict[str, Any]) -> list[Event]:
        short = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        item: dict[str, Any] = {
            "id": f"{short}_{self._stamp.name}_{len(self._items)}",
            "type": kind,
            "status": "in_progress",
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item | fields)
        self._open, self._parts, self._logprobs = True, [], []
        events = [self._event("response.output_item.added", output_index=self._index, item=dict(self._items[-1]))]
        if kind != "function_call":
            events.append(self._item_event("response.content_part.added", content_index=0, part=self._part()))
        return events

    def _delta(self, kind: str, text: str, **fields: Any) -> Event:
        self._parts.append(text)
        return self._item_event(kind, delta=text, **fields)

    def _stop(self, status: str = "completed") -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item, text = self._items[-1], "".join(self._parts)
        if item["type"] == "message":
            self._logprobs += self._waiting
        self._waiting = []
        events = []
        if item["type"] == "function_call":
            item["arguments"] = text
            events.append(self._item_event("response.function_call_arguments.done", arguments=text, name=item["name"]))
        else:
            item["content"] = [self._part()]
            if item["type"] == "message":
                done = {"text": text, "logprobs": list(self._logprobs)}
                events.append(self._item_event("response.output_text.done", content_index=0, **done))
            else:
                events.append(self._item_event("response.reasoning_text.done", content_index=0, text=text))
            events.append(self._item_event("response.content_part.done", content_index=0, part=item["content"][0]))
        item["status"] = status
        events.append(self._event("response.output_item.done", output_index=self._index, item=dict(item)))
        return events

    def _part(self) -> dict[str, Any]:
        text = "".join(self._parts)
        if self._items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _item_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=self._index, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = Event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
        self._sequence += 1
        return event
