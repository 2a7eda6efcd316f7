"""From a body to the numbers the engine samples by."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from ..messages import SamplingParams
from .errors import bad_request
from .schema import ChatBody, CompletionBody, GenerationDefaults, SamplingBody
from .tokenizer import TextTokenizer

_AS_MANY_AS_FIT = -1
MAX_STOPS = 16
_ID = re.compile("[0-9]{1,10}")
_SEEDS = 2**64  # distinct seeds; a negative one counts from the end


@dataclass(frozen=True)
class SamplingDefaults:
    """What the model's makers recommend (generation_config.json), for fields that a request leaves out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @staticmethod
    def of(generation: GenerationDefaults) -> SamplingDefaults:
        known = {name: getattr(generation, name) for name in SamplingDefaults.__dataclass_fields__}
        return SamplingDefaults(**{name: value for name, value in known.items() if value is not None})


def build_sampling(
    body: SamplingBody, defaults: SamplingDefaults, tokenizer: TextTokenizer, logprobs: int
) -> SamplingParams:
    """The engine's parameters, with a fresh seed if none was given: both ranks must draw the same. Raises ApiError."""
    if body.seed is not None and not -_SEEDS // 2 <= body.seed < _SEEDS:
        raise bad_request("seed: expected a whole number from -2^63 to 2^64 - 1", "seed")
    return SamplingParams(
        temperature=_given(body.temperature, defaults.temperature),
        top_k=max(_given(body.top_k, defaults.top_k), 0),
        top_p=_given(body.top_p, defaults.top_p),
        min_p=_given(body.min_p, defaults.min_p),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=_bias(body.logit_bias or {}, tokenizer),
        seed=secrets.randbelow(_SEEDS) if body.seed is None else body.seed % _SEEDS,
        logprobs=logprobs,
    )


def for_choice(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of choice `number` of a request: the same but for the seed, which counts on from the first's."""
    return msgspec.structs.replace(params, seed=(params.seed + number) % _SEEDS)


def asked_length(body: ChatBody | CompletionBody, unsaid: int | None = None) -> tuple[int | None, str]:
    """(tokens asked for, None for as many as fit, by the field of which name); `unsaid` where neither field is given.

    Some clients send both fields. Raises ApiError if they differ.
    """
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(
            f"max_tokens is {old}, max_completion_tokens {new}: send one of them", "max_completion_tokens"
        )
    said, name = (old, "max_tokens") if new is None else (new, "max_completion_tokens")
    return unsaid if said is None else None if said == _AS_MANY_AS_FIT else said, name


def stop_strings(body: SamplingBody) -> list[str]:
    """The stop strings of a body. Raises ApiError for empty ones and for more than 16."""
    stops = [body.stop] if isinstance(body.stop, str) else list(body.stop or [])
    if "" in stops:
        raise bad_request("stop: an empty stop string would end every answer at once", "stop")
    if len(stops) > MAX_STOPS:
        raise bad_request(f"stop: {len(stops)} strings, at most {MAX_STOPS}", "stop")
    return stops


def stop_ids(body: SamplingBody, tokenizer: TextTokenizer) -> list[int]:
    """Ids that end the answer: the model's own, then the request's as far as the tokenizer has them.

    In this order, since a card knows of the first few only.
    """
    asked = {token for token in body.stop_token_ids or [] if token < tokenizer.size}
    return [*tokenizer.stop_ids, *sorted(asked.difference(tokenizer.stop_ids))]


def answer_length(prompt_tokens: int, asked: int | None, max_context: int, param: str) -> int:
    """Tokens the answer may have. Raises ApiError with the numbers if prompt and answer do not fit the context."""
    if prompt_tokens == 0:
        raise bad_request("the prompt is empty", "prompt")
    room = max_context - prompt_tokens
    if room < (1 if asked is None else asked):
        answer = "" if asked is None else f" and {asked} for the answer ({param})"
        raise bad_request(
            f"this model's context is {max_context} tokens; the request has {prompt_tokens} in the prompt{answer}",
            param if asked and room >= 1 else "prompt",
            "context_length_exceeded",
        )
    return room if asked is None else asked


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value


def _bias(biases: dict[str, float], tokenizer: TextTokenizer) -> dict[int, float]:
    clean = {}
    for key, value in biases.items():
        if not _ID.fullmatch(key) or int(key) >= tokenizer.size:
            shown = repr(key if len(key) <= 20 else key[:20] + "...")
            raise bad_request(f"logit_bias: {shown} is not a token id below {tokenizer.size}", "logit_bias")
        clean[int(key)] = value
    return clean
