"""Whether to think, and how hard: the forms in which clients of several servers say so."""

from __future__ import annotations

from typing import Any

from ..errors import bad_request
from ..schema import ChatBody

NO_EFFORT = "none"
_HEEDED = ("effort", "enabled", "summary")  # `summary` changes nothing: the reasoning itself is given


def thinking_of(body: ChatBody) -> tuple[bool | None, str | None]:
    """(whether to think, how hard), each None where the body does not say. Raises ApiError where two fields differ."""
    reasoning = body.reasoning or {}
    effort, enabled = reasoning.get("effort"), reasoning.get("enabled")
    if not isinstance(effort, str | None):
        raise bad_request("reasoning.effort: expected a text", "reasoning")
    if not isinstance(enabled, bool | None):
        raise bad_request("reasoning.enabled: expected true or false", "reasoning")
    for name, value in reasoning.items():
        if name not in _HEEDED and value not in (None, False):
            raise bad_request(
                f"reasoning.{name[:40]} is not honoured here: say effort or enabled, or leave it out", "reasoning"
            )
    efforts = {"reasoning_effort": body.reasoning_effort, "reasoning.effort": effort}
    chosen = _one_of(efforts)
    switches = {
        "enable_thinking": body.enable_thinking,
        "reasoning.enabled": enabled,
        "thinking.type": thinking_switch(body.thinking),
        # The effort `none` is a switch, too; how hard to think says nothing where another one is off.
        **{name: False for name, value in efforts.items() if value == NO_EFFORT},
    }
    return _one_of(switches), chosen


def thinking_switch(thinking: dict[str, Any] | None) -> bool | None:
    """Anthropic's `thinking`: None leaves it to the template. Raises ApiError for a type that nobody knows."""
    kind = (thinking or {}).get("type")
    if kind not in (None, "enabled", "disabled", "adaptive"):
        raise bad_request(f"thinking.type: {kind!r} is not one of enabled, disabled, adaptive", "thinking")
    return None if kind in (None, "adaptive") else kind == "enabled"


def _one_of(said: dict[str, Any]) -> Any:
    given = [(name, value) for name, value in said.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise bad_request(
                f"{given[0][0]} and {name}: they say different things; send one of them", name.partition(".")[0]
            )
    return given[0][1] if given else None
