"""Many requests of every kind at once, whose clients stay, leave at any moment or abort; then all must be as before."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

from ..conftest import Server
from .invariants import logs_agree, part_of_expected, serves, wait_clean, whole
from .reader import PATH, PLAIN, Reader
from .trials import running
from .world import World, log_pairs

_AT_ONCE = 12


def mixed_requests(
    world: World, count: int = 300, seed: int = 0, most_tokens: int = 24, more: Sequence[str] = ()
) -> dict[str, int]:
    """Survived if every answer that was waited for is right, all that was left is freed on both ranks, nothing had to
    start again, and both ranks' logs are the same to the last record. Returns how many were of each kind."""
    with running(world, lanes=4, more=more) as server:
        server.wait_ready()
        return mix(world, server, count, seed, most_tokens)


def mix(world: World, server: Server, count: int, seed: int = 0, most_tokens: int = 24) -> dict[str, int]:
    """The same of a server that is ready, idle and has not started its ranks again."""
    kinds = random.Random(seed).choices(
        ("stay", "stay whole", "leave", "leave early", "leave whole", "abort"),
        weights=(30, 15, 25, 10, 10, 10),
        k=count,
    )
    jobs = list(enumerate(kinds))
    failures: list[BaseException] = []
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not jobs or failures:
                    return
                number, kind = jobs.pop()
            try:
                _one(world, server, kind, random.Random(1000 * seed + number), most_tokens)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(_AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive(), "requests hang"
    if failures:
        raise failures[0]
    wait_clean(server, 30)
    serves(world, server)
    assert server.metric("restarts_total") == 0
    assert server.metric("failed_total") == 0
    ended = sum(server.metric(f"{name}_total") for name in ("finished", "cancelled"))
    assert ended == server.metric("requests_total")
    ((first, second),) = log_pairs(world.logs, server.pid, solo=world.size == 1)
    assert first == second
    assert logs_agree(world, server.pid, server.metric("completion_tokens_total")) == len(first) > 0
    return dict(Counter(kinds))


def _one(world: World, server: Server, kind: str, chance: random.Random, most_tokens: int) -> None:
    tokens = chance.randint(1, most_tokens)
    body = world.body(tokens, stream="whole" not in kind)
    if kind in ("stay", "leave"):
        reader = Reader(server, body, leave_after=chance.randint(1, 4) if kind == "leave" else None)
        reader.join(120)
        if reader.end == "left":
            part_of_expected(world, reader)
        else:
            whole(world, reader, tokens)
        return
    if kind == "abort":
        _abort(world, server, body, chance)
        return
    try:
        timeout = 120 if kind.startswith("stay") else chance.uniform(0.001, 0.3)
        text = PLAIN.post(server.url + PATH, json=body, timeout=timeout).json()["choices"][0]["text"]
    except httpx.TimeoutException:
        assert kind.startswith("leave")
    except (KeyError, ValueError):
        assert kind == "leave early"  # a stream that was read to its end is no JSON
    else:
        assert world.expected.startswith(text.rstrip("\ufffd"))


def _abort(world: World, server: Server, body: dict[str, Any], chance: random.Random) -> None:
    name = f"job-{chance.randrange(10**9)}"
    ended: list[httpx.Response] = []

    def ask() -> None:
        ended.append(PLAIN.post(server.url + PATH, json=body, headers={"X-Request-Id": name}, timeout=120))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(chance.uniform(0.001, 0.2))
    aborted = PLAIN.post(f"{server.url}/v1/abort", json={"request_id": name}, timeout=120).json()["aborted"]
    thread.join(120)
    assert ended, "an aborted request hangs"
    if not aborted:
        assert ended[0].status_code == 200
    else:
        assert ("aborted" in ended[0].text) or ended[0].status_code == 409
