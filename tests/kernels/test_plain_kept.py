"""Plain weights that stay: each is made once, none is overwritten, and those that do are spread over all that are asked for."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from duovolt.kernels import plain_kept, prefill
from duovolt.kernels.plain_kept import PlainKept
from duovolt.kernels.tuning import Choice, using

from .test_prefill import on_the_host, relative  # noqa: F401  (a fixture)

HERE = torch.device("cpu")


class Matrix:
    """Stands for plain weights of so many elements, in one column."""

    def __init__(self, number: int, elements: int) -> None:
        self.key, self.elements, self.weights, self.made = (number,), elements, [self], 0
        self.words = torch.empty(0)

    def fill(self, memory: torch.Tensor) -> torch.Tensor:
        self.made += 1
        memory[: self.elements] = self.key[0]
        return memory[: self.elements].view(-1, 1)


def asked(kept: PlainKept, matrices: list[Any]) -> list[torch.Tensor | None]:
    with kept.serving():
        return [plain_kept.kept(matrix) for matrix in matrices]


@given(some.lists(some.integers(1, 40), min_size=1, max_size=60), some.floats(0, 1.2))
def test_what_stays_is_spread_over_the_order_and_stands_where_it_stood(sizes: list[int], share: float) -> None:
    matrices, every = [Matrix(number, size) for number, size in enumerate(sizes)], sum(sizes)
    kept = PlainKept(int(share * every), every, HERE)
    assert kept.memory.numel() == min(int(share * every), every)
    for _ in range(3):
        found = asked(kept, matrices)
        assert all(plain is None or (plain == number).all() for number, plain in enumerate(found))
    assert [matrix.made for matrix in matrices] == [plain is not None for plain in found]
    assert kept.used == sum(matrix.elements * matrix.made for matrix in matrices) <= kept.memory.numel()
    if share >= 1:
        assert all(plain is not None for plain in found)
    seen = used = 0
    for matrix in matrices:  # nowhere more than one matrix from the share of what came before
        seen, used = seen + matrix.elements, used + matrix.elements * matrix.made
        assert abs(used - kept.memory.numel() / every * seen) <= max(sizes)


@given(
    some.lists(some.integers(1, 12), min_size=1, max_size=24),
    some.integers(0, 120),
    some.integers(0, 60),
    some.data(),
)
def test_the_last_ones_stay_for_a_while(sizes: list[int], elements: int, lately: int, data: some.DataObject) -> None:
    """Whatever is asked for in whatever order is there, or made now, and has its own values; those that stay are not touched."""
    matrices, every = [Matrix(number, size) for number, size in enumerate(sizes)], sum(sizes)
    kept = PlainKept(elements, every, HERE, lately=lately)
    order = data.draw(some.lists(some.sampled_from(matrices), max_size=60))
    for matrix in order:
        (plain,) = asked(kept, [matrix])
        assert plain is None or (plain.shape == (matrix.elements, 1) and (plain == matrix.key[0]).all())
        assert all(stays is None or (stays == key[0]).all() for key, stays in kept._known.items())
        assert all((late == key[0]).all() for key, (_, _, late) in kept._lately.items())


def test_two_halves_have_each_matrix_made_once() -> None:
    """Two passes in turn, stop by stop, where there is room for no more than a layer, and one matrix in six stays."""
    layers = [[Matrix(5 * layer + place, size) for place, size in enumerate((7, 3, 9, 9, 9))] for layer in range(8)]
    one = sum(matrix.elements for matrix in layers[0])
    kept = PlainKept(one + 8 * one // 6, 8 * one, HERE, lately=one)
    for _ in range(2):
        for layer in layers:
            for stop in (layer[:2], layer[2:]):
                for _ in ("first half", "second half"):
                    assert all(plain is not None for plain in asked(kept, stop))
    stay = {key[0] for key, plain in kept._known.items() if plain is not None}
    assert 4 <= len(stay) <= 9
    assert [matrix.made for layer in layers for matrix in layer] == [1 if n in stay else 2 for n in range(40)]


def test_outside_nothing_is_kept_and_what_is_captured_is_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, first, second = PlainKept(10, 10, HERE), Matrix(1, 4), Matrix(2, 4)
    assert plain_kept.kept(first) is None and not first.made  # type: ignore[arg-type]
    second.words = type("OnACard", (), {"is_cuda": True})()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    before = asked(kept, [first, second])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    after = asked(kept, [first, second])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = asked(kept, [first, second])
    assert before[0] is not None and before[1] is None
    assert after[1] is not None and captured[0] is before[0] and captured[1] is after[1]
    assert (first.made, second.made) == (1, 1)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_products_of_weights_that_stay_have_the_bits_of_the_others(encode, on_the_host: list[list[int]], share) -> None:  # noqa: F811
    rng = np.random.default_rng(5)
    samples = [
        encode(kind, rng.standard_normal((rows, 64)).astype(np.float32))
        for kind, rows in (("fp8", 96), ("nvfp4", 64), ("half", 90), ("fp8", 32), ("nvfp4", 64))
    ]
    x = torch.from_numpy(rng.standard_normal((100, 64)).astype(np.float16))
    with using(Choice()):
        expected = [prefill.linear_block(x, one.weight) for one in samples]
        every = sum(64 * (one.weight.shape[0] + -one.weight.shape[0] % 32) for one in samples)
        kept = PlainKept(int(share * every), every, HERE)
        for _ in range(2):
            with kept.serving():
                found = [prefill.linear_block(x, one.weight) for one in samples]
            for sample, one, other in zip(samples, found, expected, strict=True):
                assert torch.equal(one, other) and relative(one, x.double().numpy() @ sample.exact.T) <= 1e-3
    assert sum(plain is not None for plain in kept._known.values()) == (5 if share == 1 else 2)
