"""A client of the chat API for the terminal. What a server sends is checked: any address may be given as one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from ...checkpoint.errors import CheckFailed, EnvironmentFault, InputError
from .reach import reach, unreachable, wants_tls

_CONNECT_SECONDS = 5.0
_SHOWN = 200  # characters of a server's words that a message repeats
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Delta(Struct):
    """What a chunk adds."""

    content: str | None = None
    reasoning_content: str | None = None


class Choice(Struct):
    """The one answer of a chunk."""

    delta: Delta
    finish_reason: str | None = None


class Timings(Struct):
    """Milliseconds to the first token, tokens a second from there, drafts proposed and accepted."""

    prompt_ms: float
    tokens_per_second: float | None
    drafts_proposed: int
    drafts_accepted: int


class Chunk(Struct):
    """One event of a streamed answer; `choices` is empty in those that carry only usage."""

    choices: list[Choice]
    duovolt: Timings | None = None


class ChatClient:
    """One server. `settings` go into every request."""

    def __init__(self, url: str, key: str | None, settings: dict[str, Any]) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)  # a long prompt may keep the first token for minutes
        self._http = reach(url, headers, timeout, proxies=True)
        self._url = url.rstrip("/").removesuffix("/v1")
        self._settings = settings

    def stream(self, messages: list[dict[str, str]]) -> Iterator[Chunk]:
        """The chunks of an answer.

        Raises InputError (refused), CheckFailed (broken off, or no chat answer at all), EnvironmentFault (no server).
        """
        body = {"messages": messages, "stream": True, **self._settings}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, response.read())
                yield from _chunks(response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise unreachable(self._url, error, "; start one with `duovolt serve`") from error
        except httpx.HTTPError as error:
            other = ", or it is to be asked by https://" if wants_tls(self._url, error) else ""
            raise CheckFailed(
                f"the server at {self._url} broke the answer off ({error}); its log tells why{other}."
            ) from error


def converse(client: ChatClient, system: str | None, once: str | None, quiet: bool) -> int:
    """One question, or questions until the end of input; the exit code.

    An answer that is refused or broken off does not end the conversation: of a terminal's the code is 0 then, of a pipe's
    that of the last such fault.
    """
    history: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    if system is not None:
        _check_text(system, "--system")
    if once is not None:
        _check_text(once, "--once")
        answer(client, [*history, {"role": "user", "content": once}], quiet)
        return 0
    if not quiet:
        print("Ctrl-D ends, Ctrl-C stops an answer.", file=sys.stderr)
    code = 0
    while (question := _read_question()) is not None:
        if not question.strip():
            continue
        history.append({"role": "user", "content": question})
        try:
            history.append({"role": "assistant", "content": answer(client, history, quiet)})
        except KeyboardInterrupt:
            history.pop()
            print("\n(stopped)", file=sys.stderr)
        except (InputError, CheckFailed) as error:
            history.pop()
            print(f"duovolt: {error}", file=sys.stderr)
            code = error.exit_code
    return 0 if sys.stdin.isatty() else code


def answer(client: ChatClient, messages: list[dict[str, str]], quiet: bool) -> str:
    """Print an answer as it comes, reasoning dimmed on the error stream; returns the text without reasoning."""
    dim, plain = (_DIM, _PLAIN) if sys.stderr.isatty() else ("", "")
    text, thinking, finish = "", False, None
    timings: Timings | None = None
    for chunk in _to_its_end(client.stream(messages)):
        timings = chunk.duovolt or timings
        choice = chunk.choices[0] if chunk.choices else Choice(Delta())
        finish = choice.finish_reason or finish
        if (reasoning := choice.delta.reasoning_content) and not quiet:
            print(f"{dim}{reasoning}{plain}", end="", file=sys.stderr, flush=True)
            thinking = True
        if content := choice.delta.content:
            if thinking:
                print("\n", file=sys.stderr)
                thinking = False
            text += content
            print(content, end="", flush=True)
    print(flush=True)
    if finish is None:
        raise CheckFailed("the answer ended without a reason; the server's log tells why.")
    if finish == "length" and not quiet:
        print("(cut at the length limit)", file=sys.stderr)
    if timings and not quiet:
        print(f"{dim}({describe(timings)}){plain}", file=sys.stderr, flush=True)
    return text


def _to_its_end(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """An answer that breaks off ends its line: the message stands on one of its own."""
    begun = False
    try:
        for chunk in chunks:
            yield chunk
            begun = begun or any(choice.delta.content for choice in chunk.choices)
    except (CheckFailed, EnvironmentFault):
        if begun:
            print(flush=True)
        raise


def describe(timings: Timings) -> str:
    """The `duovolt` field of an answer in words."""
    parts = [f"first token after {timings.prompt_ms:,.0f} ms"]
    if timings.tokens_per_second is not None:
        parts.append(f"then {timings.tokens_per_second:,.1f} tok/s")
    if timings.drafts_proposed:
        parts.append(f"{timings.drafts_accepted} of {timings.drafts_proposed} drafts accepted")
    return ", ".join(parts)


def _read_question() -> str | None:
    try:
        question = input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"the input is not {error.encoding} text: {error.reason}.") from error
    _check_text(question, "the input")
    return question


def _check_text(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that were no characters, carried through as surrogates
        raise InputError(f"{where}: character {error.start + 1} is not valid UTF-8.") from error


def _chunks(response: httpx.Response) -> Iterator[Chunk]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield _chunk(line.removeprefix("data: "))


def _chunk(text: str) -> Chunk:
    """An event as a chunk. Raises CheckFailed with the server's own message, or if the event is none of the API's."""
    try:
        return msgspec.json.decode(text, type=Chunk)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        said = _message(text.encode())
        if said is not None:
            raise CheckFailed(f"the server broke the answer off: {said}") from error
        raise CheckFailed(
            f"the server sent {text[:_SHOWN]!r}, which is no piece of a chat answer ({error}); is --url right?"
        ) from error


def _message(raw: bytes) -> str | None:
    """The message of an error body, in any of the shapes that servers give it; None if it is no error body."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None if error is None else repr(error)[:_SHOWN]


def _refusal(status: int, raw: bytes) -> InputError | CheckFailed:
    message = _message(raw)
    if message is None:
        message = raw[:_SHOWN].decode(errors="replace")
    return (InputError if status < 500 else CheckFailed)(f"the server answered {status}: {message}")
