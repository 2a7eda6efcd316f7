"""Tool calls as the family writes them, between `<tool_call>` and `</tool_call>`.

`<function=NAME>`, then `<parameter=KEY>` VALUE `</parameter>` on lines of their own, any number, then `</function>`.
Values are text, typed by the tool's JSON schema. Older templates put `{"name": ..., "arguments": {...}}` there instead.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name and its arguments as JSON text."""

    name: str
    arguments: str


def parse_tool_call(text: str, tools: list[dict[str, Any]]) -> ToolCall | None:
    """The call that stands between the markers; None if it does not read as one."""
    if text.lstrip().startswith("{"):
        return _parse_json(text)
    match = _FUNCTION.fullmatch(text)
    if match is None:
        return None
    schema = _properties(match[1].strip(), tools)
    arguments: dict[str, Any] = {}
    position, body = 0, match[2]
    while parameter := _PARAMETER.match(body, position):
        key = parameter[1].strip()
        arguments[key] = _typed(parameter[2], schema.get(key))
        position = parameter.end()
    if body[position:].strip():
        return None
    return ToolCall(match[1].strip(), json.dumps(arguments, ensure_ascii=False))


def _parse_json(text: str) -> ToolCall | None:
    try:
        call = json.loads(text)
        return ToolCall(str(call["name"]), json.dumps(call.get("arguments", {}), ensure_ascii=False))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _properties(name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


def _typed(text: str, schema: Any) -> Any:
    """The value of a parameter: text where the schema says string or nothing, else the JSON it spells, if it does."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None or "string" in kinds:
        return None if text == "null" and "null" in kinds else text
    if "boolean" in kinds and text in ("True", "False"):
        return text == "True"
    try:
        return json.loads(text)
    except ValueError:
        return text
