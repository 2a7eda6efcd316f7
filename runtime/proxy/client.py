"""A client of the chat API for the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx

from ...checkpoint.errors import CheckFailed, EnvironmentFault, InputError

_CONNECT_SECONDS = 5.0
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ChatClient:
    """One server. `settings` go into every request."""

    def __init__(self, url: str, key: str | None, settings: dict[str, Any]) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._settings = settings
        timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)  # a long prompt may keep the first token for minutes
        try:
            self._http = httpx.Client(base_url=self._url, headers=headers, timeout=timeout)
        except (httpx.InvalidURL, ValueError) as error:
            raise InputError(f"--url {url}: {error}.") from error

    def stream(self, messages: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
        """The chunks of an answer. Raises InputError (refused), CheckFailed (broken off), EnvironmentFault (no server)."""
        body = {"messages": messages, "stream": True, **self._settings}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, response.read())
                yield from _chunks(response)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise EnvironmentFault(f"no server at {self._url} ({error}); start one with `duovolt serve`.") from error
        except httpx.HTTPError as error:
            raise CheckFailed(
                f"the server at {self._url} broke the answer off ({error}); its log tells why."
            ) from error


def converse(client: ChatClient, system: str | None, once: str | None, quiet: bool) -> int:
    """One question, or questions from the terminal until end of input; the exit code."""
    history: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    if once is not None:
        answer(client, [*history, {"role": "user", "content": once}], quiet)
        return 0
    if not quiet:
        print("Ctrl-D ends, Ctrl-C stops an answer.", file=sys.stderr)
    while (question := _read_question()) is not None:
        if not question.strip():
            continue
        history.append({"role": "user", "content": question})
        try:
            history.append({"role": "assistant", "content": answer(client, history, quiet)})
        except KeyboardInterrupt:
            history.pop()
            print("\n(stopped)", file=sys.stderr)
        except InputError as error:
            history.pop()
            print(f"duovolt: {error}", file=sys.stderr)
    return 0


def answer(client: ChatClient, messages: list[dict[str, str]], quiet: bool) -> str:
    """Print an answer as it comes, reasoning dimmed on the error stream; returns the text without reasoning."""
    dim, plain = (_DIM, _PLAIN) if sys.stderr.isatty() else ("", "")
    text, thinking, finish = "", False, None
    timings: dict[str, Any] = {}
    for chunk in client.stream(messages):
        timings = chunk.get("duovolt") or timings
        choice = chunk["choices"][0] if chunk["choices"] else {"delta": {}}
        finish = choice.get("finish_reason") or finish
        if (reasoning := choice["delta"].get("reasoning_content")) and not quiet:
            print(f"{dim}{reasoning}{plain}", end="", file=sys.stderr, flush=True)
            thinking = True
        if content := choice["delta"].get("content"):
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


def describe(timings: dict[str, Any]) -> str:
    """The `duovolt` field of an answer in words."""
    parts = [f"first token after {timings['prompt_ms']:,.0f} ms"]
    if timings["tokens_per_second"] is not None:
        parts.append(f"then {timings['tokens_per_second']:,.1f} tok/s")
    if timings["drafts_proposed"]:
        parts.append(f"{timings['drafts_accepted']} of {timings['drafts_proposed']} drafts accepted")
    return ", ".join(parts)


def _read_question() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise CheckFailed(chunk["error"]["message"])
            yield chunk


def _refusal(status: int, raw: bytes) -> InputError | CheckFailed:
    try:
        message = json.loads(raw)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = raw[:200].decode(errors="replace")
    return (InputError if status < 500 else CheckFailed)(f"the server answered {status}: {message}")
