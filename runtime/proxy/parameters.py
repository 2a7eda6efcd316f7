"""What a tool's JSON schema says of its parameters: which types a value may have, and so how its text is read."""

from __future__ import annotations

from typing import Any

from . import strict_json

_DEPTH = 16  # of references and alternatives: a schema may refer to itself
_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def parameters_of(name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The schema of a tool's arguments; an empty one for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, dict) else {}
    return {}


def properties_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """The schemas of single parameters by name."""
    properties = parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def kinds_of(schema: Any, root: dict[str, Any], depth: int = _DEPTH) -> frozenset[str]:
    """Names of the types that a value may have; empty if the schema does not say. `root`: where references start."""
    if not isinstance(schema, dict) or not depth:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset([kind])
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    if isinstance(schema.get("$ref"), str):
        return kinds_of(_target(schema["$ref"], root), root, depth - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    found = {_NAMES.get(type(value), "null") for value in values} if isinstance(values, list) else set()
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema[word] if isinstance(schema.get(word), list) else []:
            found |= kinds_of(part, root, depth // 2)  # halved: nested alternatives multiply
    return frozenset(found)


def is_text(kinds: frozenset[str]) -> bool:
    """True if a parameter's value is the text itself; otherwise it is the JSON that the text spells."""
    return not kinds or "string" in kinds


def typed(text: str, kinds: frozenset[str]) -> Any:
    """The value of a parameter: text where the schema says string or nothing, else the JSON it spells, if it does."""
    if is_text(kinds):
        return None if text == "null" and "null" in kinds else text
    if "boolean" in kinds and text in ("True", "False"):
        return text == "True"
    try:
        return strict_json.parse(text)
    except ValueError:
        return text


def _target(reference: str, root: dict[str, Any]) -> Any:
    if not reference.startswith("#/"):
        return None
    found: Any = root
    for word in reference.removeprefix("#/").split("/"):
        found = found.get(word.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
