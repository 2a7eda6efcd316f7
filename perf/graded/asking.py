"""Put the questions to a server's chat, one at a time, greedily."""

from collections.abc import Callable

import msgspec

from ...checkpoint.errors import CheckFailed, InputError, one_line
from ..counts import Count
from ..serve_stream import Endpoint
from .grade import grade
from .items import Item, digest_of
from .journal import Journal
from .result import Outcome


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Count = 0


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def ask_one(endpoint: Endpoint, model: str, item: Item, kind: str, tokens: int, thinking: bool) -> Outcome:
    """Raises InputError if the server refuses the question, CheckFailed, EnvironmentFault."""
    body = {
        "model": model, "messages": [{"role": "user", "content": item.prompt()}], "max_tokens": tokens, "temperature": 0.0,
    }  # fmt: skip
    if not thinking:
        body["chat_template_kwargs"] = {"enable_thinking": False}
    try:
        answer = msgspec.json.decode(endpoint.ask("/v1/chat/completions", body), type=_Answer)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CheckFailed(f"/v1/chat/completions: no chat answer: {one_line(error)}.") from None
    if not answer.choices:
        raise CheckFailed("/v1/chat/completions: an answer without choices.")
    choice = answer.choices[0]
    found = grade(item, choice.message.content or "")
    why = found.why
    if not found.passed and choice.finish_reason == "length":
        why = f"cut after {tokens} tokens; {why}"
    used = 0 if answer.usage is None else answer.usage.completion_tokens
    return Outcome(item.id, kind, digest_of(item), found.passed, why, used)


def ask_all(
    endpoint: Endpoint,
    model: str,
    items: list[tuple[str, Item]],
    tokens: int,
    thinking: bool,
    told: Callable[[Outcome], None],
    journal: Journal,
) -> tuple[list[Outcome], list[str]]:
    """(outcomes, what was left out and why): a needle that the server finds too long is left out, any other refusal raises.

    What the journal holds is not asked again.
    """
    found: list[Outcome] = []
    skipped: list[str] = []
    for kind, item in items:
        known = journal.done.get((item.id, digest_of(item)))
        try:
            outcome = known or ask_one(endpoint, model, item, kind, tokens, thinking)
        except InputError as error:
            if kind != "needle":
                raise
            skipped.append(f"{item.id}: {error}")
            continue
        if known is None:
            journal.add(outcome)
        found.append(outcome)
        told(outcome)
    return found, skipped
