"""From the token stream of one answer to its parts: reasoning, content, tool calls, and why it ended.

Works token by token, so the cut of the stream into blocks cannot matter. One class serves every API.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from .text import StopStrings, Utf8Stream
from .tokenizer import END_THINK, END_TOOL_CALL, THINK, TOOL_CALL, TextTokenizer
from .tools import CallReader


@dataclass(frozen=True)
class AnswerStyle:
    """How to read an answer.

    split      tell reasoning apart; `thinking` says that the prompt has opened it
    one_call   the answer ends with its first tool call
    """

    stop_ids: frozenset[int]
    stops: list[str] = field(default_factory=list)
    split: bool = False
    thinking: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    one_call: bool = False


@dataclass(frozen=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer's text. `tokens`: how many it stands for; a token may show its text later, or none."""

    text: str
    tokens: int = 0


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; `index` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the text of a call's arguments, a JSON object."""

    text: str
    index: int


@dataclass(frozen=True)
class CallEnd:
    """A call ends. Not `whole`: the answer was cut inside, its arguments have no end; `known` are those read in full."""

    index: int
    whole: bool
    known: dict[str, Any]


Piece = Reasoning | Content | CallStart | CallArguments | CallEnd


@dataclass
class Delta:
    """What a stretch of tokens added, in its order; neighbours of one kind are joined.

    `in_content` has an entry for each token: True for those that Content pieces count.
    """

    pieces: list[Piece] = field(default_factory=list)
    in_content: list[bool] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        last = self.pieces[-1] if self.pieces else None
        if isinstance(piece, Reasoning | Content | CallArguments):
            if not piece.text and not (isinstance(piece, Content) and piece.tokens):
                return
            if isinstance(last, Content) and isinstance(piece, Content):
                self.pieces[-1] = Content(last.text + piece.text, last.tokens + piece.tokens)
                return
            if isinstance(last, Reasoning | CallArguments) and type(last) is type(piece):
                self.pieces[-1] = replace(last, text=last.text + piece.text)
                return
        self.pieces.append(piece)


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
        self._call = CallReader([])
        self._call_text: list[str] = []  # as written, until it is known to be a call
        self._started = False  # the client knows of the call
        self._calls = 0
        self._delta = Delta()
        self._think = tokenizer.marker(THINK) if style.split else None
        self._end_think = tokenizer.marker(END_THINK) if style.split else None
        self._tool = tokenizer.marker(TOOL_CALL) if style.tools else None
        self._end_tool = tokenizer.marker(END_TOOL_CALL) if style.tools else None
        self.tokens = 0
        self.reasoning_tokens = 0
        self.finish: str | None = None
        self.stop: str | int | None = None  # the stop string or the id that ended the answer

    def feed(self, token: int) -> None:
        """Take the next token of the answer."""
        if self.finish is not None:
            return
        self.tokens += 1
        self.reasoning_tokens += self._part is _Part.REASONING
        counted = False
        if token in self._style.stop_ids:
            self.stop = token
            self.end("stop")
        elif token == self._think and self._part is _Part.CONTENT and self._blank:
            self._enter(_Part.REASONING)
        elif token == self._end_think and self._part is _Part.REASONING:
            self._enter(_Part.CONTENT)
        elif token == self._tool and self._part is not _Part.CALL:
            self._enter(_Part.CALL)
        elif token == self._end_tool and self._part is _Part.CALL:
            self._text(self._utf8.end())
            self._close_call(END_TOOL_CALL)
        else:
            if counted := self._part is _Part.CONTENT:
                self._delta.add(Content("", 1))
            self._text(self._utf8.feed(self._tokenizer.shown_bytes(token)))
        self._delta.in_content.append(counted)

    def end(self, reason: str) -> None:
        """The stream is over: give out what was held.

        A call cut before its name is known is shown as the text that it is; one cut later has no end, unless the model
        itself ended the answer there.
        """
        if self.finish is not None:
            return
        self._text(self._utf8.end())
        if self.finish is not None:
            return
        if self._part is _Part.REASONING:
            self._newlines = ""
        elif self._part is _Part.CALL:
            if self._started and not self._call.closable and reason != "stop":
                self._delta.add(CallEnd(self._calls - 1, False, self._call.known))
            elif self._started:
                self._close_call("")
            else:
                self._show_call("")
        if self.finish is None:
            self._delta.add(Content(self._stops.end()))
            self.finish = "tool_calls" if self._calls and reason == "stop" else reason

    def take(self) -> Delta:
        """What has been added since the last call."""
        delta, self._delta = self._delta, Delta()
        return delta

    def _enter(self, part: _Part) -> None:
        self._text(self._utf8.end())
        if self._part is _Part.CONTENT:
            self._delta.add(Content(self._stops.end()))  # no stop string spans a marker
        self._newlines = ""
        self._trim = True
        self._part = part
        if part is _Part.CALL:
            self._call, self._call_text, self._started = CallReader(self._style.tools), [], False

    def _text(self, text: str) -> None:
        if self._part is _Part.CALL:
            arguments = self._call.feed(text)
            if not self._started:
                self._call_text.append(text)
                if self._call.name is not None:
                    self._start_call(self._call.name)
            self._delta.add(CallArguments(arguments, self._calls - 1))
        elif self._part is _Part.REASONING:
            self._delta.add(Reasoning(self._trimmed(text)))
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
        self._delta.add(Content(self._stops.feed(text)))
        if self._stops.stopped is not None:
            self.stop = self._stops.stopped
            self.finish = "stop"

    def _start_call(self, name: str) -> None:
        self._delta.add(CallStart(self._calls, name))
        self._calls += 1
        self._started, self._call_text = True, []

    def _close_call(self, closing: str) -> None:
        rest = self._call.close()
        if rest is None or self._call.name is None:
            self._show_call(closing)
            return
        if not self._started:
            self._start_call(self._call.name)
        self._delta.add(CallArguments(rest, self._calls - 1))
        self._delta.add(CallEnd(self._calls - 1, True, self._call.known))
        self._part, self._trim = _Part.CONTENT, True
        if self._style.one_call:
            self.finish = "tool_calls"

    def _show_call(self, closing: str) -> None:
        text, self._call_text = f"{TOOL_CALL}{''.join(self._call_text)}{closing}", []
        self._part, self._trim = _Part.CONTENT, False
        self._content(text)
