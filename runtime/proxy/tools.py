"""Tool calls as the family writes them, between `<tool_call>` and `</tool_call>`, read while they are written.

`<function=NAME>`, then `<parameter=KEY>` VALUE `</parameter>` on lines of their own, any number, then `</function>`.
Values are text, typed by the tool's JSON schema. Older templates put `{"name": ..., "arguments": {...}}` there instead.
The model may write anything there: what does not begin as a call is no call, and what is given out is strict JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from . import strict_json
from .parameters import is_text, kinds_of, parameters_of, properties_of, typed

END_PARAMETER, END_FUNCTION = "</parameter>", "</function>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_NEXT = re.compile(r"<parameter=([^>\n]+)>\n?|</function>")
_MARKS = ("<parameter=", END_FUNCTION)
_VALUE_ENDS = ("\n" + END_PARAMETER, END_PARAMETER, "\n" + END_FUNCTION + "\n")


@dataclass(frozen=True)
class ToolCall:
    """A call: the function's name and its arguments, a JSON object as text; neither holds a lone surrogate."""

    name: str
    arguments: str


class _State(Enum):
    OPENING = auto()  # nothing read yet
    JSON = auto()  # the older form, read as a whole at its end
    HELD = auto()  # a function that the request does not have, read as a whole at its end
    BETWEEN = auto()  # before a parameter or the function's end
    VALUE = auto()
    DONE = auto()


class CallReader:
    """Feed the text between the markers as it comes.

    `name` is known once the text has begun as a call of one of the tools: from then on it is one, whatever follows.
    Arguments come as pieces of the text of a JSON object: a parameter of type string while it is written, any other when
    it is whole. Text between parameters is dropped, as is a parameter given a second time. A function of another name,
    which may be no more than a mention of the form, is a call if it is one from beginning to end.
    """

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._tools = tools
        self._state = _State.OPENING
        self._rest = ""  # read, not yet understood
        self._kept: list[str] = []  # what follows it where nothing is understood before the end
        self._parameters: dict[str, Any] = {}
        self._keys: set[str] = set()
        self._key = ""
        self._kinds: frozenset[str] = frozenset()
        self._skip = False  # the parameter was given before
        self._begun = False  # the value's opening quote is out
        self._known: dict[str, Any] = {}
        self._text = ""  # of the value that is being read
        self._searched = 0  # characters of `_rest` that hold no end of a value
        self.name: str | None = None

    def feed(self, text: str) -> str:
        """Take more text; the piece of the arguments that it added."""
        if self._state in (_State.JSON, _State.HELD):
            self._kept.append(text)
            return ""
        self._rest += text
        pieces = ""
        while True:
            before = self._state, len(self._rest)
            pieces += self._advance()
            if (self._state, len(self._rest)) == before:
                return pieces

    def close(self) -> str | None:
        """The call's end has come: the last piece of the arguments, None if this is no call.

        What was begun is closed: a value that has no end marker ends here.
        """
        self._rest += "".join(self._kept)
        if self._state is _State.JSON:
            call = _parse_json(self._rest)
            if call is None:
                return None
            self.name = call.name
            self._known = strict_json.parse(call.arguments)
            return call.arguments
        if self._state is _State.HELD:
            return self._close_held()
        if self.name is None:
            return None
        pieces = ""
        if self._state is _State.VALUE:
            value = re.sub(rf"\n?({re.escape(END_PARAMETER)}|{re.escape(END_FUNCTION)})?\s*$", "", self._rest, count=1)
            pieces = self._end_value(value)
        self._state = _State.DONE
        return pieces + ("}" if self._keys else "{}")

    def _close_held(self) -> str | None:
        match = _FUNCTION.match(self._rest)
        assert match is not None, "that is what brought the reader here"
        inner = CallReader([{"name": match[1].strip()}])
        pieces = inner.feed(self._rest)
        if not inner.closable:
            return None
        self.name, self._known = inner.name, inner.known
        return pieces + (inner.close() or "")

    @property
    def closable(self) -> bool:
        """True if nothing but the end is missing."""
        return self._state is _State.DONE

    @property
    def known(self) -> dict[str, Any]:
        """The parameters that have been read to their end."""
        return self._known

    def _advance(self) -> str:
        if self._state is _State.OPENING:
            match = _FUNCTION.match(self._rest)
            if match and match[1].strip() not in {tool.get("function", tool).get("name") for tool in self._tools}:
                self._state = _State.HELD
            elif match:
                self.name = whole_characters(match[1].strip())
                self._parameters = parameters_of(match[1].strip(), self._tools)
                self._rest, self._state = self._rest[match.end() :], _State.BETWEEN
            elif self._rest.lstrip().startswith("{"):
                self._state = _State.JSON
        elif self._state is _State.BETWEEN:
            return self._next_parameter()
        elif self._state is _State.VALUE:
            return self._more_value()
        elif self._state is _State.DONE:
            self._rest = ""
        return ""

    def _next_parameter(self) -> str:
        match = _NEXT.search(self._rest)
        if match is None:
            start = max(self._rest.rfind(mark[:2]) for mark in _MARKS)
            self._rest = self._rest[start:] if start >= 0 else self._rest[-1:]
            return ""
        if match[1] is not None and match.end() == len(self._rest) and not match[0].endswith("\n"):
            return ""  # a line end may follow, which is not the value's
        self._rest = self._rest[match.end() :]
        if match[1] is None:
            self._state = _State.DONE
            return ""
        self._key, self._state = match[1].strip(), _State.VALUE
        self._kinds = kinds_of(properties_of(self._parameters).get(self._key), self._parameters)
        self._skip, self._begun, self._text = self._key in self._keys, False, ""
        return ""

    def _more_value(self) -> str:
        end = self._rest.find(END_PARAMETER, self._searched)
        self._searched = max(len(self._rest) - len(END_PARAMETER), 0)
        if end >= 0:
            value, self._rest = self._rest[:end], self._rest[end + len(END_PARAMETER) :]
            self._state, self._searched = _State.BETWEEN, 0
            return self._end_value(value.removesuffix("\n"))
        if not is_text(self._kinds):
            return ""
        held = max(_overlap(self._rest, mark) for mark in _VALUE_ENDS)
        if not self._begun and "null" in self._kinds and "null".startswith(self._rest[: len(self._rest) - held]):
            return ""
        shown, self._rest = self._rest[: len(self._rest) - held], self._rest[len(self._rest) - held :]
        self._searched = 0
        return self._show(shown) if shown else ""

    def _show(self, text: str) -> str:
        self._text += text
        if self._skip:
            return ""
        opening = "" if self._begun else self._opening() + '"'
        self._begun = True
        return opening + strict_json.spell(text)[1:-1]

    def _end_value(self, rest: str) -> str:
        text = self._text + rest
        value = text if self._begun else typed(text, self._kinds)
        try:
            spelled = whole_characters(strict_json.spell(value))
        except ValueError:  # a nest too deep to write
            value, spelled = text, strict_json.spell(text)
        if self._skip:
            return ""
        self._known[self._key] = value if isinstance(value, str) and self._begun else strict_json.parse(spelled)
        if self._begun:
            return strict_json.spell(rest)[1:-1] + '"'
        return self._opening() + spelled

    def _opening(self) -> str:
        piece = ("{" if not self._keys else ", ") + whole_characters(strict_json.spell(self._key)) + ": "
        self._keys.add(self._key)
        return piece


def parse_tool_call(text: str, tools: list[dict[str, Any]]) -> ToolCall | None:
    """The call that stands between the markers; None if it does not begin as one."""
    reader = CallReader(tools)
    pieces = reader.feed(text)
    last = reader.close()
    return None if last is None or reader.name is None else ToolCall(reader.name, pieces + last)


def whole_characters(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which JSON's escapes can write and UTF-8 cannot."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    return next((size for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _parse_json(text: str) -> ToolCall | None:
    try:
        call = strict_json.parse(text)  # an object: the text begins with a brace
        arguments = call.get("arguments")
        if isinstance(arguments, str):  # some models write the object as text, as the API has it
            arguments = strict_json.parse(arguments)
        name = call.get("name")
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        return ToolCall(whole_characters(name), whole_characters(strict_json.spell(arguments)))
    except ValueError:
        return None
