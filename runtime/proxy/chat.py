"""`/v1/chat/completions`: the body of an answer, whole or as a stream of chunks, from the same deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..messages import GenerateRequest, TokenLogprob
from .answer import AnswerReader, Update
from .assembly import AnswerStyle, Delta
from .chat_request import build_chat_prompt
from .plan import ServePlan
from .prompt import encode_prompt
from .sampling import SamplingDefaults, answer_length, build_sampling, stop_ids, stop_strings
from .schema import ChatBody
from .tokenizer import TextTokenizer
from .tools import ToolCall


def plan_chat(body: ChatBody, plan: ServePlan, defaults: SamplingDefaults) -> tuple[GenerateRequest, AnswerStyle]:
    """The engine's request and how to read its answer. Raises ApiError."""
    tokenizer = plan.tokenizer
    logprobs = 1 + (body.top_logprobs or 0) if body.logprobs else 0
    sampling = build_sampling(body, defaults, tokenizer, logprobs)
    stops, ends, ignore_eos = stop_strings(body), stop_ids(body, tokenizer), bool(body.ignore_eos)
    prompt = build_chat_prompt(body, plan.template)
    ids = encode_prompt(tokenizer, prompt.text, plan.max_context)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    param = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    length = answer_length(len(ids), asked, plan.max_context, param)
    style = AnswerStyle(
        frozenset() if ignore_eos else frozenset(ends), stops, split=True, thinking=prompt.thinking, tools=prompt.tools
    )
    return GenerateRequest(0, ids, length, ends, ignore_eos, sampling), style


@dataclass
class ChatFormat:
    """Shapes one answer; keeps what a chunk must remember of the chunks before it."""

    tokenizer: TextTokenizer
    request_id: str
    created: int
    model: str
    with_logprobs: bool
    _calls: int = 0
    _reasoning: list[str] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _tool_calls: list[dict[str, Any]] = field(default_factory=list)
    _logprobs: list[dict[str, Any]] = field(default_factory=list)

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return [self._chunk({"role": "assistant", "content": ""})]

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """Chunks of one update; none if it shows nothing yet."""
        logprobs = self._shape_logprobs(update.logprobs)
        deltas = self._shape_delta(update.delta)
        if not deltas and logprobs:
            deltas = [{"content": ""}]
        return [self._chunk(delta, logprobs if number == 0 else []) for number, delta in enumerate(deltas)]

    def closing(self, reader: AnswerReader) -> list[dict[str, Any]]:
        """The chunk that tells why the answer ended."""
        chunk = self._chunk({}, finish=reader.finish)
        return [chunk | {"duovolt": reader.tally.timings()}]

    def usage_chunk(self, reader: AnswerReader) -> dict[str, Any]:
        """The last chunk where the client asked for usage: no choices."""
        return self._head("chat.completion.chunk") | {"choices": [], "usage": reader.tally.usage()}

    def collect(self, update: Update) -> None:
        """Keep an update for the whole answer."""
        self._reasoning.append(update.delta.reasoning)
        self._content.append(update.delta.content)
        self._tool_calls += [self._shape_call(call) for call in update.delta.calls]
        self._logprobs += self._shape_logprobs(update.logprobs)

    def whole(self, reader: AnswerReader) -> dict[str, Any]:
        """The answer in one body."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._tool_calls:
            message["content"] = content or None
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self._tool_calls]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self._logprobs} if self.with_logprobs else None,
            "finish_reason": reader.finish,
        }
        body = self._head("chat.completion") | {"choices": [choice], "usage": reader.tally.usage()}
        return body | {"duovolt": reader.tally.timings()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.request_id}", "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": finish,
        }
        return self._head("chat.completion.chunk") | {"choices": [choice]}

    def _shape_delta(self, delta: Delta) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if delta.reasoning:
            deltas.append({"reasoning_content": delta.reasoning})
        if delta.content:
            deltas.append({"content": delta.content})
        return deltas + [{"tool_calls": [self._shape_call(call)]} for call in delta.calls]

    def _shape_call(self, call: ToolCall) -> dict[str, Any]:
        index = self._calls
        self._calls += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": f"call_{self.request_id}_{index}", "type": "function", "function": function}

    def _shape_logprobs(self, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            self._shape_token(entry.token, entry.logprob)
            | {"top_logprobs": [self._shape_token(token, value) for token, value in entry.top]}
            for entry in logprobs
            if self.with_logprobs
        ]

    def _shape_token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(data)}
