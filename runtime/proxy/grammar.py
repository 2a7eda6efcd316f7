"""What an answer must read as, written down for the grammar library: JSON by a schema, tool calls by their tools.

The engine's ranks turn the grammar into masks of allowed tokens (`runtime.engine.constraint`); here it is only built and
tried, so that a schema that cannot be kept is refused before any work.
"""

from __future__ import annotations

import json
import time
from decimal import Decimal
from typing import Any

from ..grammar import grammar_fault, prepare
from ..messages import Grammar
from .errors import bad_request
from .parameters import is_text, kinds_of, parameters_of, properties_of
from .plan import ServePlan
from .schema import ChatBody, CompletionBody
from .template import ToolFormat
from .tokenizer import END_THINK, END_TOOL_CALL, TOOL_CALL

# Between tokens of JSON: some, so that the model may write as it is used to, and not so much that it never ends.
_JSON_SPACE = {"whitespace_pattern": r"[ \n\t]{1,64}"}
_GAP = r"/[ \n]{0,4}/"
# What a hostile schema may cost: every rank builds the grammar, and all lanes wait for it.
_MAX_GRAMMAR = 1 << 20  # characters
_MAX_PROPERTIES = 1000  # of one object: the time goes with their square
_MAX_MULTIPLE = 10_000  # of `multipleOf`, its decimal point taken out: the library counts through the remainders
_MAX_SECONDS = 1.0  # of this thread's own work


def chat_grammar(body: ChatBody, tools: list[dict[str, Any]], thinking: bool, plan: ServePlan) -> Grammar | None:
    """The grammar that `response_format` and `tool_choice` ask for; it holds from the end of the reasoning.

    With a format and tools that the model may call, the answer is either. Raises ApiError.
    """
    schema = _schema(body.response_format)
    forced = _forced_tools(body, tools)
    if schema is None and forced is None:
        return None
    if body.ignore_eos:
        raise bad_request("ignore_eos: an answer of a given form ends where the form does", "ignore_eos")
    callable_tools = tools if forced is None else forced
    rules, starts = [], []
    if forced is None and schema is not None:
        rules.append(f"document: %json {_json(schema, strict=True)}")
        starts.append("document")
    if callable_tools:
        form, calls = _calls(callable_tools, plan, one=body.parallel_tool_calls is False or _is_named(body))
        rules += calls
        starts.append(form)
    text = "\n".join([f"start: {_GAP} ({' | '.join(starts)})", *rules])
    after = plan.tokenizer.marker(END_THINK) if thinking else None
    return _tried(text, after, plan, "response_format" if forced is None else "tools")


def completion_grammar(body: CompletionBody, plan: ServePlan) -> Grammar | None:
    """The grammar of a completion's `response_format`. Raises ApiError."""
    schema = _schema(body.response_format)
    if schema is None:
        return None
    if body.ignore_eos:
        raise bad_request("ignore_eos: an answer of a given form ends where the form does", "ignore_eos")
    text = f"start: {_GAP} document\ndocument: %json {_json(schema, strict=True)}"
    return _tried(text, None, plan, "response_format")


def _schema(form: dict[str, Any] | None) -> dict[str, Any] | bool | None:
    kind = (form or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise bad_request(f"response_format {kind!r}: expected text, json_object or json_schema", "response_format")
    holder = (form or {}).get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict | bool):
        raise bad_request("response_format.json_schema.schema: expected a JSON schema", "response_format")
    return schema


def _is_named(body: ChatBody) -> bool:
    return isinstance(body.tool_choice, dict)


def _forced_tools(body: ChatBody, tools: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The tools of which the answer must call one; None if it need not."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return None
    if choice == "required":
        if not tools:
            raise bad_request("tool_choice is required, but the request has no tools", "tool_choice")
        return tools
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request(
            f"tool_choice {str(choice)[:80]!r}: expected auto, none, required or one function by name", "tool_choice"
        )
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise bad_request(f"tool_choice: no tool is called {name!r}", "tool_choice")
    return named


def _calls(tools: list[dict[str, Any]], plan: ServePlan, one: bool) -> tuple[str, list[str]]:
    """The rule for calls of these tools, and the rules it needs."""
    tokenizer = plan.tokenizer
    begin, end = tokenizer.marker(TOOL_CALL), tokenizer.marker(END_TOOL_CALL)
    if begin is None or end is None:
        raise bad_request("this model's tokenizer has no marks for tool calls", "tool_choice")
    rules: list[str] = []
    names = []
    for number, tool in enumerate(tools):
        write = _json_function if plan.template.tool_format is ToolFormat.JSON else _function
        rules += write(f"f{number}", tool["function"])
        names.append(f"f{number}")
    rules.append(f"call: <[{begin}]> ({' | '.join(names)}) <[{end}]>")
    rules.append(r"text_value[lazy]: /(.|\n)*\n<\/parameter>\n/")
    rules.append("calls: call" if one else r"calls: call (/\n{0,2}/ call)*")
    return "calls", rules


def _function(rule: str, function: dict[str, Any]) -> list[str]:
    """A call as the family's template shows it; parameters in the schema's order."""
    schema = parameters_of(function["name"], [function])
    properties = properties_of(schema)
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    name = function["name"]
    if any(sign in name for sign in ">\n"):
        raise bad_request(f"tools: {name!r} cannot be written in a call of this model", "tools")
    parts, rules = [], []
    for number, (key, value) in enumerate(properties.items()):
        if any(sign in key for sign in ">\n"):
            raise bad_request(f"tools: {key!r} of {name!r} cannot be written in a call of this model", "tools")
        part = f"{rule}_{number}"
        parts.append(part if key in required else part + "?")
        head = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        if not is_text(kinds_of(value, schema)):
            rules.append(f'{part}: {head} {part}_v "\\n</parameter>\\n"')
            rules.append(f"{part}_v: %json {_json(shared | value, strict=False)}")
        elif (options := _options(value)) is not None:
            rules.append(f'{part}: {head} ({" | ".join(options)}) "\\n</parameter>\\n"')
        else:
            rules.append(f"{part}: {head} text_value")
    whole = json.dumps(f"\n<function={name}>\n", ensure_ascii=False)
    rules.append(f'{rule}: {whole} {" ".join(parts)} "</function>\\n"')
    return rules


def _json_function(rule: str, function: dict[str, Any]) -> list[str]:
    """A call as older templates show it."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": {"type": "object"} | (function.get("parameters") or {}),
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    for key in ("$defs", "definitions"):  # references in a schema start at its root
        if key in schema["properties"]["arguments"]:  # type: ignore[operator, index]
            schema[key] = schema["properties"]["arguments"].pop(key)  # type: ignore[index, attr-defined]
    return [f'{rule}: "\\n" {rule}_v "\\n"', f"{rule}_v: %json {_json(schema, strict=False)}"]


def _options(schema: Any) -> list[str] | None:
    values = schema.get("enum") if isinstance(schema, dict) else None
    if isinstance(schema, dict) and isinstance(schema.get("const"), str):
        values = [schema["const"]]
    if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
        return None
    return [json.dumps(value, ensure_ascii=False) for value in values]


def _json(schema: dict[str, Any] | bool, *, strict: bool) -> str:
    """A schema as the library takes it. Not strict (of tools): keywords that it does not know are passed over, not refused."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    param = "response_format" if strict else "tools"
    _check_cost(schema, param)
    own = {key: value for key, value in schema.items() if key != "x-guidance"}
    try:
        return json.dumps(own | {"x-guidance": _JSON_SPACE | {"lenient": not strict}}, ensure_ascii=True)
    except (RecursionError, ValueError) as error:
        raise bad_request("the JSON schema is nested too deep", param) from error


def _check_cost(schema: dict[str, Any], param: str) -> None:
    """Refuse what the library's own limits do not bound."""
    left: list[Any] = [schema]
    while left:
        part = left.pop()
        if isinstance(part, list):
            left += part
        if not isinstance(part, dict):
            continue
        left += part.values()
        multiple, properties = part.get("multipleOf"), part.get("properties")
        if isinstance(multiple, bool):  # a Python integer, but no JSON number
            multiple = None
        if isinstance(multiple, int | float) and not 0 < _without_point(multiple) <= _MAX_MULTIPLE:
            raise bad_request(
                f"the JSON schema has multipleOf {multiple}; its digits, without a point, may be 1 to {_MAX_MULTIPLE}",
                param,
            )
        if isinstance(properties, dict) and len(properties) > _MAX_PROPERTIES:
            raise bad_request(
                f"the JSON schema has an object of {len(properties)} properties, at most {_MAX_PROPERTIES}",
                param,
            )


def _without_point(number: float) -> Decimal:
    """The whole number that the digits of `number` spell: 12.5 gives 125."""
    value = Decimal(str(number)).normalize()
    exponent = value.as_tuple().exponent
    return value.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else value


def _tried(text: str, after: int | None, plan: ServePlan, param: str) -> Grammar:
    if len(text) > _MAX_GRAMMAR:
        raise bad_request(f"the schema has {len(text)} characters, at most {_MAX_GRAMMAR}", param)
    tokenizer = plan.tokenizer
    prepare(tokenizer.file, tokenizer.size, tokenizer.stop_ids)  # once a server, and no part of the form's cost
    began = time.thread_time()
    fault = grammar_fault(text, tokenizer.file, tokenizer.size, tokenizer.stop_ids)
    if fault is not None:
        raise bad_request(f"this form cannot be kept: {fault[:500]}", param)
    if time.thread_time() - began > _MAX_SECONDS:
        raise bad_request(f"this form takes more than {_MAX_SECONDS:g} s to prepare; make its schema smaller", param)
    return Grammar(text, after, tokenizer.stop_ids)
