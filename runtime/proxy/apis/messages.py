"""Anthropic's `/v1/messages` and `count_tokens`: blocks of thinking, text and tool use, whole or as events."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..answer import Answer, Update
from ..assembly import CallArguments, CallEnd, CallStart, Content, Piece, Reasoning
from ..delivery import Event, deliver
from ..errors import ApiError
from ..pictures import encode_with_pictures
from ..plan import ServePlan
from ..schema import CountTokensBody, MessagesBody
from ..service import Service, Stamp
from .chat import plan_chat
from .chat_request import build_chat_prompt
from .messages_request import CHAT_NAMES, chat_of

PREFIX = "msg_"
_PING = Event({"type": "ping"}, "ping")


class MessagesApi:
    """The handlers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        service = self._service
        body, stamp = await service.read(request, MessagesBody), service.stamp(request)
        service.hub.check_room()
        try:
            plan = await service.prepare(plan_chat, chat_of(body), service.plan, service.defaults)
        except ApiError as error:
            raise error.renamed(CHAT_NAMES) from error
        answer = Answer(service.hub, service.plan.tokenizer, plan, stamp.names(PREFIX))
        headers = {"request-id": stamp.name, "X-Request-Id": stamp.name}
        return await deliver(request, answer, MessagesShape(answer, stamp), bool(body.stream), headers)

    async def count_tokens(self, request: Request) -> Response:
        body = await self._service.read(request, CountTokensBody)
        return JSONResponse({"input_tokens": await self._service.prepare(_count, body, self._service.plan)})


def _count(body: CountTokensBody, plan: ServePlan) -> int:
    prompt = build_chat_prompt(chat_of(body), plan.template, plan.pictures)
    placed = encode_with_pictures(prompt.text, prompt.media, plan.pictures, plan.tokenizer, plan.max_context)
    return len(placed.ids)


@dataclass
class _Block:
    """A block of the answer; `parts` are the pieces of its text or of its input's JSON."""

    kind: str
    head: dict[str, Any]
    parts: list[str] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def signature(self) -> str:
        """Opaque to clients, who send it back; nothing here depends on it."""
        return base64.b64encode(hashlib.sha256(self.text.encode()).digest()).decode()

    def empty(self) -> dict[str, Any]:
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "text":
                return {"type": "text", "text": ""}
        return self.head | {"input": {}}

    def whole(self) -> dict[str, Any]:
        match self.kind:
            case "thinking":
                return {"type": "thinking", "thinking": self.text, "signature": self.signature}
            case "text":
                return {"type": "text", "text": self.text}
        return self.head | {"input": self.known}


class MessagesShape:
    """One answer in the API's form: one block after the other, each started, added to, and stopped."""

    def __init__(self, answer: Answer, stamp: Stamp) -> None:
        self._answer = answer
        self._stamp = stamp
        self._blocks: list[_Block] = []
        self._open = False

    def opening(self) -> list[Event]:
        message = self._message(None, None, []) | {"usage": self._usage(0)}
        return [Event({"type": "message_start", "message": message}, "message_start"), _PING]

    def events(self, choice: int, update: Update) -> list[Event]:
        events = [event for piece in update.delta.pieces for event in self._take(piece)]
        return events + (self._stop() if update.finish is not None else [])

    def closing(self) -> list[Event]:
        reason, sequence = self._ending()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = self._usage(self._answer.usage().completion)
        last = {"type": "message_delta", "delta": delta, "usage": usage, "duovolt": self._answer.timings()}
        return [Event(last, "message_delta"), Event({"type": "message_stop"}, "message_stop")]

    def failure(self, error: ApiError) -> Event:
        return Event(error.anthropic_body(), "error")

    def heartbeat(self) -> bytes:
        return _PING.encode()

    def collect(self, choice: int, update: Update) -> None:
        self.events(choice, update)

    def whole(self) -> dict[str, Any]:
        body = self._message(*self._ending(), [block.whole() for block in self._blocks])
        body["usage"] = self._usage(self._answer.usage().completion)
        return body | {"duovolt": self._answer.timings()}

    def _message(self, reason: str | None, sequence: str | None, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": PREFIX + self._stamp.name,
            "type": "message",
            "role": "assistant",
            "model": self._stamp.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
        }

    def _usage(self, output: int) -> dict[str, Any]:
        """As the API counts: what a cache held is no part of the input tokens."""
        usage = self._answer.usage()
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": output,
        }

    def _ending(self) -> tuple[str, str | None]:
        reader = self._answer.readers[0]
        if isinstance(reader.stop, str):
            return "stop_sequence", reader.stop
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(reader.finish or "", "end_turn"), None

    def _take(self, piece: Piece) -> list[Event]:
        match piece:
            case Reasoning(text):
                return [*self._switch("thinking"), self._delta("thinking_delta", "thinking", text)]
            case Content(""):
                return []
            case Content(text):
                return [*self._switch("text"), self._delta("text_delta", "text", text)]
            case CallStart(index, name):
                head = {"type": "tool_use", "id": f"toolu_{self._stamp.name}_{index}", "name": name}
                return [*self._stop(), self._start(_Block("tool_use", head))]
            case CallArguments(text, _):
                return [self._delta("input_json_delta", "partial_json", text)]
            case CallEnd(_, _, known):
                self._blocks[-1].known = known
        return self._stop()

    def _switch(self, kind: str) -> list[Event]:
        """Events that make a block of this kind the open one."""
        if self._open and self._blocks[-1].kind == kind:
            return []
        return [*self._stop(), self._start(_Block(kind, {}))]

    def _start(self, block: _Block) -> Event:
        self._blocks.append(block)
        self._open = True
        return self._event("content_block_start", content_block=block.empty())

    def _delta(self, kind: str, key: str, text: str) -> Event:
        self._blocks[-1].parts.append(text)
        return self._event("content_block_delta", delta={"type": kind, key: text})

    def _stop(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        events, block = [], self._blocks[-1]
        if block.kind == "thinking":
            signature = {"type": "signature_delta", "signature": block.signature}
            events.append(self._event("content_block_delta", delta=signature))
        return [*events, self._event("content_block_stop")]

    def _event(self, kind: str, **fields: Any) -> Event:
        return Event({"type": kind, "index": len(self._blocks) - 1, **fields}, kind)
