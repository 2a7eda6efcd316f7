"""A client that leaves, or whose answer is aborted, in every phase: both ranks are rid of it in the same round."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

from ..conftest import Server
from .invariants import logs_agree, serves, wait_clean, whole
from .reader import PATH, PLAIN, Reader
from .trials import running
from .world import World, log_pairs

WAYS = ("stream", "whole", "abort")
_NAME = "the-one-that-leaves"
_SECONDS = 3.0  # for the ranks to be rid of it; a step takes far less


def client_leaves(phase: str, way: str) -> Callable[[World], None]:
    """`way`: of a stream, of a whole answer that is waited for, or by the abort endpoint."""

    def run(world: World) -> None:
        lanes = 1 if phase == "queue" else 2
        with running(world, lanes=lanes) as server:
            server.wait_ready()
            other = Reader(server, world.body()) if phase == "queue" else None
            if other is not None:
                other.wait_pieces(1)
            connection = _ask(world, server, phase, stream=way != "whole")
            _wait_phase(server, phase)
            if way == "abort":
                reply = PLAIN.post(f"{server.url}/v1/abort", json={"request_id": _NAME})
                assert reply.json()["aborted"] == 1
                assert _read_to_end(connection).count(b'"code":"aborted"') == 1
            connection.close()
            left = time.monotonic()
            while _open(server) > (other is not None):
                assert time.monotonic() - left < _SECONDS
                time.sleep(0.01)
            if other is None:
                wait_clean(server, _SECONDS)
            else:
                other.join(60)
                whole(world, other, world.long)
            serves(world, server)
            assert server.metric("cancelled_total") == 1
            logs_agree(world, server.pid, server.metric("completion_tokens_total"))
            _one_round(world, server.pid, phase)

    return run


def _ask(world: World, server: Server, phase: str, *, stream: bool) -> socket.socket:
    """The request on a bare connection, which can be closed at any moment."""
    body = json.dumps(world.body(long_prompt=phase == "prefill", stream=stream)).encode()
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nX-Request-Id: {_NAME}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    return connection


def _read_to_end(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def _open(server: Server) -> int:
    picture = PLAIN.get(f"{server.url}/status").json()
    return int(picture["running"] + picture["waiting"])


def _wait_phase(server: Server, phase: str) -> None:
    deadline = time.monotonic() + 20
    while True:
        lanes = PLAIN.get(f"{server.url}/status").json()["lanes"]
        tokens = lanes[-1]["completion_tokens"] if lanes else 0
        if phase == "queue" and len(lanes) == 2:
            return
        if phase == "prefill" and lanes:
            time.sleep(0.3)
            assert tokens == 0
            return
        if phase == "decode" and tokens >= 3:
            return
        assert time.monotonic() < deadline, lanes
        time.sleep(0.01)


def _one_round(world: World, pid: int, phase: str) -> None:
    """One record cancels; by the next the answer holds nothing on either rank, whose logs are equal.

    The rank that heard of it later may ask once more in that next record, which changes nothing.
    """
    (pair,) = log_pairs(world.logs, pid, solo=world.size == 1)
    lines = [json.loads(line) for line in pair[0]]
    at, *again = (index for index, line in enumerate(lines) if line["cancel_mask"])
    assert again in ([], [at + 1])
    before, after = lines[at], lines[at + 1]
    if phase == "queue":
        assert (before["pending"], after["pending"]) == (1, 0)
    else:
        assert before["position"] > 0 and after["position"] == 0
        assert after["prefixes"] or after["free_pages"] == max(line["free_pages"] for line in lines)
        assert (after["kind"], after["tokens_produced"]) == ("idle", 0)
