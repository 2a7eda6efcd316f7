"""The exchange of two ranks, each in a thread of its own: both emulated, or both on one GPU in streams of their own."""

from __future__ import annotations

import contextvars
import ctypes
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from duovolt.checkpoint.errors import EnvironmentFault, InputError
from duovolt.kernels import build as builder
from duovolt.kernels import checks, mailbox, norm
from duovolt.kernels.module import overlapping
from duovolt.kernels.tuning import Choice, using
from duovolt.perf.kernels import random_weight
from duovolt.perf.streams import streams
from duovolt.perf.volta_code import kernels_of

from .conftest import ON_GPU, Emulated
from .support import Guarded

SLOT = 6000
EPS = 1e-6
_rank = threading.local()


@dataclass
class WatchedLink(mailbox.Link):
    """A link that also tells the emulator which memory it may touch."""

    tensors: list[torch.Tensor] = field(default_factory=list)

    @property
    def struct(self) -> mailbox.LinkStruct:
        made = super().struct
        made.tensors = self.tensors  # type: ignore[attr-defined]
        return made


@dataclass
class Pair:
    """Both ends. `run` does the same on both ranks at once and returns both results."""

    links: list[WatchedLink]

    def run(self, action: Callable[[WatchedLink], Any]) -> list[Any]:
        results: list[Any] = [None, None]

        def work(link: WatchedLink) -> None:
            _rank.number = link.rank
            device = link.state.device
            try:
                if device.type == "cuda":
                    with torch.cuda.stream(torch.cuda.Stream(device)):
                        results[link.rank] = action(link)
                else:
                    results[link.rank] = action(link)
            except BaseException as error:
                results[link.rank] = error

        context = contextvars.copy_context  # holds the architecture asked for
        threads = [threading.Thread(target=context().run, args=(work, link)) for link in self.links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


@pytest.fixture
def pair(device, emulated, monkeypatch, tmp_path) -> Callable[..., Pair]:
    if device.type == "cpu":  # an emulator keeps the state of its threads in variables of the library: one a rank
        first = emulated(mailbox.SOURCE, "volta")
        second = Emulated(
            ctypes.CDLL(shutil.copy(first._library._name, tmp_path / "second.so")), first.arch, first.parameters
        )
        monkeypatch.setattr(checks, "module_on", lambda source, device: (first, second)[_rank.number])
    else:
        mailbox.prepare(device)

    def make(
        budget: float = 20.0, far: bool = False, first_step: int = 1, doors: dict[int, dict] | None = None
    ) -> Pair:
        inboxes = [torch.zeros(2 * SLOT, dtype=torch.int64, device=device) for _ in range(2)]
        links = []
        for rank in (0, 1):
            state = mailbox.new_state(device, first_step=first_step, **(doors or {}).get(rank, {}))
            expired = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
            tensors = [*inboxes, state, expired]
            ends = (inboxes[rank].data_ptr(), inboxes[1 - rank].data_ptr())
            links.append(WatchedLink(*ends, state, expired, budget, SLOT, rank, far, tensors))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return Pair(links)

    return make


def halves(shape: tuple[int, int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bits = [torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16) for _ in range(2)]
    values = [part.view(torch.float16) for part in bits]
    return [torch.where(part.isfinite(), part, torch.ones_like(part)) for part in values]


def reduced(link: WatchedLink, part: torch.Tensor) -> torch.Tensor:
    out = Guarded(tuple(part.shape), torch.float32, link.state.device)
    mailbox.reduce(link, part.to(link.state.device), out.inner)
    assert out.intact
    return out.inner.cpu()


def steps(link: WatchedLink) -> set[int]:
    return {step & 0xFFFFFFFF for step in link.state[mailbox.HEADER :].tolist()}


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
        out = Guarded((rows, 2 * columns), torch.float32, link.state.device, 2 * columns + 7)
        mailbox.gather(link, wide[link.rank].to(link.state.device)[:, :columns], out.inner)
        assert out.intact
        return out.inner.cpu()

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
    inbox = two.links[0].tensors[0][:40].cpu()
    assert int((inbox >> 32).min()) >= 45 - 2 * 20


def test_a_late_peer_within_the_budget_changes_nothing(pair):
    """R04, with the next: the budget is wall time."""
    two = pair(budget=1.0)
    parts = halves((1, 300), 5)

    def late(link):
        time.sleep(0.15 * link.rank)
        return reduced(link, parts[link.rank])

    first, second = two.run(late)
    assert torch.equal(first, second) and not any(link.expired.item() for link in two.links)


def await_words(link: WatchedLink, step: int) -> None:
    """Until the peer has sent something of `step`; emulated, an inbox is this process's own memory."""
    deadline = time.monotonic() + 60
    while not bool((link.tensors[link.rank] >> 32 == step).any()):
        assert time.monotonic() < deadline, "the peer never came to the step"
        time.sleep(0.005)


@pytest.mark.parametrize("door", [{"door": "drop"}, {"door": "stale"}, {"door": "delay", "delay_ms": 900}])
def test_a_wait_that_expires_poisons_the_rest(pair, door):
    """R04: 200 ms are 200 to 300 ms.

    The first exchange, which nothing is wrong with, may take longer: on a busy machine a thread may wait 200 ms for a
    processor. Rank 1 goes into the second behind rank 0, so that its delay is one to rank 0, however late it is itself.
    """
    two = pair(budget=20.0, doors={1: {**door, "door_step": 2}})
    parts = halves((1, 1500), 6)

    def three(link):
        results, seconds = [], []
        for turn in range(3):
            link.budget_seconds = 0.2 if turn else 20.0
            if turn == 1 and link.rank == 1 and not link.state.is_cuda:
                await_words(link, step=2)
            begin = time.monotonic()
            results.append(reduced(link, parts[link.rank]))
            seconds.append(time.monotonic() - begin)
        return results, seconds

    (first, seconds), _ = two.run(three)
    assert torch.equal(first[0], parts[0].float() + parts[1].float())
    lost = first[1].isnan()  # of a delay, other blocks' words may be in time
    assert (lost.any() if door["door"] == "delay" else lost.all()) and first[2].isnan().all()
    assert two.links[0].expired.item() == 2  # and no 3: what follows does not wait again
    assert seconds[1] >= 0.2
    if two.links[0].state.is_cuda:  # emulated, a busy machine may take any time
        assert seconds[1] < 0.3 and seconds[2] < 0.2
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


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("columns", [8, 1032, 5120])
def test_a_sum_with_residual_and_norm_has_the_bits_of_the_plain_form(pair, columns, far):
    two, rows = pair(far=far), 2
    parts, weight = [part.clamp(-1e4, 1e4) for part in halves((rows, columns), columns)], torch.randn(columns)
    residual = torch.randn(rows, columns) * 100

    def fused(link):
        device = link.state.device
        x = Guarded((rows, columns), torch.float32, device, columns + 8)
        out = Guarded((rows, columns), torch.float16, device, columns + 16)
        overflows = torch.zeros(rows, dtype=torch.int32, device=device)
        x.inner.copy_(residual)
        part = parts[link.rank].to(device)
        mailbox.reduce_norm(link, part, x.inner, weight.to(device), EPS, out.inner, overflows)
        assert x.intact and out.intact
        return x.inner.cpu(), out.inner.cpu(), overflows.cpu()

    def plain(link):
        device = link.state.device
        delta, x = torch.empty(rows, columns, device=device), residual.clone().to(device)
        mailbox.reduce(link, parts[link.rank].to(device), delta)
        overflows = torch.zeros(rows, dtype=torch.int32, device=device)
        if device.type == "cpu":  # the norm's own emulation is another library
            x += delta
            return x.cpu(), norm.rms_norm_reference(x.clone(), weight, EPS, overflows=overflows), overflows
        out = norm.rms_norm(x, weight.to(device), EPS, delta=delta, overflows=overflows)
        return x.cpu(), out.cpu(), overflows.cpu()

    first, second = two.run(fused)
    expected, _ = two.run(plain)
    for got, other in zip(first, second, strict=True):
        assert torch.equal(got, other)
    assert torch.equal(first[0], expected[0]) and torch.equal(first[2], expected[2])
    if two.links[0].state.device.type == "cpu":
        torch.testing.assert_close(first[1], expected[1], rtol=2e-3, atol=1e-6)
    else:
        assert torch.equal(first[1], expected[1])
    assert steps(two.links[0]) == {3}


def asked_lines(device: torch.device) -> list[int]:
    """Addresses that the last emulated kernel of this thread's rank has asked for."""
    library, found = checks.module_on(mailbox.SOURCE, device)._library, (ctypes.c_uint64 * 4096)()
    return sorted(found[: library.prefetched(found, len(found))])


@pytest.mark.parametrize("asked", [0, 1])
def test_weights_of_the_next_launch_are_asked_for_and_no_bit_changes(pair, asked):
    """Each whole line of them once, by blocks that leave the exchange and its counters alone."""
    two, (rows, columns) = pair(), (3, 1032)
    parts, weight = [part.clamp(-1e4, 1e4) for part in halves((rows, columns), 7)], torch.randn(columns)
    residual, device = torch.randn(rows, columns), two.links[0].state.device
    matrices = [random_weight(*shape, device) for shape in (("nvfp4", 96, 112), ("fp8", 64, 80), ("half", 32, 48))]
    memory = [matrices[0].words, matrices[0].block_scale, matrices[1].words, matrices[2].words]
    for link in two.links:
        link.tensors += memory

    def fused(link, then=()):
        x, out = residual.clone().to(device), torch.zeros(rows, columns, dtype=torch.float16, device=device)
        overflows = torch.zeros(rows, dtype=torch.int32, device=device)
        part = parts[link.rank].to(device)
        mailbox.reduce_norm(link, part, x, weight.to(device), EPS, out, overflows, then)
        lines = [] if device.type == "cuda" else asked_lines(device)
        return [one.cpu() for one in (x, out, overflows)], lines

    (plain, none), _ = two.run(fused)
    with using(Choice(asked=asked)):
        found = two.run(lambda link: fused(link, matrices))
    for tensors, lines in found:
        assert all(torch.equal(one, other) for one, other in zip(tensors, plain, strict=True))
        if device.type == "cpu":
            whole = [part.data_ptr() + at for part in memory for at in range(0, part.nbytes - 127, 128)]
            assert none == [] and lines == (sorted(whole) if asked else [])
    assert [steps(link) for link in two.links] == [{3}, {3}]


def test_exchanges_that_let_the_next_launch_begin_give_the_same(pair):
    """Three kinds in turn, each behind another, on parts that the one before has written (on a card launches overlap)."""
    two, columns = pair(), 1024
    parts, wide = halves((2, columns), 5), torch.randn(2, columns)

    def turns(link):
        device = link.state.device
        part, weight = parts[link.rank].clamp(-8, 8).to(device), wide[0].to(device)
        x, total = wide.clone().to(device), torch.empty(2, columns, device=device)
        both, found = torch.empty(2, 2 * columns, device=device), []
        for _ in range(4):
            out = torch.empty(2, columns, dtype=torch.float16, device=device)
            mailbox.reduce_norm(link, part, x, weight, EPS, out)
            mailbox.reduce(link, out, total)
            mailbox.gather(link, total, both)
            part = out
            found += [out, total.clone(), both.clone()]
        return [one.cpu() for one in (*found, x)]

    late, _ = two.run(turns)
    with using(Choice(early=frozenset({"exchange"}))), overlapping():
        for early in two.run(turns):
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(early, late, strict=True))
    assert steps(two.links[0]) == {25}


def test_a_lost_peer_makes_the_norm_nan(pair):
    two = pair(budget=0.2, doors={1: {"door": "drop", "door_step": 1}})

    def fused(link):
        device = link.state.device
        x, out = torch.ones(1, 64, device=device), torch.zeros(1, 64, dtype=torch.float16, device=device)
        part = torch.ones(1, 64, dtype=torch.float16, device=device)
        mailbox.reduce_norm(link, part, x, torch.ones(64, device=device), EPS, out)
        return out.cpu()

    first, _ = two.run(fused)
    assert first.isnan().all() and two.links[0].expired.item() == 1


@pytest.mark.parametrize("come", [0, 1], ids=["first words", "second words"])
def test_half_a_message_is_none(pair, come):
    """Of each four values two words travel; where one of them has not come, those two values are no numbers."""
    two, columns = pair(budget=0.05), 64
    link, quads = two.links[0], columns // 4
    inbox, device = two.links[0].tensors[0], two.links[0].state.device
    inbox[SLOT + come * quads : SLOT + (come + 1) * quads] = 1 << 32  # step 1, two zeros
    if link.state.is_cuda:
        torch.cuda.synchronize()
    _rank.number = 0
    x, out = torch.ones(1, columns, device=device), torch.zeros(1, columns, dtype=torch.float16, device=device)
    part = torch.ones(1, columns, dtype=torch.float16, device=device)
    mailbox.reduce_norm(link, part, x, torch.ones(columns, device=device), EPS, out)
    pairs = x.cpu().view(quads, 2, 2)
    assert pairs[:, 1 - come].isnan().all() and out.isnan().all().item()
    assert link.expired.item() == 1


@pytest.mark.parametrize("values", [2, 8, 26, 4096, 10_242])
def test_whole_parts_are_added_once_both_have_met(pair, values):
    """The copy stands before the meeting on its stream; sums have rank 0 first, as words give them."""
    two, parts = pair(), halves((1, values), values)
    rooms = [torch.zeros(values, dtype=torch.float16, device=two.links[0].state.device) for _ in range(2)]
    for link in two.links:
        link.tensors += rooms
        if link.state.is_cuda:
            torch.cuda.synchronize()

    def whole(link):
        part = parts[link.rank].to(link.state.device)
        rooms[1 - link.rank].copy_(part.view(-1))
        mailbox.meet(link)
        out = Guarded((1, values), torch.float32, link.state.device)
        mailbox.join(link, part, rooms[link.rank].data_ptr(), out.inner)
        assert out.intact
        return out.inner.cpu()

    first, second = two.run(whole)
    expected = parts[0].float() + parts[1].float()
    assert torch.equal(first.view(torch.int32), expected.view(torch.int32)) and torch.equal(first, second)
    assert [steps(link) for link in two.links] == [{2}, {2}]


def test_a_meeting_that_does_not_come_about_makes_nan(pair):
    two = pair(budget=0.2, doors={1: {"door": "drop", "door_step": 1}})
    room = torch.ones(1, 8, dtype=torch.float16, device=two.links[0].state.device)

    def whole(link):
        link.tensors.append(room)
        mailbox.meet(link)
        out = torch.zeros(1, 8, device=room.device)
        mailbox.join(link, room, room.data_ptr(), out)
        return out.cpu()

    first, _ = two.run(whole)
    assert first.isnan().all() and two.links[0].expired.item() == 1


def test_a_stream_lingers_as_long_as_it_is_told(device):
    begin = time.monotonic()
    mailbox.linger(0.02, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    assert time.monotonic() - begin >= 0.02


@pytest.mark.parametrize("values", [2, 6, 30, 62, 3000])
def test_add_of_two_parts(device, values):
    """As NCCL's gather leaves them: one behind the other, wherever the second begins."""
    both = torch.stack(halves((1, values), 8)).to(device)
    out = Guarded((1, values), torch.float32, device)
    mailbox.add(both[0], both[1], out.inner)
    assert out.intact and torch.equal(out.inner, both[0].float() + both[1].float())


@pytest.mark.parametrize("device", ON_GPU, indirect=True)
def test_replays_of_a_graph_advance_the_step(pair):
    """Both ranks in one graph, in branches that run at once."""
    two, shape = pair(budget=5.0), (4, 2560)
    device = two.links[0].state.device
    parts = [torch.zeros(shape, dtype=torch.float16, device=device) for _ in range(2)]
    outs = [torch.zeros(shape, device=device) for _ in range(2)]
    start, *sides = streams(device, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=start):
        for link, part, out, stream in zip(two.links, parts, outs, sides, strict=True):
            stream.wait_stream(start)
            with torch.cuda.stream(stream):
                for _ in range(3):
                    mailbox.reduce(link, part, out)
        for stream in sides:
            start.wait_stream(stream)
    for turn in range(20):
        for rank, part in enumerate(halves(shape, turn)):
            parts[rank].copy_(part)
        graph.replay()
        expected = parts[0].float() + parts[1].float()
        assert torch.equal(outs[0], expected) and torch.equal(outs[1], expected)
    assert steps(two.links[0]) == steps(two.links[1]) == {61}


def ptx(arch: str) -> str:
    try:
        return builder.build(mailbox.SOURCE, arch).image.decode()
    except EnvironmentFault as missing:
        pytest.skip(str(missing))


def test_words_are_moved_by_volatile_accesses_of_8_bytes():
    text = ptx("compute_70")
    assert re.search(r"^\.target sm_70$", text, re.M)
    for instruction in ("ld.volatile.global.u64", "st.volatile.global.u64", "%globaltimer"):
        assert instruction in text, instruction
    assert not re.search(r"\b(atom|red)\.(?!\S*\.add\.[us]32)", text)  # but for counts of overflows
    assert not re.search(r"\b(ld|st)\.(?!volatile|param)[\w.]*64\b", text), "a word moved in some other way"


def test_a_v100_sees_them_as_strong_accesses_of_the_system():
    """Bits of sm_70's LDG and STG, as nvdisasm prints `.E.64.STRONG.SYS`: size from bit 73, scope 77, strength 79."""
    try:
        image = builder.build(mailbox.SOURCE, "sm_70").image
    except EnvironmentFault as missing:
        pytest.skip(str(missing))
    kernels = kernels_of(image)
    for name in ("mailbox_reduce", "mailbox_gather", "mailbox_reduce_norm"):
        for access in ("LDG", "STG"):
            forms = {
                (one.high >> 9 & 7, one.high >> 13 & 3, one.high >> 15 & 3)
                for one in kernels[name]
                if one.name == access
            }
            assert (5, 3, 2) in forms, (name, access)


def test_what_does_not_fit_is_refused(pair, device):
    link = pair().links[0]
    for values in (2 * SLOT + 2, 3):
        part, out = torch.zeros(1, values, dtype=torch.float16, device=device), torch.zeros(1, values, device=device)
        with pytest.raises(InputError, match="a message of"):
            mailbox.reduce(link, part, out)
    with pytest.raises(InputError, match=r"out is torch.float32 \[1, 4\]"):
        mailbox.gather(link, torch.zeros(1, 4, device=device), torch.zeros(1, 4, device=device))
    with pytest.raises(InputError, match="a multiple of 8 columns"):
        half, wide = torch.zeros(1, 12, dtype=torch.float16, device=device), torch.zeros(1, 12, device=device)
        mailbox.reduce_norm(link, half, wide, wide[0], EPS, half)
