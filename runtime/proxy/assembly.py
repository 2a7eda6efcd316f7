"""From the token stream of one answer to its parts: reasoning, content, tool calls, and why it ended.

Works token by token, so the cut of the stream into blocks cannot matter. One class serves every API.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from .text import StopStrings, Utf8Stream
from .tokenizer import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, TextTokenizer
from .tools import ToolCall, parse_tool_call


@dataclass(frozen=True)
class AnswerStyle:
    """How to read an answer: `split` tells reasoning apart, `thinking` says that the prompt has opened it."""

    stop_ids: frozenset[int]
    stops: list[str] = field(default_factory=list)
    split: bool = False
    thinking: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Delta:
    """What a stretch of tokens added."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class _Part(Enum):
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class Assembler:
    """Feed tokens, take deltas. `finish` is the reason of the end once known; tokens after it are ignored."""

    def __init__(self, tokenizer: TextTokenizer, style: AnswerStyle) -> None:
        self._tokenizer = tokenizer
        self._style = style
        self._utf8 = Utf8Stream()
        self._stops = StopStrings(style.stops)
        self._part = _Part.REASONING if style.split and style.thinking else _Part.CONTENT
        self._newlines = ""  # held: those before a closing marker do not belong to the text
        self._trim = self._part is _Part.REASONING  # drop newlines after a marker
        self._blank = True  # no content yet: thinking may still begin
        self._call = ""
        self._called = False
        self._delta = Delta()
        self._think = tokenizer.marker(THINK) if style.split else None
        self._end_think = tokenizer.marker(END_THINK) if style.split else None
        self._tool = tokenizer.marker(TOOL_CALL) if style.tools else None
        self._end_tool = tokenizer.marker(END_TOOL_CALL) if style.tools else None
        self.tokens = 0
        self.finish: str | None = None

    def feed(self, token: int) -> None:
        """Take the next token of the answer."""
        if self.finish is not None:
            return
        self.tokens += 1
        if token in self._style.stop_ids:
            self.end("stop")
        elif token == self._think and self._part is _Part.CONTENT and self._blank:
            self._enter(_Part.REASONING)
        elif token == self._end_think and self._part is _Part.REASONING:
            self._enter(_Part.CONTENT)
        elif token == self._tool and self._part is not _Part.CALL:
            self._enter(_Part.CALL)
        elif token == self._end_tool and self._part is _Part.CALL:
            self._close_call()
        else:
            self._text(self._utf8.feed(self._tokenizer.shown_bytes(token)))

    def end(self, reason: str) -> None:
        """The stream is over: give out what was held. A call cut short is shown as the text that it is."""
        if self.finish is not None:
            return
        self._text(self._utf8.end())
        if self.finish is not None:
            return
        if self._part is _Part.REASONING:
            self._newlines = ""
        elif self._part is _Part.CALL:
            self._show_call("")
        if self.finish is None:
            self._delta.content += self._stops.end()
        self.finish = "tool_calls" if self._called and reason == "stop" else reason

    def take(self) -> Delta:
        """What has been added since the last call."""
        delta, self._delta = self._delta, Delta()
        return delta

    def _enter(self, part: _Part) -> None:
        self._text(self._utf8.end())
        if self._part is _Part.CONTENT:
            self._delta.content += self._stops.end()  # no stop string spans a marker
        self._newlines = ""
        self._trim = True
        self._part = part
        self._call = ""

    def _text(self, text: str) -> None:
        if self._part is _Part.CALL:
            self._call += text
        elif self._part is _Part.REASONING:
            self._delta.reasoning += self._trimmed(text)
        else:
            self._content(text)

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        text = self._newlines + text
        shown = text.rstrip("\n")
        self._newlines = text[len(shown) :]
        return shown

    def _content(self, text: str) -> None:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        if text.strip():
            self._blank = False
        self._delta.content += self._stops.feed(text)
        if self._stops.stopped:
            self.finish = "stop"

    def _close_call(self) -> None:
        self._text(self._utf8.end())
        call = parse_tool_call(self._call, self._style.tools)
        if call is None:
            self._show_call(END_TOOL_CALL)
            return
        self._called = True
        self._delta.calls.append(call)
        self._part, self._trim, self._call = _Part.CONTENT, True, ""

    def _show_call(self, closing: str) -> None:
        text, self._call = f"{TOOL_CALL}{self._call}{closing}", ""
        self._part, self._trim = _Part.CONTENT, False
        self._content(text)
