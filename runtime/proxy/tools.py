"""Tool calls as the family writes them, between `<tool_call>` and `</tool_call>`.

`<function=NAME>`, then `<parameter=KEY>` VALUE `</parameter>` on lines of their own, any number, then `</function>`.
Values are text, typed by the tool's JSON schema. Older templates put `{"name": ..., "arguments": {...}}` there instead.
The model may write anything there: what does not read as a call is no call, and what is given out is strict JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from . import strict_json

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name and its arguments, a JSON object as text; neither holds a lone surrogate."""

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
    return _call(match[1].strip(), arguments)


def _parse_json(text: str) -> ToolCall | None:
    try:
        call = strict_json.parse(text)  # an object: the text begins with a brace
        arguments = call.get("arguments")
        if isinstance(arguments, str):  # some models write the object as text, as the API has it
            arguments = strict_json.parse(arguments)
    except ValueError:
        return None
    return _call(call.get("name"), {} if arguments is None else arguments)


def _call(name: Any, arguments: Any) -> ToolCall | None:
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        spelled = strict_json.spell(arguments)
    except ValueError:
        return None
    return ToolCall(_whole_characters(name), _whole_characters(spelled))


def _whole_characters(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which JSON's escapes can write and UTF-8 cannot."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


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
        return strict_json.parse(text)
    except ValueError:
        return text
