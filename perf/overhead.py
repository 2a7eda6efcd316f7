"""What the server itself costs: the pace that clients see beside the engine's, CPU a token, memory over many requests."""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint.errors import CheckFailed
from ..runtime.proxy.assembly import AnswerStyle, Assembler
from .scripted_server import ScriptedServer, scripted_server

_SILENCE_SECONDS = 30.0
_APART_SECONDS = 0.02  # between the requests of clients that read at once: each first token is to be seen by itself
_SAMPLES = 20  # of memory
_SHORT_TOKENS = 8


@dataclass(frozen=True)
class StreamCost:
    """`rates`: tokens a second of each answer after its first; `share`: their median over the engine's pace.

    `first_byte_ms`: from the first token in the proxy to its first byte at the client, at most: connecting, and what the
    server does before it hands the request to the ranks, is in it.
    """

    clients: int
    rates: list[float]
    share: float
    first_byte_ms: float
    worst_first_byte_ms: float
    engine_us: float
    detokenise_us: float
    http_us: float


@dataclass(frozen=True)
class MemoryCost:
    """Resident memory of the proxy; the slope is of a line through the samples after the first fifth."""

    requests: int
    first_mb: float
    last_mb: float
    slope_bytes: float
    per_second: float


@dataclass
class _Reading:
    """One answer on one socket."""

    sock: socket.socket
    asked: float
    tail: bytes = b""
    first: float | None = None
    last: float = 0.0
    chunks: list[bytes] = field(default_factory=list)

    def take(self, data: bytes, now: float) -> bool:
        """True once the answer is whole."""
        if self.first is None and b'"content":"' in data.replace(b'"content":""', b""):
            self.first = now
        self.last = now
        self.chunks.append(data)
        self.tail = (self.tail + data)[-64:]
        return b"data: [DONE]\n\n" in self.tail


def measure_stream(rate: int, tokens: int, clients: int, rounds: int, ranks: int) -> StreamCost:
    """`clients` answers at once, `rounds` times, each of `tokens` tokens at `rate` a second.

    Raises CheckFailed if an answer is not whole.
    """
    with scripted_server(tokens, 1000 / rate, clients, ranks) as server:
        _read_together(server, clients, min(tokens, 50))  # the first answer pays for what is made on first use
        before = [_cpu_seconds(pid) for pid in (server.proxy, *server.ranks)]
        rates, delays = [], []
        for _ in range(rounds):
            for reading in _read_together(server, clients, tokens):
                timings = _timings(reading, tokens)
                assert reading.first is not None
                rates.append((tokens - 2) / (reading.last - reading.first))
                delays.append(1000 * (reading.first - reading.asked) - timings["prompt_ms"])
        spent = [_cpu_seconds(pid) - start for pid, start in zip((server.proxy, *server.ranks), before, strict=True)]
        detokenise = _detokenise_seconds(server)
    answered = tokens * clients * rounds
    return StreamCost(
        clients,
        rates,
        statistics.median(rates) / rate,
        statistics.median(delays),
        max(delays),
        1e6 * statistics.mean(spent[1:]) / answered,
        1e6 * detokenise,
        1e6 * (spent[0] / answered - detokenise),
    )


def measure_memory(requests: int, ranks: int) -> MemoryCost:
    """Short answers, one after another, each on a connection of its own."""
    with scripted_server(_SHORT_TOKENS, 0, 1, ranks) as server:
        samples = []
        begin = time.perf_counter()
        for number in range(requests):
            _read_together(server, 1, _SHORT_TOKENS)
            if number % max(requests // _SAMPLES, 1) == 0:
                samples.append((number, _resident_bytes(server.proxy)))
        seconds = time.perf_counter() - begin
    settled = samples[len(samples) // 5 :]
    numbers, sizes = [float(number) for number, _ in settled], [float(size) for _, size in settled]
    slope = statistics.linear_regression(numbers, sizes).slope if len(settled) > 1 else 0.0
    return MemoryCost(requests, sizes[0] / 1e6, sizes[-1] / 1e6, slope, requests / seconds)


def _read_together(server: ScriptedServer, clients: int, tokens: int) -> list[_Reading]:
    body = {
        "messages": [{"role": "user", "content": "Say something."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {server.host}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode() + raw
    readings: list[_Reading] = []
    begin, whole = time.perf_counter(), 0
    with selectors.DefaultSelector() as selector:
        while whole < clients:
            due = begin + _APART_SECONDS * len(readings)
            if len(readings) < clients and time.perf_counter() >= due:
                sock = socket.create_connection((server.host, server.port))
                readings.append(_Reading(sock, time.perf_counter()))
                sock.sendall(request)
                selector.register(sock, selectors.EVENT_READ, readings[-1])
                continue
            patience = _SILENCE_SECONDS if len(readings) == clients else max(due - time.perf_counter(), 0)
            ready = selector.select(patience)
            if not ready and patience == _SILENCE_SECONDS:
                raise CheckFailed(f"no byte of an answer in {_SILENCE_SECONDS:g} s.")
            for key, _ in ready:
                data = key.data.sock.recv(1 << 16)
                if not data:
                    raise CheckFailed(f"an answer was cut off after {b''.join(key.data.chunks)[-200:]!r}.")
                if key.data.take(data, time.perf_counter()):
                    selector.unregister(key.data.sock)
                    key.data.sock.close()
                    whole += 1
    return readings


def _timings(reading: _Reading, tokens: int) -> dict[str, Any]:
    """The server's own figures of an answer, once it is certain that the answer was whole."""
    decoder, usage, timings = json.JSONDecoder(), None, None
    for part in b"".join(reading.chunks).decode().split("data: {")[1:]:
        event, _ = decoder.raw_decode("{" + part)
        usage, timings = event.get("usage") or usage, event.get("duovolt") or timings
    if usage is None or timings is None or usage["completion_tokens"] != tokens:
        raise CheckFailed(f"an answer of {tokens} tokens came back with usage {usage}.")
    return dict(timings)


def _detokenise_seconds(server: ScriptedServer) -> float:
    """CPU seconds a token from id to text, as the proxy does it: token by token, a delta taken after each."""
    assembler = Assembler(server.tokenizer, AnswerStyle(frozenset(), [], split=True, thinking=True))
    begin = time.process_time()
    for token in server.tokens:
        assembler.feed(token)
        assembler.take()
    return (time.process_time() - begin) / len(server.tokens)


def _cpu_seconds(pid: int) -> float:
    """Time on a CPU of all threads of a process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
