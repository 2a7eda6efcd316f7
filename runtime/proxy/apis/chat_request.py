"""A chat body to a prompt: messages checked and brought into the template's shape, template variables chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import strict_json
from ..errors import bad_request
from ..media import Media, read_video
from ..pictures import NO_TOWER, PictureReader
from ..schema import ChatBody
from ..shared_turns import shared_ends
from ..template import ChatTemplate, opens_thinking
from ..videos import NO_VIDEO
from .thinking import thinking_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


@dataclass(frozen=True)
class ChatPrompt:
    """`thinking`: the prompt has begun the assistant's reasoning; `tools`: those the answer may call.

    `media`: its pictures and videos, in the order of the messages. `shared`: characters of the text that later prompts will
    begin with.
    """

    text: str
    thinking: bool
    tools: list[dict[str, Any]]
    media: Media
    shared: list[int]


def build_chat_prompt(body: ChatBody, template: ChatTemplate, reader: PictureReader | None = None) -> ChatPrompt:
    """Render the body. Raises ApiError for malformed messages and for what this server cannot do."""
    media = Media()
    tools = _tools(body)
    variables = template.variables(body.chat_template_kwargs)
    thinks, effort = thinking_of(body)
    if thinks is not None:
        variables["enable_thinking"] = thinks
    if effort is not None:
        variables["reasoning_effort"] = effort
    messages = clean_messages(body.messages, media, reader)
    text = template.render(messages, tools or None, variables)
    shared = shared_ends(template, messages, tools or None, variables, text)
    return ChatPrompt(text, opens_thinking(text), tools, media, shared)


def clean_messages(messages: list[dict[str, Any]], media: Media, reader: PictureReader | None) -> list[dict[str, Any]]:
    """The messages as templates expect them: text parts joined, call arguments as objects. Raises ApiError.

    Pictures and videos are added to `media`; `reader` None: the model reads text only.
    """
    return [_message(message, f"messages[{number}]", media, reader) for number, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str, media: Media, reader: PictureReader | None) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise bad_request(f"{where}.role: {role!r} is not one of {', '.join(ROLES)}", "messages")
    clean = dict(message)
    clean["role"] = {"developer": "system", "function": "tool"}.get(role, role)
    clean["content"] = _content(message.get("content"), where, media, reader)
    if "reasoning_content" in message and not isinstance(message["reasoning_content"], str):
        del clean["reasoning_content"]  # null from clients that send every field
    calls = message.get("tool_calls")
    if calls is None:
        clean.pop("tool_calls", None)
        if message.get("content") is None:
            if role != "assistant":
                raise bad_request(f"{where}.content is missing", "messages")
            clean["content"] = ""
    else:
        clean["tool_calls"] = _calls(calls, where)
    return clean


def _content(content: Any, where: str, media: Media, reader: PictureReader | None) -> str | list[dict[str, Any]]:
    """Text; with pictures and videos the parts in their order, as templates take them."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where}.content: expected text or a list of parts", "messages")
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image_url":
            if reader is None:
                raise bad_request(f"this server reads text only, not image_url: {NO_TOWER}", "messages")
            media.images.append(_image_url(part.get("image_url"), f"{where}.content[{number}]"))
            parts.append({"type": "image"})
            continue
        if kind in ("video", "video_url"):
            if reader is None or reader.videos is None:
                raise bad_request(
                    f"this server reads no {kind}: {NO_TOWER if reader is None else NO_VIDEO}", "messages"
                )
            media.videos.append(read_video(part, f"{where}.content[{number}]"))
            parts.append({"type": "video"})
            continue
        if kind in ("image", "input_audio", "file"):
            reads = "text only" if reader is None else "text, image_url and video_url"
            raise bad_request(f"{where}.content[{number}]: this server reads {reads}, not {kind}", "messages")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad_request(f"{where}.content[{number}]: expected a part of type text", "messages")
        parts.append({"type": "text", "text": part["text"]})
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _image_url(value: Any, where: str) -> str:
    """OpenAI's object, or the bare URL that some clients send. `detail` changes nothing: the model decides."""
    url = value.get("url") if isinstance(value, dict) else value
    if not isinstance(url, str):
        raise bad_request(f"{where}.image_url: expected an object with a url", "messages")
    return url


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise bad_request(f"{where}.tool_calls: expected a list", "messages")
    clean = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{where}.tool_calls[{number}]: expected a function with a name", "messages")
        arguments = call_arguments(function.get("arguments", {}), f"{where}.tool_calls[{number}]", "messages")
        clean.append({**call, "function": {**function, "arguments": arguments}})
    return clean


def call_arguments(arguments: Any, where: str, param: str) -> dict[str, Any]:
    """A call's arguments as an object, which the API has as JSON text. Raises ApiError naming `where`."""
    if isinstance(arguments, str):
        try:
            arguments = strict_json.parse(arguments or "{}")
            strict_json.spell(arguments).encode()  # templates write them into the prompt
        except UnicodeEncodeError as error:
            raise bad_request(
                f"{where}: arguments hold half of a surrogate pair, which is no character", param
            ) from error
        except ValueError as error:
            raise bad_request(f"{where}: arguments are not JSON: {error}", param) from error
    if not isinstance(arguments, dict):
        raise bad_request(f"{where}: arguments must be a JSON object", param)
    return arguments


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    numbers: dict[str, int] = {}
    for number, tool in enumerate(body.tools or []):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"tools[{number}]: expected a function with a name", "tools")
        if not isinstance(function.get("parameters"), dict | None):
            raise bad_request(f"tools[{number}].function.parameters: expected a JSON schema", "tools")
        name = function["name"]
        if (first := numbers.setdefault(name, number)) != number:
            raise bad_request(
                f"tools[{number}]: {name[:80]!r} is the name of tools[{first}], too; calls tell tools by it", "tools"
            )
    return [] if body.tool_choice == "none" else list(body.tools or [])
