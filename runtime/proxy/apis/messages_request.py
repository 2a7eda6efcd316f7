"""Anthropic's request in the terms of the chat API, from which the prompt is made."""

from __future__ import annotations

from typing import Any

from ..errors import bad_request
from ..schema import ChatBody, CountTokensBody, MessagesBody

_UNREADABLE = ("image", "document", "search_result", "container_upload")

# What a message of the chat API says -> what the client calls it.
CHAT_NAMES = {
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
}


def chat_of(body: CountTokensBody) -> ChatBody:
    """The same request for the chat API. Raises ApiError naming the block at fault."""
    chat = ChatBody(messages=_messages(body), tools=[_tool(tool, n) for n, tool in enumerate(body.tools or [])])
    _choose_tool(chat, body.tool_choice)
    chat.thinking = body.thinking
    chat.chat_template_kwargs = body.chat_template_kwargs
    output = body.output_config or {}
    if isinstance(output.get("effort"), str):
        chat.reasoning_effort = output["effort"]
    if output.get("format") is not None:
        chat.response_format = _format(output["format"])
    if isinstance(body, MessagesBody):
        chat.max_tokens, chat.stop = body.max_tokens, body.stop_sequences
        for name in ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"):
            setattr(chat, name, getattr(body, name))
    return chat


def _messages(body: CountTokensBody) -> list[dict[str, Any]]:
    messages = []
    if body.system is not None:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for number, message in enumerate(body.messages):
        where = f"messages[{number}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise bad_request(f"{where}.role: {role!r} is not one of user, assistant, system", "messages")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise bad_request(f"{where}.content: expected text or a list of blocks", "messages")
        messages += _assistant(blocks, where) if role == "assistant" else _user(role, blocks, where)
    if body.messages[-1].get("role") == "assistant":
        raise bad_request(
            "messages: the last one is the assistant's; this server begins a turn, it cannot go on with one", "messages"
        )
    return messages


def _user(role: str, blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, in the order of the blocks."""
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        place = f"{where}.content[{number}]"
        if block.get("type") == "tool_result":
            result = {"role": "tool", "content": _parts(block.get("content") or "", place)}
            messages.append(result | {"tool_call_id": block.get("tool_use_id")})
            continue
        parts = _parts([block], where, number)
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += parts
        else:
            messages.append({"role": role, "content": parts})
    return messages or [{"role": role, "content": ""}]


def _assistant(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case {"type": "thinking", "thinking": str(thought)}:
                thoughts.append(thought)
            case {"type": "redacted_thinking"}:
                continue
            case {"type": "tool_use", "name": str(name), "input": dict(arguments)}:
                function = {"name": name, "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case _:
                texts.append(_text([block], where, number))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _parts(content: Any, where: str, first: int = 0) -> list[dict[str, Any]]:
    """The chat API's parts of text and image blocks, the first of which has the number `first`."""
    if not isinstance(content, str | list):
        raise bad_request(f"{where}.content: expected text or a list of blocks", "messages")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = []
    for number, block in enumerate(blocks, first):
        if isinstance(block, dict) and block.get("type") == "image":
            url = _image_url(block.get("source"), f"{where}.content[{number}].source")
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": _text([block], where, number)})
    return parts


def _image_url(source: Any, where: str) -> str:
    match source:
        case {"type": "base64", "media_type": str(media), "data": str(data)}:
            return f"data:{media};base64,{data}"
        case {"type": "url", "url": str(url)}:
            return url
    raise bad_request(f"{where}: expected type base64 with media_type and data, or type url with a url", "messages")


def _text(content: Any, where: str, first: int = 0) -> str:
    """Text, or the texts of blocks, the first of which has the number `first`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where}: expected text or a list of text blocks", where.split("[")[0])
    texts = []
    for number, block in enumerate(content, first):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in _UNREADABLE:
            raise bad_request(f"{where}.content[{number}]: text is read here, not {kind}", "messages")
        if kind != "text" or not isinstance(block.get("text"), str):
            raise bad_request(f"{where}.content[{number}]: expected a block of type text, got {kind!r}", "messages")
        texts.append(block["text"])
    return "".join(texts)


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise bad_request(f"tools[{number}]: {tool['type']!r} is not a tool of this server; custom tools only", "tools")
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
        raise bad_request(f"tools[{number}]: expected a name and an input_schema", "tools")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _choose_tool(chat: ChatBody, choice: dict[str, Any] | None) -> None:
    if choice is None:
        return
    match choice.get("type"), choice.get("name"):
        case "auto", _:
            chat.tool_choice = "auto"
        case "any", _:
            chat.tool_choice = "required"
        case "none", _:
            chat.tool_choice = "none"
        case "tool", str(name):
            chat.tool_choice = {"type": "function", "function": {"name": name}}
        case _:
            raise bad_request("tool_choice: expected auto, any, none, or tool with its name", "tool_choice")
    if choice.get("disable_parallel_tool_use") is True:
        chat.parallel_tool_calls = False


def _format(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise bad_request("output_config.format: expected a json_schema", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}
