"""The exchange of two ranks: both emulated, each in a thread of its own, over inboxes in this process's memory."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from duovolt.checkpoint.errors import InputError
from duovolt.kernels import checks, mailbox

from .conftest import compiled
from .support import Guarded

SLOT = 6000
CPU = torch.device("cpu")


@dataclass
class EmulatedLink(mailbox.Link):
    """A link that also tells the emulator which memory it may touch."""

    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def struct(self) -> mailbox.LinkStruct:
        made = super().struct
        made.tensors = self.tensors  # type: ignore[attr-defined]
        return made


@dataclass
class Pair:
    """Both ends; `run` does the same on both ranks, each in its thread, and returns both results."""

    links: list[EmulatedLink]

    def run(self, action: Callable[[EmulatedLink], Any], first: Callable[[EmulatedLink], None] | None = None) -> list:
        results: list[Any] = [None, None]

        def work(link: EmulatedLink) -> None:
            _rank.number = link.rank
            if first is not None:
                first(link)
            try:
                results[link.rank] = action(link)
            except BaseException as error:
                results[link.rank] = error

        threads = [threading.Thread(target=work, args=(link,)) for link in self.links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


_rank = threading.local()


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The source compiled once a rank: its emulator keeps its threads' state in variables of the library."""
    return [compiled(mailbox.SOURCE, "volta", tmp_path_factory.mktemp(f"rank-{rank}")) for rank in (0, 1)]


@pytest.fixture
def pair(libraries: list[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    monkeypatch.setattr(checks, "module_on", lambda source, device: libraries[_rank.number])

    def make(budget: float = 20.0, far: bool = False, first_step: int = 1, doors: dict[int, dict] | None = None) -> Pair:
        inboxes = [torch.zeros(2 * SLOT, dtype=torch.int64) for _ in range(2)]
        links = []
        for rank in (0, 1):
            state = mailbox.new_state(CPU, first_step=first_step, **(doors or {}).get(rank, {}))
            expired = torch.zeros(1, dtype=torch.int32)
            tensors = [*inboxes, state, expired]
            ends = (inboxes[rank].data_ptr(), inboxes[1 - rank].data_ptr())
            links.append(EmulatedLink(*ends, state, expired, budget, SLOT, rank, far, tensors))
        return Pair(links)

    return make


def halves(shape: tuple[int, int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bits = [torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16) for _ in range(2)]
    values = [part.view(torch.float16) for part in bits]
    return [torch.where(part.isfinite(), part, torch.ones_like(part)) for part in values]


def reduced(link: EmulatedLink, part: torch.Tensor) -> torch.Tensor:
    out = Guarded(tuple(part.shape), torch.float32, CPU)
    mailbox.reduce(link, part, out.inner)
    assert out.intact
    return out.inner.clone()


def steps(link: EmulatedLink) -> set[int]:
    return {int(step) & 0xFFFFFFFF for step in link.state[mailbox.HEADER :]}


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (1, 510), (1, 512), (1, 514), (1, 1024), (1, 1026), (3, 1022), (2, 6000)])
def test_sums_have_rank_0_first_and_the_same_bits_on_both_ranks(pair, shape, far):
    two = pair(far=far)
    for turn in range(3):
        parts = halves(shape, turn)
        first, second = two.run(lambda link, parts=parts: reduced(link, parts[link.rank]))
        expected = parts[0].float() + parts[1].float()
        assert torch.equal(first.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(first.view(torch.int32), second.view(torch.int32))
    assert [steps(link) for link in two.links] == [{4}, {4}]


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (4, 3), (2, 300), (1, 2999)])
def test_columns_are_gathered_in_rank_order(pair, shape, far):
    two, (rows, columns) = pair(far=far), shape
    wide = [torch.randn(rows, columns + 5) for _ in range(2)]

    def gather(link):
        out = Guarded((rows, 2 * columns), torch.float32, CPU, 2 * columns + 7)
        mailbox.gather(link, wide[link.rank][:, :columns], out.inner)
        assert out.intact
        return out.inner.clone()

    first, second = two.run(gather)
    assert torch.equal(first, torch.cat([part[:, :columns] for part in wide], dim=1))
    assert torch.equal(first, second)


def test_the_step_wraps_and_stale_words_of_the_last_turn_are_not_taken(pair):
    two = pair(first_step=mailbox.LAST_STEP - 1)
    for turn in range(4):
        parts = halves((1, 40 + 400 * turn), turn)
        first, second = two.run(lambda link, parts=parts: reduced(link, parts[link.rank]))
        assert torch.equal(first, parts[0].float() + parts[1].float()) and torch.equal(first, second)
    assert steps(two.links[0]) == {4}  # 2^32 - 2, 2^32 - 1, 2, 3


def test_every_word_of_an_inbox_is_refreshed_in_time(pair):
    two = pair()
    for link in two.links:
        link.slot = 20  # words of the second half follow those of the first
    for turn in range(45):
        parts = halves((1, 8), turn)
        two.run(lambda link, parts=parts: reduced(link, parts[link.rank]))
    inbox = two.links[0].tensors[0][:40]
    assert int((inbox >> 32).min()) >= 45 - 2 * 20


def test_a_late_peer_within_the_budget_changes_nothing(pair):
    two = pair(budget=1.0)
    parts = halves((1, 300), 5)
    late = lambda link: time.sleep(0.15 * link.rank)  # noqa: E731
    first, second = two.run(lambda link: reduced(link, parts[link.rank]), late)
    assert torch.equal(first, second) and not any(link.expired.item() for link in two.links)


@pytest.mark.parametrize("door", [{"door": "drop"}, {"door": "stale"}, {"door": "delay", "delay_ms": 900}])
def test_a_wait_that_expires_poisons_the_rest(pair, door):
    two = pair(budget=0.2, doors={1: {**door, "door_step": 2}})
    parts = halves((1, 1500), 6)

    def three(link):
        results, seconds = [], []
        for _ in range(3):
            begin = time.monotonic()
            results.append(reduced(link, parts[link.rank]))
            seconds.append(time.monotonic() - begin)
        return results, seconds

    (first, seconds), _ = two.run(three)
    assert torch.equal(first[0], parts[0].float() + parts[1].float())
    assert first[1].isnan().any() and first[2].isnan().all()
    assert two.links[0].expired.item() == 2
    assert 0.2 <= seconds[1] < 0.6 and seconds[2] < 0.2  # what follows does not wait again
    assert two.links[1].expired.item() > 0  # rank 0 is silent from there on


def test_a_delay_within_the_budget_only_delays(pair):
    two = pair(budget=5.0, doors={0: {"door": "delay", "door_step": 1, "delay_ms": 200}})
    parts = halves((1, 20), 7)
    begin = time.monotonic()
    first, second = two.run(lambda link: reduced(link, parts[link.rank]))
    assert torch.equal(first, second) and not first.isnan().any()
    assert time.monotonic() - begin >= 0.2


def test_unequal_sizes_poison_and_do_not_hang(pair):
    two = pair(budget=0.2)
    two.run(lambda link: reduced(link, torch.zeros(1, 200 + 200 * link.rank, dtype=torch.float16)))
    assert two.links[1].expired.item() == 1


def test_add_of_two_parts(pair):
    first, second = halves((3, 1000), 8)
    out = Guarded((3, 1000), torch.float32, CPU)
    _rank.number = 0
    pair()
    mailbox.add(first, second, out.inner)
    assert out.intact and torch.equal(out.inner, first.float() + second.float())


def test_what_does_not_fit_is_refused(pair):
    link = pair().links[0]
    for values in (2 * SLOT + 2, 3):
        with pytest.raises(InputError, match="a message of"):
            mailbox.reduce(link, torch.zeros(1, values, dtype=torch.float16), torch.zeros(1, values))
    with pytest.raises(InputError, match=r"out is torch.float32 \[1, 4\]"):
        mailbox.gather(link, torch.zeros(1, 4), torch.zeros(1, 4))
