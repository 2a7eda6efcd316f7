"""The mailbox in two processes: exact, ordered, bounded, and never fooled by old words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duovolt.checkpoint.errors import InputError
from duovolt.runtime.parallel import waiting
from duovolt.runtime.parallel.faults import LINK_DOOR, MAILBOX_DOOR, of_start, read_fault
from duovolt.runtime.parallel.mailbox import LAST_STEP, Mailbox, MailboxCollective, MailboxMismatch, MailboxTimeout
from duovolt.runtime.parallel.region import Region, region_bytes
from duovolt.runtime.parallel.shared import SharedFile
from duovolt.runtime.parallel.waiting import wait_for

from .mailbox_peer import values

SLOT = 32


class Pair:
    """Rank 0 here, rank 1 in a child."""

    def __init__(self, first_step: int, timeout: float, fault: str | None) -> None:
        shared = SharedFile.create(region_bytes(SLOT))
        environment = os.environ | ({MAILBOX_DOOR: fault} if fault else {})
        command = [sys.executable, str(Path(__file__).with_name("mailbox_peer.py"))]
        self.child = subprocess.Popen(
            [*command, shared.name, str(SLOT), str(first_step), str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.mailbox = Mailbox(Region(shared.memory, SLOT), 0, timeout, first_step=first_step)
        self.collective = MailboxCollective(self.mailbox)
        self.ask({"op": "exchange", "seed": 0, "size": 1})  # the child has mapped once it answers this
        self.mailbox.timeout_seconds = 30
        if fault is None:
            self.mailbox.exchange(values(0, 1))
            self.answer()
            shared.unlink()
        self.shared = shared
        self.mailbox.timeout_seconds = timeout

    def ask(self, job: dict[str, Any]) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(job) + "\n")
        self.child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())

    def close(self) -> None:
        self.shared.unlink()
        self.child.kill()
        self.child.wait(5)
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(first_step: int = 1, timeout: float = 20, fault: str | None = None) -> Pair:
        made.append(Pair(first_step, timeout, fault))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def steady() -> Iterator[Pair]:
    pair = Pair(1, 20, None)
    yield pair
    pair.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mine=st.integers(0, 4 * SLOT + 1), theirs=st.integers(0, 4 * SLOT + 1), seed=st.integers(0, 2**31))
def test_any_two_sizes_cross_bit_for_bit(steady: Pair, mine: int, theirs: int, seed: int) -> None:
    steady.ask({"op": "exchange", "seed": seed + 1, "size": theirs})
    received = steady.mailbox.exchange(values(seed, mine))
    assert received.tobytes() == values(seed + 1, theirs).tobytes()
    assert steady.answer()["bits"] == values(seed, mine).tobytes().hex()


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 2**31))
def test_sums_are_rank_0_first_on_both_ranks(steady: Pair, shape: list[int], seed: int) -> None:
    steady.ask({"op": "all_reduce", "seed": seed + 1, "shape": shape})
    size = int(np.prod(shape))
    mine = torch.from_numpy(values(seed, size)).reshape(shape)
    total = steady.collective.all_reduce(mine)
    assert total.shape == mine.shape
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values(seed, size) + values(seed + 1, size)
    assert np.array_equal(total.numpy().reshape(-1), expected, equal_nan=True)
    assert steady.answer()["bits"] == total.numpy().tobytes().hex()
    assert np.array_equal(mine.numpy().reshape(-1), values(seed, size))


def test_gather_joins_uneven_widths_in_rank_order(steady: Pair) -> None:
    steady.ask({"op": "all_gather", "seed": 5, "shape": [3, 50]})
    joined = steady.collective.all_gather(torch.from_numpy(values(4, 153)).reshape(3, 51))
    expected = np.concatenate([values(4, 153).reshape(3, 51), values(5, 150).reshape(3, 50)], axis=1)
    assert joined.shape == (3, 101)
    assert joined.numpy().tobytes() == expected.tobytes()
    assert steady.answer()["bits"] == expected.tobytes().hex()


def test_different_shapes_are_an_error_on_both_ranks_not_a_hang(pair: Callable[..., Pair]) -> None:
    two = pair()
    two.ask({"op": "all_reduce", "seed": 1, "shape": [2, 64]})
    with pytest.raises(MailboxMismatch, match=r"rank 0 brought 192 values, the peer 128"):
        two.collective.all_reduce(torch.zeros(3, 64))
    assert two.answer() == {"error": "MailboxMismatch"}


@pytest.mark.parametrize("below", [0, 1, 2, 3])
def test_the_step_counter_wraps_with_right_sums(pair: Callable[..., Pair], below: int) -> None:
    two = pair(first_step=LAST_STEP - below)
    for seed in range(8):
        two.ask({"op": "exchange", "seed": seed + 100, "size": 3 * SLOT - seed})
        assert two.mailbox.exchange(values(seed, 70)).tobytes() == values(seed + 100, 3 * SLOT - seed).tobytes()
        answer = two.answer()
        assert answer["bits"] == values(seed, 70).tobytes().hex()
        assert answer["step"] == two.mailbox.step
    assert 1 < two.mailbox.step < 40


def test_words_of_before_the_wrap_are_cleared(pair: Callable[..., Pair]) -> None:
    two = pair(first_step=LAST_STEP - 1)
    inbox = two.mailbox._inbox
    inbox[:, 5:] = np.uint64(2) << np.uint64(32)  # as if a long message had stood here at step 2 of the last turn
    two.ask({"op": "exchange", "seed": 1, "size": 1})
    two.mailbox.exchange(values(0, 1))
    assert two.mailbox.step == LAST_STEP + 1
    two.ask({"op": "exchange", "seed": 3, "size": 1})
    two.mailbox.exchange(values(2, 1))
    assert two.mailbox.step == 2
    assert not np.any(inbox[:, 5:])


def test_a_late_peer_within_the_budget_changes_nothing(pair: Callable[..., Pair]) -> None:
    two = pair(timeout=3, fault="1:2:300")
    two.mailbox.exchange(values(0, 1))
    two.answer()
    two.ask({"op": "exchange", "seed": 8, "size": 40})
    start = time.monotonic()
    assert two.mailbox.exchange(values(7, 40)).tobytes() == values(8, 40).tobytes()
    assert time.monotonic() - start > 0.2


@pytest.mark.parametrize("kind", ["2500", "drop", "stale"])
def test_a_missing_word_poisons_the_step_within_the_budget(pair: Callable[..., Pair], kind: str) -> None:
    two = pair(timeout=0.5, fault=f"1:3:{kind}")
    two.mailbox.timeout_seconds = 20
    two.mailbox.exchange(values(0, 1))
    two.answer()
    two.ask({"op": "exchange", "seed": 8, "size": 10})
    assert two.mailbox.exchange(values(7, 10)).tobytes() == values(8, 10).tobytes()
    two.answer()
    two.ask({"op": "exchange", "seed": 9, "size": 10})
    two.mailbox.timeout_seconds = 0.5
    start = time.monotonic()
    with pytest.raises(MailboxTimeout, match=r"no answer from rank 1 at mailbox step 3 within 0\.5 s"):
        two.mailbox.exchange(values(7, 10))
    assert 0.5 <= time.monotonic() - start < 1.5
    time.sleep(2.5 if kind == "2500" else 0)  # the words come at last: too late
    with pytest.raises(MailboxTimeout, match="closed after an earlier timeout"):
        two.mailbox.exchange(values(7, 10))


@pytest.mark.parametrize("door", ["1:3:wrap", "0:4:wrap", "1:5:wrap", "0:6:wrap", "1:1:wrap", "0:2:wrap"])
def test_the_wrap_door_moves_both_ranks_and_changes_no_value(
    monkeypatch: pytest.MonkeyPatch, pair: Callable[..., Pair], door: str
) -> None:
    monkeypatch.setenv(MAILBOX_DOOR, door)
    two = pair(fault=door)
    two.mailbox.exchange(values(0, 1))
    two.answer()
    largest = 0
    for seed in range(11):
        two.ask({"op": "exchange", "seed": seed + 50, "size": 12})
        assert two.mailbox.exchange(values(seed, 12)).tobytes() == values(seed + 50, 12).tobytes()
        assert two.answer()["step"] == two.mailbox.step
        largest = max(largest, two.mailbox.step)
    assert largest > LAST_STEP - 4
    assert two.mailbox.step < 16


@pytest.mark.parametrize("step", [1, 2, 3, 4, 301, 2**20])
def test_the_wrap_door_leaves_the_buffer_alone_that_a_slow_peer_still_reads(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setenv(MAILBOX_DOOR, f"0:{step + 1}:wrap")
    region = Region(bytearray(region_bytes(SLOT)), SLOT)
    fast, slow = (Mailbox(region, rank, 5, first_step=step) for rank in (0, 1))
    slow._begin_step()
    slow._push(3, values(1, 3).view(np.uint32))  # the peer has sent, and not read yet
    assert fast.exchange(values(0, 3)).tobytes() == values(1, 3).tobytes()
    fast._begin_step()  # the door opens
    assert fast.step in (LAST_STEP - 3, LAST_STEP - 2)
    fast._push(3, values(2, 3).view(np.uint32))
    assert slow._pull(1, 4).tobytes() == values(0, 3).tobytes()


@pytest.mark.parametrize("kind", ["stale", "drop"])
def test_the_rank_that_missed_the_word_is_the_first_to_say_so(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its twin, which waits in vain a step later, may find out first: here by 50 ms."""
    monkeypatch.setenv(MAILBOX_DOOR, f"1:3:{kind}")
    region, told = Region(bytearray(region_bytes(SLOT)), SLOT), []
    boxes = [Mailbox(region, rank, seconds) for rank, seconds in ((0, 1.25), (1, 1.2))]

    def run(box: Mailbox) -> None:
        with pytest.raises(MailboxTimeout) as raised:
            for turn in range(5):
                box.exchange(values(turn, 4))
        told.append(str(raised.value))

    threads = [threading.Thread(target=run, args=(box,)) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told[0].startswith("rank 0: no answer from rank 1 at mailbox step 3 within 1.25 s")
    assert told[1].startswith("rank 1: no answer from rank 0 at mailbox step 4 within 1.2 s")


@pytest.mark.parametrize("text", ["1:2", "2:3:drop", "1:x:drop", "1:2:hash", "1:2:-5", "::"])
def test_a_door_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(MAILBOX_DOOR, text)
    with pytest.raises(InputError, match="expected RANK:NUMBER:KIND"):
        read_fault(MAILBOX_DOOR)


def test_each_start_of_the_ranks_takes_the_next_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAILBOX_DOOR, "1:2:drop,,0:41:300")
    assert [of_start(MAILBOX_DOOR, start) for start in range(4)] == ["1:2:drop", "", "0:41:300", ""]
    monkeypatch.setenv(MAILBOX_DOOR, "1:2:drop,0:x:300")
    with pytest.raises(InputError, match="expected RANK:NUMBER:KIND"):
        of_start(MAILBOX_DOOR, 0)  # at the first start, not when its turn comes
    monkeypatch.setenv(LINK_DOOR, "ipc=0:1:drop")
    assert [of_start(LINK_DOOR, start) for start in range(2)] == ["ipc=0:1:drop", ""]


def test_a_wait_is_counted_from_look_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen for an hour between two looks, as a container with both ranks may be: the peer had no time to answer either."""
    now, looks = [100.0], []
    pauses = {2: 3600.0}
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None))

    def look() -> None:
        looks.append(now[0])
        now[0] += pauses.get(len(looks), 0.25)

    assert wait_for(look, 1.5) is None
    assert len(looks) == 5, "four of a quarter of a second, and one that counts half a second"
    pauses[2] = 0.25
    looks.clear()
    assert wait_for(look, 1.5) is None and len(looks) == 6
    assert wait_for(lambda: "a word", 0.0) == "a word"
