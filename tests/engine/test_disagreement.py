"""Two engines that are not fed or made alike: found at once, both stop, and no token leaves that both do not share."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from duovolt.checkpoint.errors import DuovoltError
from duovolt.runtime.messages import GenerateRequest, SamplingParams
from duovolt.runtime.parallel.lockstep import LockstepFailure, SharedLockstep
from duovolt.runtime.parallel.mailbox import Mailbox, MailboxCollective, MailboxMismatch
from duovolt.runtime.parallel.region import ProgressCounter, Region, region_bytes
from duovolt.runtime.rank.loop import RankLoop
from duovolt.runtime.rank.wire import Step, Stop, decode_to_proxy, encode

SECONDS = 20.0
HOT = SamplingParams(temperature=1.5, seed=11)


class Socket:
    """Gives its messages at once, then Stop when every answer has ended."""

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self._messages = deque(encode(request) for request in requests)
        self._open = len(requests)
        self.tokens: list[int] = []

    def poll(self, timeout: int) -> bool:
        return bool(self._messages) or not self._open

    def recv(self) -> bytes:
        return self._messages.popleft() if self._messages else encode(Stop())

    def send(self, data: bytes) -> None:
        step = decode_to_proxy(data)
        assert isinstance(step, Step)
        for event in step.events:
            self.tokens += event.tokens
            self._open -= event.finish_reason is not None


def run_pair(
    make: Callable[[MailboxCollective], Any], requests: list[GenerateRequest]
) -> tuple[list[Any], list[Socket]]:
    """Two ranks as threads, rank r with `make(collective)` and request r: what each raised, and what it gave out."""
    region = Region(bytearray(region_bytes(4096)), 4096)
    sockets = [Socket([request]) for request in requests]
    errors: list[Any] = [None, None]

    def work(rank: int) -> None:
        engine = make(MailboxCollective(Mailbox(region, rank, SECONDS)))
        lockstep = SharedLockstep(region, rank, SECONDS)
        try:
            RankLoop(engine, lockstep, sockets[rank], ProgressCounter(region, rank)).run()  # type: ignore[arg-type]
        except DuovoltError as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return errors, sockets


def test_another_seed_on_one_rank_stops_both_before_a_token_differs(tools: Any) -> None:
    """R05: the seed is the proxy's; a rank that has another is found by the hash of the first token that differs."""
    source = tools.source(seed=3)
    request = tools.request(1, [5, 6, 7], 40, sampling=HOT)
    other = replace_sampling(request, seed=12)
    alike, sockets = run_pair(lambda c: tools.engine(tools.cut(source, 2, c.rank), c, drafts=3), [request, request])
    assert alike == [None, None] and sockets[0].tokens == sockets[1].tokens and len(sockets[0].tokens) == 40
    errors, parted = run_pair(lambda c: tools.engine(tools.cut(source, 2, c.rank), c, drafts=3), [request, other])
    for error in errors:
        assert isinstance(error, LockstepFailure) and "rank 0: StepRecord" in str(error)
    assert parted[0].tokens == parted[1].tokens == sockets[0].tokens[: len(parted[0].tokens)]
    assert len(parted[0].tokens) < 40


def replace_sampling(request: GenerateRequest, **changes: Any) -> GenerateRequest:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    old = {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__}
    return GenerateRequest(**fields | {"sampling": SamplingParams(**old | changes)})


class Nudged(MailboxCollective):
    """Odd logits come out one unit in the last place higher."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        joined = super().all_gather(x)
        joined[..., 1::2] = torch.nextafter(joined[..., 1::2], torch.tensor(torch.inf))
        return joined


@pytest.mark.parametrize("ties", [True, False])
def test_logits_one_bit_apart_stop_both_ranks_exactly_if_a_token_depends_on_it(tools: Any, ties: bool) -> None:
    """R05: with exact ties the nudged rank draws the other token; without, both draw the same and go on."""
    source = tools.source(seed=4)
    read = source.read

    def twins(name: str) -> np.ndarray:
        values = read(name)
        return np.repeat(values[::2], 2, axis=0) if ties and name == "lm_head.weight" else values

    source = replace(source, read=twins)
    request = tools.request(1, [5, 6, 7], 12)

    def make(collective: MailboxCollective) -> Any:
        if collective.rank == 1:
            collective = Nudged(collective._mailbox)
        return tools.engine(tools.cut(source, 2, collective.rank), collective)

    errors, sockets = run_pair(make, [request, request])
    assert sockets[0].tokens == sockets[1].tokens
    if ties:
        assert [type(error) for error in errors] == [LockstepFailure] * 2
        assert sockets[0].tokens == []
    else:
        assert errors == [None, None] and len(sockets[0].tokens) == 12


def test_other_numbers_of_drafts_are_an_error_within_a_step(tools: Any) -> None:
    """R06: the first exchange of unlike sizes says so on both ranks; nobody waits."""
    source = tools.source(seed=5)
    request = tools.request(1, [5, 6, 7], 40)
    start = time.monotonic()
    errors, sockets = run_pair(
        lambda c: tools.engine(tools.cut(source, 2, c.rank), c, drafts=3 - c.rank), [request, request]
    )
    assert all(isinstance(error, MailboxMismatch | LockstepFailure) for error in errors), errors
    assert time.monotonic() - start < SECONDS / 2
    assert sockets[0].tokens == sockets[1].tokens and len(sockets[0].tokens) <= 1


def test_pools_of_unlike_size_are_found_by_the_first_record(tools: Any) -> None:
    """R07: what one rank can hold and the other cannot is no reason to part: it is found before it matters."""
    source = tools.source(seed=6)
    request = tools.request(1, [5, 6, 7], 10)
    errors, sockets = run_pair(
        lambda c: tools.engine(tools.cut(source, 2, c.rank), c, pages=8 - c.rank), [request, request]
    )
    assert [type(error) for error in errors] == [LockstepFailure] * 2
    assert "free_pages" in str(errors[0])
    assert sockets[0].tokens == sockets[1].tokens == []
