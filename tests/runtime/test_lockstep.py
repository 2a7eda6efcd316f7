"""The lockstep record: agreement combines, difference stops both ranks with both records."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from duovolt.runtime.messages import StepRecord
from duovolt.runtime.parallel.faults import LOCKSTEP_DOOR
from duovolt.runtime.parallel.lockstep import (
    Agreement,
    LockstepFailure,
    LockstepTimeout,
    SharedLockstep,
    SoloLockstep,
    last_record,
)
from duovolt.runtime.parallel.region import RECORD_WORDS, Region, region_bytes

RECORD = StepRecord("round", 4, 2**64 - 1, 777, 12, 3)
WORD = st.integers(0, 2**64 - 1)


def both(first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
    """Run two ranks as threads; results or exceptions."""
    found: list[Any] = [None, None]

    def run(rank: int, call: Callable[[], Any]) -> None:
        try:
            found[rank] = call()
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def make(timeout: float = 10) -> list[SharedLockstep]:
    region = Region(bytearray(region_bytes(4)), 4)
    return [SharedLockstep(region, rank, timeout) for rank in (0, 1)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(WORD, WORD, WORD, WORD, WORD), min_size=1, max_size=6))
def test_equal_records_agree_on_the_smaller_count_and_all_cancels(steps: list[tuple[int, ...]]) -> None:
    ranks = make()
    for token_hash, received0, received1, mask0, mask1 in steps:
        record = replace(RECORD, token_hash=token_hash)
        expected = Agreement(min(received0, received1), mask0 | mask1)
        found = both(
            lambda: ranks[0].agree(record, received0, mask0),  # noqa: B023
            lambda: ranks[1].agree(record, received1, mask1),  # noqa: B023
        )
        assert found == [expected, expected]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "prefill"},
        {"tokens_produced": 5},
        {"token_hash": 1},
        {"position": 776},
        {"free_pages": 11},
        {"pending": 0},
        {"cached_tokens": 64},
        {"prefixes": 3},
        {"evicted": 1},
    ],
)
def test_any_difference_is_a_failure_on_both_ranks_with_both_records(change: dict[str, Any]) -> None:
    ranks = make()
    other = replace(RECORD, **change)
    for failure in both(lambda: ranks[0].agree(RECORD, 0, 0), lambda: ranks[1].agree(other, 0, 0)):
        assert isinstance(failure, LockstepFailure)
        assert failure.exit_code == 1
        assert "TP2 LOCKSTEP FAILURE at record 1" in str(failure)
        assert f"rank 0: {RECORD}" in str(failure)
        assert f"rank 1: {other}" in str(failure)


def test_a_silent_twin_is_a_timeout() -> None:
    with pytest.raises(LockstepTimeout, match=r"no lockstep record 1 from rank 1 within 0\.2 s"):
        make(0.2)[0].agree(RECORD, 0, 0)


@pytest.mark.parametrize(
    ("kind", "field"), [("hash", "token_hash"), ("position", "position"), ("count", "tokens_produced")]
)
def test_the_door_falsifies_one_rank_at_one_round(monkeypatch: pytest.MonkeyPatch, kind: str, field: str) -> None:
    monkeypatch.setenv(LOCKSTEP_DOOR, f"1:2:{kind}")
    ranks = make()
    prefill = replace(RECORD, kind="prefill")
    for record in (RECORD, prefill, RECORD, prefill):
        found = both(lambda: ranks[0].agree(record, 1, 0), lambda: ranks[1].agree(record, 1, 0))  # noqa: B023
        assert found == [Agreement(1, 0)] * 2
    failures = both(lambda: ranks[0].agree(RECORD, 1, 0), lambda: ranks[1].agree(RECORD, 1, 0))
    assert all(isinstance(failure, LockstepFailure) for failure in failures)
    lines = str(failures[0]).splitlines()
    assert f"{field}={getattr(RECORD, field)}," in lines[1]
    assert f"{field}={getattr(RECORD, field)}," not in lines[2]


def test_one_rank_agrees_with_itself() -> None:
    assert SoloLockstep().agree(RECORD, 7, 9) == Agreement(7, 9)


def test_the_last_of_two_records_is_the_one_that_is_shown() -> None:
    region = Region(bytearray(region_bytes(4)), 4)
    lockstep = SoloLockstep(region)
    assert last_record(region, 0) == (0, None)
    for number in range(1, 6):
        lockstep.agree(replace(RECORD, position=number), number, 0)
        assert last_record(region, 0) == (number, replace(RECORD, position=number))


@settings(max_examples=40, deadline=None)
@given(byte=st.integers(0, 8 * RECORD_WORDS - 1), bit=st.integers(0, 7))
def test_a_record_that_is_torn_or_flipped_is_none(byte: int, bit: int) -> None:
    """Neither taken for an agreement nor for a difference: a record counts once it is whole."""
    region = Region(bytearray(region_bytes(4)), 4)
    ranks = [SharedLockstep(region, rank, 0.02) for rank in (0, 1)]
    with pytest.raises(LockstepTimeout):
        ranks[1].agree(RECORD, 3, 0)  # leaves its record
    theirs = memoryview(region.records[1, 1]).cast("B")
    theirs[byte] ^= 1 << bit
    with pytest.raises(LockstepTimeout):
        ranks[0].agree(RECORD, 3, 0)
    assert last_record(region, 1) == (0, None)
    theirs[byte] ^= 1 << bit
    assert last_record(region, 1) == (1, RECORD)
    again = SharedLockstep(region, 0, 0.02)
    assert again.agree(RECORD, 2, 1) == Agreement(2, 1)
