"""What must hold after every fault, whatever it was."""

from __future__ import annotations

import json
import time

from ..conftest import Server, gone, leftovers
from .reader import PATH, Reader
from .world import SHORT, World, log_pairs


def part_of_expected(world: World, reader: Reader) -> None:
    """What a client got is the beginning of the right answer (a character that is not whole yet may stand at its end)."""
    expected = world.expected_of_long if reader.prompt == world.long_prompt else world.expected
    assert expected.startswith(reader.text.rstrip("\ufffd")), (reader.text, expected)


def broken_off(world: World, reader: Reader, *, ends: tuple[str, ...] = ("error",)) -> None:
    """The answer ended early, and says so."""
    assert reader.end in ends, (reader.end, reader.error)
    part_of_expected(world, reader)


def whole(world: World, reader: Reader, tokens: int) -> None:
    """The answer ended as if nothing had been."""
    assert reader.end == "done", (reader.end, reader.error)
    part_of_expected(world, reader)
    assert reader.pieces <= tokens


def serves(world: World, server: Server) -> None:
    """A new answer is right, and nothing else is open."""
    reader = Reader(server, world.body(SHORT))
    reader.join(60)
    whole(world, reader, SHORT)
    assert reader.text
    wait_clean(server)


def wait_clean(server: Server, seconds: float = 10) -> None:
    """No answer is open on the proxy or held by a rank; no page either, unless the prefix cache keeps some."""
    deadline = time.monotonic() + seconds
    while True:
        with server.client() as client:
            picture = client.get("/status").json()
        held = [picture["running"], picture["waiting"], picture["context_tokens"] or 0]
        pages = 0 if picture["prefixes"] else (picture["kv_pages"] or 0) - (picture["kv_pages_free"] or 0)
        if not any(held) and not pages and not any(rank["busy"] for rank in picture["ranks"]):
            return
        assert time.monotonic() < deadline, picture
        time.sleep(0.05)


def refuses_or_serves(server: Server) -> int:
    """While ranks are down: 503 with Retry-After, or an answer; nothing else, and at once. The status."""
    start = time.monotonic()
    with server.client(60) as client:
        reply = client.post(PATH, json={"prompt": "hi", "max_tokens": 1})
        assert client.get("/health/live").status_code == 200
    if reply.status_code == 503:
        assert time.monotonic() - start < 10
        assert reply.json()["error"]["type"] == "server_error"
        assert int(reply.headers["retry-after"]) >= 1 or "broken off" in reply.text
    else:
        assert reply.status_code == 200, reply.text
    return reply.status_code


def logs_agree(world: World, pid: int, relayed: int | None) -> int:
    """Record for record as far as both go, at every start of the ranks; what was relayed stands in both. Their number.

    `relayed`: tokens that the proxy gave to clients, None if it is gone and cannot be asked.
    """
    agreed = records = 0
    for first, second in log_pairs(world.logs, pid, solo=world.size == 1):
        shared = min(len(first), len(second))
        assert first[:shared] == second[:shared]
        assert [json.loads(line)["sequence"] for line in first] == list(range(1, len(first) + 1))
        agreed += sum(json.loads(line)["tokens_produced"] for line in first[:shared])
        records += shared
    assert relayed is None or relayed <= agreed, (relayed, agreed)
    return records


def left_nothing(server: Server, pids: list[int]) -> None:
    """Neither process nor file."""
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if not gone(pid)]
        time.sleep(0.02)
    assert leftovers(server.pid) == []


def no_traceback(server: Server) -> None:
    """Faults of others are told in a line."""
    assert "Traceback" not in server.log, server.log
