"""Faults that a door orders (docs/testing.md): in a record, in a word between ranks, in the start of a rank."""

from __future__ import annotations

from collections.abc import Callable

from ..conftest import START_SECONDS, wait_gone
from .invariants import broken_off, left_nothing, logs_agree, serves, whole
from .reader import Reader
from .trials import ends_at_once, running, wait_ranks
from .world import World


def door_opens(
    door: str, text: str, *, words: str, survives: bool, most_tokens: int | None = None
) -> Callable[[World], None]:
    """A fault ordered by a door while an answer is made: it changes nothing (`survives`), or both ranks stop with `words`
    in the log, after at most `most_tokens` pieces of text."""

    def run(world: World) -> None:
        with running(world, **{door: text}) as server:
            server.wait_ready()
            old = wait_ranks(world, server)
            reader = Reader(server, world.body(world.long // 2))
            reader.join(60)
            if survives:
                whole(world, reader, world.long // 2)
                serves(world, server)
                assert server.metric("restarts_total") == 0
            else:
                broken_off(world, reader)
                assert reader.pieces <= (most_tokens or world.long), reader.text
                server.wait_log(words)
                server.wait_log("ready on", count=2)
                left_nothing(server, old)
                serves(world, server)
            logs_agree(world, server.pid, server.metric("completion_tokens_total"))
            ends_at_once(server)

    return run


def starts_badly(door: str, text: str, words: str) -> Callable[[World], None]:
    """A fault ordered by a door before the first ready: the start ends with one message and leaves nothing."""

    def run(world: World) -> None:
        with running(world, **{door: text}) as server:
            pids = wait_ranks(world, server)
            assert server.wait_exit(START_SECONDS) == 1
            assert words in server.log, server.log
            assert len([line for line in server.lines if line.startswith("duovolt:")]) == 1
            left_nothing(server, pids)

    return run


def starts_oddly(text: str, words: str | None) -> Callable[[World], None]:
    """A rank that is late (`words` None) is waited for; one that never comes, or comes twice, ends the start.

    A second ready may be read after the start has ended with the first: then the ranks start again.
    """

    def run(world: World) -> None:
        with running(world, DUOVOLT_START_FAULT=text) as server:
            if words is None:
                server.wait_ready()
                serves(world, server)
                assert server.metric("restarts_total") == 0
                ends_at_once(server)
                return
            pids = wait_ranks(world, server)
            server.wait_log(words)
            wait_gone(pids, 10)
            if "ready on" in server.log:
                server.wait_ready().wait_log("ready on", count=2)
                serves(world, server)
                assert server.metric("restarts_total") == 1
                ends_at_once(server)
            else:
                assert server.wait_exit(5) == 1
                left_nothing(server, pids)

    return run
