"""What the server itself costs: the pace that clients see beside the engine's, CPU a token, memory over many requests."""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ..checkpoint.errors import CheckFailed
from ..runtime.proxy.assembly import AnswerStyle, Assembler
from .scripted_server import ScriptedServer, scripted_server

_SILENCE_SECONDS = 30.0
_PASSES = 5
_APART_SECONDS = 0.02  # between the requests of clients that read at once: each first token is to be seen by itself
_SAMPLES = 20  # of memory
_SHORT_TOKENS = 8


@dataclass(frozen=True)
class StreamCost:
    """`rates`: tokens a second of each answer after its first, as its client had them; `relayed`: as the proxy
    had them. `share`: the median of `rates` over the pace that the script asks of the ranks, which they miss themselves
    where other work takes their cores.
    `first_byte_ms`: from the first token's arrival in the proxy, as its log has it, to its first byte at the client.
    """

    clients: int
    rates: list[float]
    relayed: list[float]
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
    port: int
    tail: bytes = b""
    first: float | None = None
    first_at: float = 0.0  # seconds of the wall clock, as in the server's log
    last: float = 0.0
    chunks: list[bytes] = field(default_factory=list)

    def take(self, data: bytes, now: float) -> bool:
        """True once the answer is whole."""
        if self.first is None and b'"content":"' in data.replace(b'"content":""', b""):
            self.first, self.first_at = now, time.time()
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
        rates, relayed, delays = [], [], []
        for _ in range(rounds):
            for reading in _read_together(server, clients, tokens):
                _check_whole(reading, tokens)
                assert reading.first is not None
                rates.append((tokens - 2) / (reading.last - reading.first))
                entry = _log_entry(server.log, reading.port)
                relayed.append(entry["answers"][0]["tokens_per_second"])
                delays.append(1000 * (reading.first_at - _first_token_at(entry)))
        spent = [_cpu_seconds(pid) - start for pid, start in zip((server.proxy, *server.ranks), before, strict=True)]
        detokenise = _detokenise_seconds(server)
    answered = tokens * clients * rounds
    return StreamCost(
        clients,
        rates,
        relayed,
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
                readings.append(_Reading(sock, sock.getsockname()[1]))
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


def _check_whole(reading: _Reading, tokens: int) -> None:
    decoder, usage = json.JSONDecoder(), None
    for part in b"".join(reading.chunks).decode().split("data: {")[1:]:
        event, _ = decoder.raw_decode("{" + part)
        usage = event.get("usage") or usage
    if usage is None or usage["completion_tokens"] != tokens:
        raise CheckFailed(f"an answer of {tokens} tokens came back with usage {usage}.")


def _log_entry(log: Path, port: int) -> dict[str, Any]:
    """The server's line on the answer to that client; it is written after the answer has gone out."""
    deadline = time.monotonic() + _SILENCE_SECONDS
    while time.monotonic() < deadline:
        for line in reversed(log.read_text().splitlines()):
            entry: dict[str, Any] = json.loads(line)
            if entry["client"].endswith(f":{port}"):
                return entry
        time.sleep(0.01)
    raise CheckFailed(f"the server's log has no line for the client at port {port}.")


def _first_token_at(entry: dict[str, Any]) -> float:
    """When the proxy had the first token, in seconds of the wall clock."""
    (answer,) = entry["answers"]
    begin = datetime.fromisoformat(entry["time"]).timestamp()
    return begin + (float(answer["prepared_ms"]) + float(answer["first_token_ms"])) / 1000


def _detokenise_seconds(server: ScriptedServer) -> float:
    """CPU seconds a token from id to text, as the proxy does it: token by token, a delta taken after each.

    The median of a few passes in this thread: first calls, other threads and a collector of a large process are not the proxy's.
    """
    passes = []
    for _ in range(_PASSES):
        assembler = Assembler(server.tokenizer, AnswerStyle(frozenset(), [], split=True, thinking=True))
        begin = time.thread_time()
        for token in server.tokens:
            assembler.feed(token)
            assembler.take()
        passes.append(time.thread_time() - begin)
    return statistics.median(passes) / len(server.tokens)


def _cpu_seconds(pid: int) -> float:
    """Time on a CPU of all threads of a process."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
