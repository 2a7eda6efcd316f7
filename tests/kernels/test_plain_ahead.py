"""Plain weights made ahead: every product finds its matrix made, none is overwritten before its product, and some stand beside.

No GPU: streams are noted, and what waits for what is followed.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from duovolt.kernels import plain, plain_ahead, prefill
from duovolt.kernels.plain_ahead import PlainAhead, places
from duovolt.kernels.tuning import Choice, using


class World:
    """Streams, and their work in the order in which it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.after: list[set[int]] = []  # by node: all that has run before it
        self.work: list[tuple[str, int, int, int]] = []  # node, what, its first element and the one behind its last
        self.main = self.now = FakeStream(self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: FakeStream) -> Any:
        before, self.now = self.now, stream
        yield
        self.now = before

    def did(self, what: str, begin: int, end: int) -> None:
        node = self.now.step(set())
        self.work.append((what, node, begin, end))

    def runs_before(self, first: int, second: int) -> bool:
        return first in self.after[second]


class FakeStream:
    def __init__(self, world: World) -> None:
        self.world, self.last = world, -1

    def step(self, others: set[int]) -> int:
        before = set(others) if self.last < 0 else others | {self.last}
        self.world.after.append(before.union(*(self.world.after[one] for one in before)))
        self.last = len(self.world.after) - 1
        return self.last

    def wait_stream(self, stream: FakeStream) -> None:
        self.step({stream.last} if stream.last >= 0 else set())

    def wait_event(self, event: int) -> None:
        self.step({event})

    def record_event(self) -> int:
        return self.step(set())


class Matrix:
    """Stands for plain weights of so many elements, in one column."""

    columns = 1

    def __init__(self, world: World, number: int, size: int) -> None:
        self.world, self.key, self.elements, self.rows = world, (number,), size, size

    def fill(self, memory: torch.Tensor) -> torch.Tensor:
        begin = memory.storage_offset()
        self.world.did("make", begin, begin + self.elements)
        memory[: self.elements] = self.key[0]
        return memory[: self.elements].view(-1, 1)


def read(world: World, ahead: PlainAhead, matrices: list[Matrix], stops: set[int] = frozenset()) -> list[int]:
    """A pass; behind the matrices of `stops` another graph begins. Nodes of the products."""
    nodes = []
    with ahead.reading("chunk"):
        going = plain_ahead.current()
        assert going is not None
        for number, matrix in enumerate(matrices):
            with going.taken(matrix) as found:  # type: ignore[arg-type]
                assert found.shape == (matrix.elements, 1)
                begin = found.storage_offset()
                world.did("use", begin, begin + matrix.elements)
                nodes.append(world.work[-1][1])
            if number in stops:
                plain_ahead.join()
    assert plain_ahead.current() is None
    return nodes


def check(world: World) -> None:
    """Whatever shares memory runs in the order in which it was given, but for a making and an earlier making of another."""
    for number, (what, node, begin, end) in enumerate(world.work):
        for other, before, first, last in world.work[:number]:
            if begin < last and first < end and "make" in (what, other):
                assert world.runs_before(before, node) or world.runs_before(node, before), (other, what)


def used_what_was_made(world: World, nodes: list[int]) -> None:
    """The last making of a product's memory that runs before it is the last of all that does not run after it."""
    for node in nodes:
        begin, end = next((first, last) for _, own, first, last in world.work if own == node)
        makers = [own for what, own, first, last in world.work if what == "make" and first < end and begin < last]
        before = [own for own in makers if world.runs_before(own, node)]
        assert before and all(world.runs_before(node, own) for own in set(makers) - set(before))
        newest = [own for own in before if not any(world.runs_before(own, other) for other in before)]
        assert [(first, last) for _, own, first, last in world.work if own in newest] == [(begin, end)]


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_overwritten_before_its_product_and_nothing_used_before_it_is_made(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    world, room = World(monkeypatch), 200
    ahead = PlainAhead(room, torch.device("cpu"))
    sizes = rng.integers(1, rng.choice([20, 100, 200]) + 1, 40)
    matrices = [Matrix(world, number, int(size)) for number, size in enumerate(sizes)]
    stops = set(map(int, rng.choice(40, 6)))
    nodes = read(world, ahead, matrices, stops)
    in_turn = len(world.work)
    for _ in range(3):
        nodes += read(world, ahead, matrices, stops)
    odd = [*matrices[:17], Matrix(world, 99, 150), *matrices[20:]]
    for _ in range(2):
        nodes += read(world, ahead, odd, stops)
    nodes += read(world, ahead, odd[:9])  # ends early
    nodes += read(world, ahead, odd)
    check(world)
    used_what_was_made(world, nodes)
    makes = [node for what, node, *_ in world.work[in_turn:] if what == "make"]
    uses = [node for what, node, *_ in world.work[in_turn:] if what == "use"]
    beside = sum(not world.runs_before(a, b) and not world.runs_before(b, a) for a in makes for b in uses)
    assert beside > 0


def test_the_next_matrix_stands_beside_the_product_before_it(monkeypatch):
    """With room for two the second one's making waits for no product, the third one's for the first's alone."""
    world = World(monkeypatch)
    ahead = PlainAhead(20, torch.device("cpu"))
    matrices = [Matrix(world, number, 10) for number in range(4)]
    for _ in range(2):
        nodes = read(world, ahead, matrices)
    makes = [node for what, node, *_ in world.work if what == "make"][-4:]
    waits = [[number for number, use in enumerate(nodes) if world.runs_before(use, make)] for make in makes]
    assert waits == [[], [], [0], [0, 1]]
    check(world)


def test_a_pass_that_fails_leaves_nothing_behind(monkeypatch):
    world = World(monkeypatch)
    ahead = PlainAhead(20, torch.device("cpu"))
    matrices = [Matrix(world, number, 10) for number in range(6)]
    nodes = read(world, ahead, matrices)
    with pytest.raises(RuntimeError, match="capture"), ahead.reading("chunk"), plain_ahead.current().taken(matrices[0]):
        raise RuntimeError("no capture")
    assert plain_ahead.current() is None
    nodes += read(
        world, ahead, [Matrix(world, 9, 20), *matrices]
    )  # in turn, where the failed pass had begun to make others
    nodes += read(world, ahead, matrices)
    check(world)
    used_what_was_made(world, nodes)


def test_places_never_reach_behind_the_end():
    rng = np.random.default_rng(7)
    for room in (10, 64, 1000):
        sizes = [int(size) for size in rng.integers(1, room + 1, 100)]
        found = places(sizes, room)
        ends = [place.begin + size for place, size in zip(found, sizes, strict=True)]
        for number, place in enumerate(found):
            assert place.begin >= 0 and ends[number] <= room
            shared = [n for n in range(number) if found[n].begin < ends[number] and place.begin < ends[n]]
            assert max(shared, default=-1) <= place.behind < number


def test_products_take_their_weights_from_the_pass(encode, monkeypatch):
    """Real matrices on the CPU: side by side, gates, one in pieces; the second pass makes the same numbers in other places."""
    world = World(monkeypatch)

    kept: list[int] = []

    def kept_on(count):
        kept.append(count)
        return nullcontext()

    def dequantised(weight, out, first_band, factor):
        rows = (weight.values() * weight.scale.reshape(-1, 1) * factor).half()[
            first_band * 32 : first_band * 32 + len(out)
        ]
        out[: len(rows)] = rows
        out[len(rows) :] = 0
        world.did("make", out.storage_offset(), out.storage_offset() + out.numel())

    monkeypatch.setattr(plain, "dequantise", dequantised)
    monkeypatch.setattr(prefill, "_check_device", lambda x, weights: None)
    monkeypatch.setattr(prefill, "_gives_float32", lambda: False)
    monkeypatch.setattr(prefill, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(prefill, "products_on", kept_on)
    monkeypatch.setattr(prefill, "gates_together", lambda device: True)
    monkeypatch.setattr(prefill.staging, "widen", prefill.staging.widen_reference)
    monkeypatch.setattr(prefill.staging, "silu_product", prefill.staging.silu_product_reference)
    monkeypatch.setattr(prefill, "SCRATCH_BYTES", 2 * 128 * 64)
    rng = np.random.default_rng(5)
    kinds = (("fp8", 64), ("half", 24), ("nvfp4", 64), ("nvfp4", 64), ("fp8", 32 * 7))
    first, second, gate, up, tall = (
        encode(kind, rng.standard_normal((rows, 64)).astype(np.float32)).weight for kind, rows in kinds
    )
    x = torch.from_numpy(rng.standard_normal((100, 64)).astype(np.float16))
    ahead = PlainAhead(prefill.ahead_elements(64 * 440, 10**6, 1.0), torch.device("cpu"))

    def layer() -> list[torch.Tensor]:
        wide = torch.empty(100, 88)
        prefill.linear_blocks(x, [first, second], list(wide.split([64, 24], dim=1)))
        return [wide, prefill.swiglu_block(x, gate, up), prefill.linear_block(x, tall)]

    with using(Choice()):
        alone = layer()
        for _ in range(3):
            with ahead.reading("chunk"):
                found = [tensor for _ in range(2) for tensor in layer()]
                noted = plain_ahead.current().noted
            assert all(torch.equal(one, other) for one, other in zip(found, alone * 2, strict=True))
    assert [len(matrix.weights) for matrix in noted] == [2, 2, 1, 1] * 2
    assert kept == [132 - 16] * 3 * len(noted)
    assert prefill.ahead_elements(1000, 10**6, 1.5) == 128 * 64 and prefill.ahead_elements(1000, 100, 1.5) == 1500
    small = SimpleNamespace(room=10)
    monkeypatch.setattr(plain_ahead, "current", lambda: small)  # no room: memory of its own
    with using(Choice()):
        assert torch.equal(prefill.linear_block(x, tall), alone[2])
