"""The chat template that ships with the checkpoint, rendered in a sandbox as the model's makers render it."""

from __future__ import annotations

import json
from datetime import datetime
from enum import Enum, auto
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...checkpoint.directory import MAX_JSON, require_file
from ...checkpoint.errors import InputError
from .errors import ApiError, bad_request
from .tokenizer import THINK, TOOL_CALL, TextTokenizer

TEMPLATE_FILE = "chat_template.jinja"
_FIXED = frozenset({"messages", "tools", "add_generation_prompt"})
_COMMON = frozenset({"enable_thinking", "reasoning_effort"})


class ToolFormat(Enum):
    """How the template writes tool calls, and so how the model does."""

    PARAMETERS = auto()  # <function=NAME> and <parameter=KEY>
    JSON = auto()  # {"name": ..., "arguments": ...}


class ChatTemplate:
    """Messages to a prompt. `source` is None if the checkpoint has no template: chat is then refused."""

    def __init__(self, directory: Path, tokenizer: TextTokenizer) -> None:
        path = directory / TEMPLATE_FILE
        source = _read_source(path) if path.exists() else tokenizer.settings.get("chat_template")
        self._template: jinja2.Template | None = None
        self._reads: frozenset[str] = frozenset()
        self._tokens = {
            name: value.get("content") if isinstance(value, dict) else value
            for name, value in tokenizer.settings.items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        older = isinstance(source, str) and TOOL_CALL in source and "<function=" not in source
        self.tool_format = ToolFormat.JSON if older else ToolFormat.PARAMETERS
        if isinstance(source, str):
            try:
                environment = _environment()
                self._template = environment.from_string(source)
                self._reads = frozenset(
                    meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
                )
            except (jinja2.TemplateError, RecursionError, ValueError) as error:  # the latter: a number of many digits
                raise InputError(f"{path}: the chat template does not compile: {error}.") from error

    def variables(self, given: dict[str, Any] | None) -> dict[str, Any]:
        """What `chat_template_kwargs` sets. Raises ApiError for a name that the template does not read, as a misspelt one.

        The two that every client may send change nothing where the template does not know them.
        """
        unread = [name for name in given or {} if name in _FIXED or name not in self._reads | _COMMON]
        if unread and self._template is not None:
            known = ", ".join(sorted(self._reads - _FIXED - self._tokens.keys())) or "none"
            raise bad_request(
                f"chat_template_kwargs: the model's template reads no {unread[0][:40]!r} of a request; its variables: {known}",
                "chat_template_kwargs",
            )
        return dict(given or {})

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any],
        opens: bool = True,
    ) -> str:
        """The prompt up to the point where the assistant begins, or `opens` False: up to the end of the last message.

        Raises ApiError with the template's own message.
        """
        if self._template is None:
            raise bad_request("this model has no chat template; use /v1/completions")
        fixed = {"messages": messages, "tools": tools, "add_generation_prompt": opens}
        try:
            return self._template.render(**(self._tokens | variables | fixed))
        except ApiError:
            raise
        except Exception as error:  # a template may fail in any way on what a client sends
            raise bad_request(f"the chat template refuses this conversation: {error}", "messages") from error


def _read_source(path: Path) -> str:
    require_file(path, MAX_JSON, "a chat template")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; fetch the file again.") from error


def opens_thinking(prompt: str) -> bool:
    """True if the prompt itself has begun the assistant's thinking."""
    return prompt.rstrip().endswith(THINK)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As the model's makers render it: no HTML escapes, keys in the order of the request."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise bad_request(message, "messages")
