"""`/v1/completions`: plain continuation of a text or of token ids."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..messages import GenerateRequest, TokenLogprob
from .answer import AnswerReader, Update
from .assembly import AnswerStyle
from .errors import bad_request
from .plan import ServePlan
from .prompt import encode_prompt
from .sampling import SamplingDefaults, answer_length, build_sampling, stop_ids, stop_strings
from .schema import CompletionBody
from .tokenizer import TextTokenizer

_DEFAULT_LENGTH = 16  # as OpenAI's


def plan_completion(
    body: CompletionBody, plan: ServePlan, defaults: SamplingDefaults
) -> tuple[GenerateRequest, AnswerStyle]:
    """The engine's request and how to read its answer. Raises ApiError."""
    tokenizer = plan.tokenizer
    if body.best_of not in (None, 1):
        raise bad_request(f"best_of is {body.best_of}; this server makes one answer a request", "best_of")
    if body.suffix:
        raise bad_request("suffix is not supported", "suffix")
    logprobs = 0 if body.logprobs is None else 1 + body.logprobs
    sampling = build_sampling(body, defaults, tokenizer, logprobs)
    ids = _prompt_ids(body.prompt, tokenizer, plan.max_context)
    asked = _DEFAULT_LENGTH if body.max_tokens is None else body.max_tokens
    if asked == 0 and not body.echo:
        raise bad_request("max_tokens: 0 makes sense with echo only", "max_tokens")
    length = answer_length(len(ids), asked, plan.max_context, "max_tokens")
    ends, ignore_eos = stop_ids(body, tokenizer), bool(body.ignore_eos)
    style = AnswerStyle(frozenset() if ignore_eos else frozenset(ends), stop_strings(body))
    echo_logprobs = bool(body.echo) and logprobs > 0
    if echo_logprobs and body.stream:
        raise bad_request("echo with logprobs cannot be streamed", "stream")
    return GenerateRequest(0, ids, length, ends, ignore_eos, sampling, echo_logprobs), style


def _prompt_ids(prompt: str | list[Any], tokenizer: TextTokenizer, max_context: int) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return encode_prompt(tokenizer, prompt, max_context)
    if any(isinstance(entry, str | list) for entry in prompt):
        raise bad_request(f"prompt holds {len(prompt)} prompts; this server takes one a request", "prompt")
    for token in prompt:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < tokenizer.size:
            raise bad_request(f"prompt: {token!r} is not a token id below {tokenizer.size}", "prompt")
    return list(prompt)


@dataclass
class CompletionFormat:
    """Shapes one answer. `echo` is the prompt's ids where the client wants them in front."""

    tokenizer: TextTokenizer
    request_id: str
    created: int
    model: str
    with_logprobs: bool
    echo: list[int] | None
    _text: list[str] = field(default_factory=list)
    _logprobs: list[TokenLogprob] = field(default_factory=list)
    _prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _offset: int = 0

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token: the prompt, if it is echoed."""
        if self.echo is None:
            return []
        text = self.tokenizer.decode(self.echo)
        self._offset = len(text)
        return [self._chunk(text, None)]

    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """Chunks of one update; none if it shows nothing yet."""
        if not update.delta.content and not (self.with_logprobs and update.logprobs):
            return []
        return [self._chunk(update.delta.content, self._shape(update.logprobs) if self.with_logprobs else None)]

    def closing(self, reader: AnswerReader) -> list[dict[str, Any]]:
        """The chunk that tells why the answer ended."""
        return [self._chunk("", None, reader.finish) | {"duovolt": reader.tally.timings()}]

    def usage_chunk(self, reader: AnswerReader) -> dict[str, Any]:
        """The last chunk where the client asked for usage: no choices."""
        return self._head() | {"choices": [], "usage": reader.tally.usage()}

    def collect(self, update: Update) -> None:
        """Keep an update for the whole answer."""
        self._text.append(update.delta.content)
        self._logprobs += update.logprobs
        self._prompt_logprobs += update.prompt_logprobs

    def whole(self, reader: AnswerReader) -> dict[str, Any]:
        """The answer in one body; the first prompt token has no probability, nothing stands before it."""
        text, entries = "".join(self._text), list(self._logprobs)
        if self.echo is not None:
            text = self.tokenizer.decode(self.echo) + text
            entries = [TokenLogprob(self.echo[0], math.nan, []), *self._prompt_logprobs, *entries]
        logprobs = self._shape(entries) if self.with_logprobs else None
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reader.finish}
        body = self._head() | {"choices": [choice], "usage": reader.tally.usage()}
        return body | {"duovolt": reader.tally.timings()}

    def _head(self) -> dict[str, Any]:
        kind = "text_completion"
        return {"id": f"cmpl-{self.request_id}", "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, text: str, logprobs: dict[str, Any] | None, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._head() | {"choices": [choice]}

    def _shape(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        texts = [self.tokenizer.decode([entry.token]) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        known = [not math.isnan(entry.logprob) for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob if have else None for entry, have in zip(entries, known, strict=True)],
            "top_logprobs": [
                {self.tokenizer.decode([token]): value for token, value in entry.top} if have else None
                for entry, have in zip(entries, known, strict=True)
            ],
            "text_offset": offsets,
        }
