"""The JSON bodies of the APIs. Unknown keys are tolerated, as clients send many; known ones must have their type.

Keys that are known elsewhere, and would change the answer there, are `foreign`'s to refuse.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from .errors import bad_request

B = TypeVar("B", bound="Body")
_LACKING = re.compile("Object missing required field `(.*)`")
_PATH = re.compile(r"^(.*?)(?: - at `\$\.?(.*)`)?$", re.DOTALL)

Temperature = Annotated[float, Meta(ge=0, le=2)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(ge=0.01, le=10)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Whole = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**31)]
Most = Annotated[int, Meta(ge=-1, lt=2**31)]  # -1, as llama.cpp's server and LM Studio have it: as many as fit
Choices = Annotated[int, Meta(ge=1, le=128)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
TopK = Annotated[int, Meta(ge=-1, lt=2**31)]


class GenerationDefaults(Struct, kw_only=True):
    """What is read of generation_config.json, within the same bounds as a request's."""

    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    eos_token_id: TokenId | list[TokenId] | None = None


class Body(Struct, kw_only=True):
    """The JSON body of a request. Unknown keys are dropped."""


class StreamOptions(Struct):
    include_usage: bool | None = None


class SamplingBody(Body, kw_only=True):
    """What both generating APIs share. None means: not given."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None


class ChatBody(SamplingBody, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_tokens: Most | None = None
    max_completion_tokens: Most | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(SamplingBody, kw_only=True):
    """`/v1/completions`. `prompt` is a text, its token ids, or a list of either."""

    prompt: str | list[Any]
    max_tokens: Most | None = None
    max_completion_tokens: Most | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: Whole | None = None
    suffix: str | None = None


class TokenizeBody(Body, kw_only=True):
    """`/tokenize`: a text, or messages that the chat template renders."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    """`/detokenize`."""

    tokens: list[TokenId]


class CountTokensBody(Body, kw_only=True):
    """`/v1/messages/count_tokens`, and what `/v1/messages` shares with it."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """`/v1/messages`. `min_p`, `seed` and `ignore_eos` are this server's own."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    seed: int | None = None
    ignore_eos: bool | None = None


class ReasoningOptions(Struct):
    effort: str | None = None


class TextOptions(Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Body, kw_only=True):
    """`/v1/responses`. `top_k`, `min_p`, `seed`, `stop`, `ignore_eos` and the template's variables are this server's own."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    truncation: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    top_k: TopK | None = None
    min_p: Fraction | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class AbortBody(Body, kw_only=True):
    """`/v1/abort`: the id of an answer, or what its request gave as X-Request-Id."""

    request_id: Annotated[str, Meta(min_length=1, max_length=256)]


def decode_body(raw: bytes, kind: type[B]) -> B:
    """The body as `kind`. Raises ApiError (400) naming the parameter at fault."""
    body: B = decode_json(raw, kind)
    return body


def decode_json(raw: bytes | msgspec.Raw, kind: Any, name: str = "") -> Any:
    """What `raw`, a body or the field `name` of one, holds, as `kind`.

    Raises ApiError (400), also for what no type can hold (1e999, an integer of thousands of digits) and for text that is
    not UTF-8: a body's decoder only skips the fields that its type lacks, so these are found when they are read.
    """
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        match = _PATH.match(str(error))
        assert match is not None
        path = match[2] or name
        if not path and (lacking := _LACKING.fullmatch(match[1])):
            raise bad_request(f"{lacking[1]} is missing", lacking[1]) from error
        param = re.split(r"[.\[]", path)[0] if path else None
        raise bad_request(f"{path}: {match[1]}" if path else match[1], param) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = name or "the body"
        raise bad_request(f"{what} is not valid JSON: {error}", name or None) from error
