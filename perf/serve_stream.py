"""One streamed chat answer of any OpenAI-compatible server, with the times at which it came.

What our server says of itself (`duovolt` in the last chunk: drafts, cache) is used where it is there; of any other server
acceptance and rounds stay unknown.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from ..checkpoint.errors import CheckFailed, EnvironmentFault, InputError, one_line
from ..runtime.proxy.reach import reach, unreachable, wants_tls
from .counts import Count

CONNECT_SECONDS = 10.0
_SHOWN = 200
_LONGEST_LINE = 16 << 20  # bytes of an event
_LONGEST_ANSWER = 256 << 20  # bytes of an answer that is not streamed
_LONGEST_SECONDS = 7200.0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count
    completion_tokens: Count
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    drafts_proposed: Count = 0
    drafts_accepted: Count = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    duovolt: _Timings | None = None
    error: Any = None  # what a server sends when the answer cannot go on


@dataclass(frozen=True)
class Streamed:
    """`first_ms` from sending to the first piece of text, `decode_ms` from there to the last.

    `accepted`, `proposed`: drafts; None if the server does not tell. `cached_tokens` likewise.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    first_ms: float
    decode_ms: float
    proposed: int | None
    accepted: int | None


class Endpoint:
    """One server. `key` goes into every request's Authorization header."""

    def __init__(self, url: str, key: str | None, silence_seconds: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Accept-Encoding": "identity"}  # pieces are read as they come
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        self._http = reach(url, headers, httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS), proxies=False)

    def close(self) -> None:
        self._http.close()

    def get(self, path: str) -> Any:
        """A JSON answer; None if the server has no such path.

        Raises EnvironmentFault if there is no server, InputError if it wants another key.
        """
        return self._json("GET", path, None)

    def count_tokens(self, text: str) -> int | None:
        """Tokens of a text by `/tokenize`; None if the server does not have it."""
        found = self._json("POST", "/tokenize", {"prompt": text})
        count = found.get("count") if isinstance(found, dict) else None
        return count if type(count) is int and count > 0 else None

    def _json(self, verb: str, path: str, body: Any) -> Any:
        try:
            with self._http.stream(verb, path, json=body) as response:
                if response.status_code == httpx.codes.UNAUTHORIZED:
                    raise _refusal(response)
                response.read()
            return response.json() if response.status_code == 200 else None
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise unreachable(self.url, error) from None
        except httpx.HTTPError as error:
            if wants_tls(self.url, error):
                raise EnvironmentFault(f"{self.url} hangs up unanswered ({one_line(error)}); is it https://?") from None
            return None
        except ValueError:
            return None

    def ask(self, path: str, body: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed.

        Raises InputError if it is refused, CheckFailed if it is broken off or without end, EnvironmentFault.
        """
        begun = time.monotonic()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response)
                found = bytearray()
                for piece in response.iter_bytes():
                    found += piece
                    if len(found) > _LONGEST_ANSWER or time.monotonic() - begun > _LONGEST_SECONDS:
                        raise CheckFailed(f"the server's answer to {path} has no end.")
                return bytes(found)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise unreachable(self.url, error) from None
        except httpx.HTTPError as error:
            raise CheckFailed(f"the server broke the answer off ({one_line(error) or type(error).__name__}).") from None

    def stream(self, body: dict[str, Any], seen: Callable[[int], None] = lambda pieces: None) -> Streamed:
        """Ask for an answer and read it to its end; `seen` is told the pieces so far.

        Raises InputError if it is refused, CheckFailed if it is broken off or no chat answer, EnvironmentFault.
        """
        reading = _Reading()
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise _refusal(response)
                for line in _lines(response):
                    reading.take(line)
                    seen(reading.pieces)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol) as error:
            raise unreachable(self.url, error) from None
        except httpx.HTTPError as error:
            raise CheckFailed(f"the server broke the answer off ({one_line(error) or type(error).__name__}).") from None
        return reading.result()


class _Reading:
    """An answer in the making."""

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.first: float | None = None
        self.last = 0.0
        self.ended = self.sent
        self.pieces = 0
        self.usage: _Usage | None = None
        self.timings: _Timings | None = None
        self.done = False

    def take(self, line: bytes) -> None:
        now = time.perf_counter()
        if not line.startswith(b"data:"):
            return
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            shown = data[:_SHOWN].decode(errors="replace")
            raise CheckFailed(f"the server sent {shown!r}, which is no piece of a chat answer.") from None
        if chunk.error is not None:
            raise CheckFailed(f"the server broke the answer off: {_message(chunk.error)}")
        self.usage = chunk.usage or self.usage
        self.timings = chunk.duovolt or self.timings
        for choice in chunk.choices:
            if choice.finish_reason is not None:
                self.done, self.ended = True, now
            if choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning:
                self.first = now if self.first is None else self.first
                self.last, self.pieces = now, self.pieces + 1

    def result(self) -> Streamed:
        if not self.done:
            raise CheckFailed("the answer ended without saying why.")
        if self.usage is None:
            raise CheckFailed("the server does not tell usage when asked for it (stream_options.include_usage).")
        if self.usage.completion_tokens < 1:
            raise CheckFailed("the answer ended without a token.")
        if self.first is None:  # tokens that show nothing, as a mark that ends the thinking
            self.first = self.last = self.ended
        details, timings = self.usage.prompt_tokens_details, self.timings
        return Streamed(
            prompt_tokens=self.usage.prompt_tokens,
            completion_tokens=self.usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
            first_ms=round((self.first - self.sent) * 1e3, 3),
            decode_ms=round((self.last - self.first) * 1e3, 3),
            proposed=None if timings is None else timings.drafts_proposed,
            accepted=None if timings is None else timings.drafts_accepted,
        )


def _lines(response: httpx.Response) -> Any:
    """Lines of the stream, each bounded."""
    rest = b""
    for piece in response.iter_raw():
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
        if len(rest) > _LONGEST_LINE:
            raise CheckFailed(f"the server sent a line of more than {_LONGEST_LINE >> 20} MB.")
    yield rest


def _refusal(response: httpx.Response) -> InputError | CheckFailed:
    raw = b""
    for piece in response.iter_raw():
        raw += piece
        if len(raw) > 1 << 16:
            break
    message: Any = raw[:_SHOWN].decode(errors="replace")
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, KeyError):
        message = msgspec.json.decode(raw)["error"]
    kind = InputError if response.status_code < 500 else CheckFailed
    return kind(f"the server answered {response.status_code}: {_message(message)}")


def _message(error: Any) -> str:
    """The words of an error, of whatever shape, as one line."""
    words = error.get("message", error) if isinstance(error, dict) else error
    return "".join(c if c.isprintable() else " " for c in str(words)[: 2 * _SHOWN])
