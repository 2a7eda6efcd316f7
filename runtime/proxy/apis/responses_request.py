"""The Responses API's request in the terms of the chat API. It keeps nothing: whatever needs a store is refused."""

from __future__ import annotations

from typing import Any

from ..errors import bad_request
from ..schema import ChatBody, ResponsesBody
from .chat_request import call_arguments

_STORED = {
    "previous_response_id": "send the earlier items as input",
    "conversation": "send the earlier items as input",
    "prompt": "send the text itself as instructions or input",
    "background": "the answer comes with the request, streamed or whole",
    "store": "answers are not kept; leave it out or say false",
}

# What a message of the chat API says -> what the client calls it.
CHAT_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
}


def chat_of(body: ResponsesBody) -> ChatBody:
    """The same request for the chat API. Raises ApiError naming the item at fault."""
    for name, advice in _STORED.items():
        if getattr(body, name):
            raise bad_request(f"{name}: this server keeps no state between requests; {advice}", name)
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise bad_request("text.verbosity is not honoured here: ask for it in the input, or leave it out", "text")
    if body.truncation not in (None, "disabled"):
        raise bad_request("truncation: this server never cuts a prompt; expected disabled", "truncation")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages += [{"role": "user", "content": body.input}] if isinstance(body.input, str) else _items(body.input)
    if not messages:
        raise bad_request("input: expected text or at least one item", "input")
    with_logprobs = bool(body.top_logprobs) or "message.output_text.logprobs" in (body.include or [])
    chat = ChatBody(
        messages=messages,
        tools=[_tool(tool, number) for number, tool in enumerate(body.tools or [])],
        tool_choice=_choice(body.tool_choice),
        response_format=_format(body.text.format if body.text else None),
        reasoning={"effort": body.reasoning.effort} if body.reasoning else None,
        max_completion_tokens=body.max_output_tokens,
        logprobs=with_logprobs,
        top_logprobs=body.top_logprobs,
    )
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos", "enable_thinking",
                 "chat_template_kwargs", "parallel_tool_calls"):  # fmt: skip
        setattr(chat, name, getattr(body, name))
    return chat


def _items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of the items; reasoning and calls join the assistant's message that they belong to."""
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.get("type", "message"):
            case "message":
                _add_message(messages, item, where)
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                messages.append({"role": "assistant", "reasoning_content": _text(parts, where), "content": ""})
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                output = _parts(item.get("output", ""), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            case kind:
                raise bad_request(
                    f"{where}.type: {str(kind)[:40]!r} is not one of message, reasoning, function_call, function_call_output",
                    "input",
                )
    return messages


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad_request(f"{where}.role: {role!r} is not one of user, assistant, system, developer", "input")
    content = item.get("content")
    text = (_text if role == "assistant" else _parts)(content, f"{where}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last:
        last["content"] = text  # behind its reasoning
    else:
        messages.append({"role": role, "content": text})


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
        raise bad_request(f"{where}: expected a name and arguments as text", "input")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    function = {"name": item["name"], "arguments": call_arguments(item["arguments"], where, "input")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _parts(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Text; with pictures the chat API's parts."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(content, where)
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        if not _is_image(part):
            parts.append({"type": "text", "text": _text([part], where, number)})
            continue
        if not isinstance(part.get("image_url"), str):
            raise bad_request(f"{where}[{number}]: expected image_url, a URL as text; no files are kept here", "input")
        parts.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _text(content: Any, where: str, first: int = 0) -> str:
    """Text, or the texts of parts, the first of which has the number `first`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected text or a list of parts", "input")
    texts = []
    for number, part in enumerate(content, first):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_image", "input_file", "input_audio"):
            raise bad_request(f"{where}[{number}]: text is read here, not {kind}", "input")
        key = "refusal" if kind == "refusal" else "text"
        if kind not in (
            "input_text",
            "output_text",
            "text",
            "reasoning_text",
            "summary_text",
            "refusal",
        ) or not isinstance(part.get(key), str):
            raise bad_request(f"{where}[{number}]: expected a part of type input_text or output_text", "input")
        texts.append(part[key])
    return "".join(texts)


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise bad_request(f"tools[{number}]: {kind!r} is not a tool of this server; functions only", "tools")
    if not isinstance(tool.get("name"), str):
        raise bad_request(f"tools[{number}]: expected a function with a name", "tools")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is not None and form.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": form}
    return form
