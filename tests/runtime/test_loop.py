"""The rank's loop: both ranks admit and cancel at the same steps, however the messages arrive."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from duovolt.runtime.messages import CancelRequest, GenerateRequest, SamplingParams
from duovolt.runtime.parallel.lockstep import Agreement, SharedLockstep, SoloLockstep
from duovolt.runtime.parallel.region import ProgressCounter, Region, region_bytes
from duovolt.runtime.rank.loop import RankLoop
from duovolt.runtime.rank.scripted import ScriptedAnswer, ScriptedEngine
from duovolt.runtime.rank.wire import Step, Stop, Unreadable, decode_to_proxy, decode_to_rank, encode


class SlowSocket:
    """Delivers message i at the poll number `arrivals[i]`, in order; `stop` ends the loop after all is answered."""

    def __init__(self, messages: list[Any], arrivals: list[int], finals: int) -> None:
        self._messages = deque(zip(sorted(arrivals), messages, strict=True))
        self._polls = 0
        self._finals = finals
        self.sent: list[Step] = []

    def poll(self, timeout: int) -> bool:
        self._polls += 1
        if self._messages:
            return self._messages[0][0] <= self._polls
        return self._finals <= 0

    def recv(self) -> bytes:
        return encode(self._messages.popleft()[1] if self._messages else Stop())

    def send(self, data: bytes) -> None:
        step = decode_to_proxy(data)
        assert isinstance(step, Step)
        self._finals -= sum(event.finish_reason is not None for event in step.events)
        self.sent.append(step)


def request(number: int, length: int = 1000) -> GenerateRequest:
    return GenerateRequest(number, [1, 2], length, [9], False, SamplingParams())


def run(
    socket: SlowSocket, lockstep: Any, rank: int, region: Region, answers: list[ScriptedAnswer], lanes: int
) -> None:
    RankLoop(ScriptedEngine(answers, lanes, None), lockstep, socket, ProgressCounter(region, rank)).run()  # type: ignore[arg-type]


BROKEN = GenerateRequest(7, [1], 5, [], False, SamplingParams(temperature="hot"))  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(arrivals=st.lists(st.integers(1, 12), min_size=8, max_size=8), place=st.integers(0, 2))
def test_a_request_that_cannot_be_read_ends_with_an_error_and_the_others_go_on(arrivals: list[int], place: int) -> None:
    messages: list[Any] = [request(1), request(2)]
    messages.insert(place, BROKEN)
    messages.insert(place, {"type": "nothing"})
    region = Region(bytearray(region_bytes(4)), 4)
    answers = [ScriptedAnswer([[5, 6], [7]]), ScriptedAnswer([[1]])]
    sockets = [SlowSocket(list(messages), arrivals[4 * rank : 4 * rank + 4], 3) for rank in range(2)]
    threads = [
        threading.Thread(target=run, args=(socket, SharedLockstep(region, rank, 20), rank, region, answers, 2))
        for rank, socket in enumerate(sockets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert sockets[0].sent == sockets[1].sent
    events = [event for step in sockets[0].sent for event in step.events]
    ends = {event.request_id: event for event in events if event.finish_reason is not None}
    assert {number: event.finish_reason for number, event in ends.items()} == {1: "stop", 2: "stop", 7: "error"}
    assert "cannot read this request: Expected `float`, got `str`" in ends[7].error
    made = {number: [t for event in events if event.request_id == number for t in event.tokens] for number in ends}
    assert made == {1: [5, 6, 7], 2: [1], 7: []}


def test_only_a_request_of_known_number_is_answered_if_it_cannot_be_read() -> None:
    for data in (b"", b"\xc1", b"\x91" * 100000, encode(["x"]), encode({"type": "generate", "request_id": -1})):
        message = decode_to_rank(data)
        assert isinstance(message, Unreadable) and message.request_id is None and message.reason
    broken_cancel = decode_to_rank(encode({"type": "cancel", "request_id": 3, "more": 1}))
    assert isinstance(broken_cancel, Unreadable) and broken_cancel.request_id is None
    assert decode_to_rank(encode(CancelRequest(3))) == CancelRequest(3)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 6), lanes=st.integers(1, 4))
def test_ranks_give_the_same_steps_whatever_the_arrival(data: st.DataObject, count: int, lanes: int) -> None:
    answers = [
        ScriptedAnswer([[5, 6], [7], [8, 8, 8], [4], [3]]),
        ScriptedAnswer([[1]]),
        ScriptedAnswer([[2, 9, 2], [2]]),
    ]
    messages: list[Any] = [request(number) for number in range(1, count + 1)]
    for number in data.draw(st.lists(st.integers(1, count), max_size=3)):
        messages.insert(data.draw(st.integers(number, len(messages))), CancelRequest(number))
    region = Region(bytearray(region_bytes(4)), 4)
    sockets = [
        SlowSocket(
            messages, data.draw(st.lists(st.integers(1, 25), min_size=len(messages), max_size=len(messages))), count
        )
        for _ in range(2)
    ]
    threads = [
        threading.Thread(target=run, args=(socket, SharedLockstep(region, rank, 20), rank, region, answers, lanes))
        for rank, socket in enumerate(sockets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sockets[0].sent == sockets[1].sent
    events = [event for step in sockets[0].sent for event in step.events]
    assert sorted(event.request_id for event in events if event.finish_reason) == list(range(1, count + 1))
    assert [step.sequence for step in sockets[0].sent] == list(range(1, len(sockets[0].sent) + 1))


def test_a_cancel_ends_the_answer_at_the_next_step() -> None:
    region = Region(bytearray(region_bytes(4)), 4)
    socket = SlowSocket([request(1), CancelRequest(1), CancelRequest(1)], [1, 5, 6], 1)
    run(socket, SoloLockstep(), 0, region, [ScriptedAnswer([[n] for n in range(50)])], 1)
    events = [event for step in socket.sent for event in step.events]
    assert [event.finish_reason for event in events][-1] == "cancelled"
    assert len(events) < 6


class Agreed:
    """A twin that has received `counts[n]` messages at record n, and cancels nothing; then as many as this rank."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = deque(counts)
        self.masks: list[int] = []

    def agree(self, record: Any, received: int, cancel_mask: int) -> Agreement:
        self.masks.append(cancel_mask)
        return Agreement(min(received, self._counts.popleft() if self._counts else received), cancel_mask)


def test_a_cancel_is_kept_for_a_request_that_the_twin_has_yet_to_receive() -> None:
    region = Region(bytearray(region_bytes(4)), 4)
    socket, lockstep = SlowSocket([request(1), request(2), CancelRequest(2)], [1, 2, 3], 2), Agreed([1] * 6)
    answers = [ScriptedAnswer([[n] for n in range(12)]), ScriptedAnswer([[n] for n in range(40)])]
    run(socket, lockstep, 0, region, answers, 2)
    ends = {e.request_id: e.finish_reason for step in socket.sent for e in step.events if e.finish_reason is not None}
    assert ends == {1: "stop", 2: "cancelled"}
    assert [mask for mask in lockstep.masks if mask] == [2], "told once, at its place among the open ones"


def test_the_first_sixty_four_requests_have_a_bit_each() -> None:
    region = Region(bytearray(region_bytes(4)), 4)
    messages: list[Any] = [request(number) for number in range(1, 67)]
    last = [CancelRequest(number) for number in (2, 64, 65)]
    socket = SlowSocket(messages + last, [1] * 66 + [3] * 3, 66)
    lockstep = Agreed([])
    run(socket, lockstep, 0, region, [ScriptedAnswer([[5], [6], [7], [8]])], 66)
    ends = {e.request_id: e.finish_reason for step in socket.sent for e in step.events if e.finish_reason is not None}
    assert [number for number, reason in ends.items() if reason == "cancelled"][:2] == [2, 64]
    assert max(lockstep.masks) == 1 << 63 | 1 << 1


def test_the_script_obeys_length_stop_ids_and_ignore_eos() -> None:
    def answer(**changes: Any) -> tuple[list[int], str | None]:
        asked = request(1, changes.get("length", 1000))
        asked.ignore_eos = changes.get("ignore_eos", False)
        region = Region(bytearray(region_bytes(4)), 4)
        socket = SlowSocket([asked], [1], 1)
        run(socket, SoloLockstep(), 0, region, [ScriptedAnswer([[5, 9, 6], [7]])], 1)
        events = [event for step in socket.sent for event in step.events]
        return [token for event in events for token in event.tokens], events[-1].finish_reason

    assert answer() == ([5, 9], "stop")
    assert answer(ignore_eos=True) == ([5, 9, 6, 7], "stop")
    assert answer(ignore_eos=True, length=3) == ([5, 9, 6], "length")
    assert answer(length=1) == ([5], "length")


def test_the_progress_counter_moves_with_the_loop() -> None:
    region = Region(bytearray(region_bytes(4)), 4)
    run(SlowSocket([request(1)], [2], 1), SoloLockstep(), 0, region, [ScriptedAnswer([[1], [2]])], 1)
    counter = ProgressCounter(region, 0)
    assert counter.steps >= 4
    assert 0 <= counter.age_seconds < 30
    assert not np.any(region.progress[1])


def test_what_fp16_could_not_hold_is_told_at_each_turn() -> None:
    """A rank's own share: not a part of the record, in which ranks must agree."""
    region = Region(bytearray(region_bytes(4)), 4)
    engine = ScriptedEngine([ScriptedAnswer([[1], [2]])], 1, None, overflows=12)
    RankLoop(engine, SoloLockstep(), SlowSocket([request(1)], [2], 1), ProgressCounter(region, 1)).run()  # type: ignore[arg-type]
    assert (ProgressCounter(region, 1).overflows, ProgressCounter(region, 0).overflows) == (12, 0)
