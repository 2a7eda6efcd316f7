"""How probable a running server finds a text: completions with `echo` and `logprobs`, a window at a time.

The text goes as text, so that any tokenizer will do. A window's first token has no probability and is not scored; figures
of two servers of one tokenizer are therefore of the same tokens, but not those of `duovolt eval DIR`, which scores every token.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ..checkpoint.digest import digest_bytes
from ..checkpoint.errors import CheckFailed, InputError, one_line
from .counts import Count
from .graded.result import TextScore
from .serve_stream import Endpoint

LEAST_BYTES = 64  # a window that is refused is halved down to this
_BYTES_A_TOKEN = 3  # of prose; a guess, put right by halving
_PROBE = "The quick brown fox jumps over the lazy dog."


class _Logprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


@dataclass(frozen=True)
class Window:
    """`tokens` by text, the first unscored; `logprobs[i]`, `top[i]` belong to `tokens[i + 1]`, nats."""

    text: str
    tokens: list[str]
    logprobs: list[float]
    top: list[dict[str, float]]


class NoEcho(InputError):
    """The server does not give a prompt's own probabilities."""


class TextServer:
    """One server's probabilities of texts, with the `top` likeliest tokens of every position."""

    def __init__(self, endpoint: Endpoint, model: str, top: int) -> None:
        """Raises NoEcho, CheckFailed, EnvironmentFault."""
        self._endpoint, self._model, self.top = endpoint, model, top
        try:
            self.score(_PROBE)
        except NoEcho:
            raise
        except InputError as error:
            raise NoEcho(f"{endpoint.url}: {_NO_ECHO} ({error})") from None

    def score(self, text: str) -> Window:
        """Raises InputError if the server refuses the text, NoEcho, CheckFailed, EnvironmentFault."""
        body = {
            "model": self._model, "prompt": text, "max_tokens": 1, "temperature": 0.0, "echo": True, "logprobs": self.top,
        }  # fmt: skip
        raw = self._endpoint.ask("/v1/completions", body)
        try:
            found = msgspec.json.decode(raw, type=_Completion)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise CheckFailed(f"/v1/completions: no completion: {one_line(error)}.") from None
        choice = found.choices[0] if found.choices else None
        if choice is None or choice.logprobs is None or not choice.text.startswith(text):
            raise NoEcho(f"{self._endpoint.url}: {_NO_ECHO}")
        return _window(text, choice.logprobs, None if found.usage is None else found.usage.prompt_tokens)


_NO_ECHO = "this server gives no log-probabilities of a prompt (completions with echo and logprobs)"


def _window(text: str, given: _Logprobs, prompt_tokens: int | None) -> Window:
    """The prompt's part; what was generated after it is dropped."""
    count = len(given.tokens) - 1 if prompt_tokens is None else prompt_tokens
    top = given.top_logprobs or []
    if not 0 < count <= len(given.tokens) == len(given.token_logprobs) or (top and len(top) != len(given.tokens)):
        raise CheckFailed("/v1/completions: tokens, token_logprobs and top_logprobs do not match in number.")
    logprobs = given.token_logprobs[1:count]
    if not logprobs:
        raise NoEcho(_NO_ECHO)
    scored = [value for value in logprobs if value is not None and math.isfinite(value) and value < 0.01]
    if len(scored) != len(logprobs):
        raise CheckFailed("/v1/completions: a token of the prompt has no log-probability, or one above 0.")
    tops = [one or {} for one in top[1:count]] or [{} for _ in scored]
    for one in tops:
        if not all(math.isfinite(value) and value < 0.01 for value in one.values()):
            raise CheckFailed("/v1/completions: top_logprobs holds what is no log-probability.")
    return Window(text, given.tokens[:count], scored, tops)


def windows_of(text: str, nbytes: int) -> Iterator[str]:
    """The text in pieces of at most `nbytes` bytes of UTF-8, cut after white space where there is some."""
    while text:
        piece = text.encode()[:nbytes].decode(errors="ignore") or text[0]
        if len(piece) < len(text):
            at = max(piece.rfind(" "), piece.rfind("\n"))
            piece = piece[:at] if at > len(piece) // 2 else piece  # a space begins the next token
        yield piece
        text = text[len(piece) :]


def score_text(
    server: TextServer,
    texts: list[str],
    window_tokens: int,
    limit_bytes: int,
    tick: Callable[[int], None] = lambda count: None,
) -> list[Window]:
    """Windows of about `window_tokens` tokens over `texts`, `limit_bytes` bytes in all; one too long for the server is halved.

    Raises InputError if even short ones are refused, CheckFailed, EnvironmentFault.
    """
    found: list[Window] = []
    nbytes = window_tokens * _BYTES_A_TOKEN
    for text in texts:
        rest = text.encode()[:limit_bytes].decode(errors="ignore")
        limit_bytes -= len(rest.encode())
        while rest:
            piece = next(windows_of(rest, nbytes))
            try:
                window = server.score(piece)
            except NoEcho:  # a last piece of one token
                if len(piece.encode()) >= LEAST_BYTES:
                    raise
            except InputError:
                if nbytes // 2 < LEAST_BYTES:
                    raise
                nbytes //= 2
                continue
            else:
                found.append(window)
            tick(len(piece.encode()))
            rest = rest[len(piece) :]
    if not found:
        raise InputError("--text: holds too little text to score.")
    return found


def total(windows: list[Window]) -> TextScore:
    """The sum over windows; bytes without those of the unscored first tokens."""
    nats = [-math.fsum(window.logprobs) for window in windows]
    nbytes = 0
    for window in windows:
        first = window.tokens[0] if window.text.startswith(window.tokens[0]) else ""
        nbytes += len(window.text.encode()) - len(first.encode())
    cut = digest_bytes(msgspec.json.encode([[window.text, window.tokens] for window in windows]))[:16]
    tokens = sum(len(window.logprobs) for window in windows)
    return TextScore(math.fsum(nats), tokens, max(1, nbytes), [round(value, 6) for value in nats], cut)
