"""Exchanges beside computation, from kernels' times; and the messages that a floor asks the cards for."""

import pytest

from duovolt.model.config import ModelConfig
from duovolt.model.inventory import inventory
from duovolt.perf.exchanges import messages_of
from duovolt.perf.ledger import Shape, ledger_of
from duovolt.perf.overlap import overlap_of
from duovolt.perf.shapes import configuration
from duovolt.perf.sheet import sheet_of


def test_what_stands_beside_computation_is_counted_once() -> None:
    """10 ms whole: exchanges from 2 to 5 and from 6 to 8, computation from 0 to 4 (two kernels) and from 7 to 10."""
    spans = [(0, 3000, "gemm"), (2500, 4000, "norm"), (2000, 5000, "nccl"), (6000, 8000, "nccl"), (7000, 10000, "gemm")]
    found = overlap_of(spans, {"nccl"})
    assert found is not None
    assert (found.whole, found.exchange) == (10, 5)
    assert found.hidden == pytest.approx(3) and found.idle == pytest.approx(1)
    assert overlap_of([], set()) is None


def test_the_messages_of_a_round_of_the_27b() -> None:
    """A sum of one row a draft and of four in verification, and as many rows of half the logits."""
    config = ModelConfig.from_dict(configuration("qwen3.8-27b"))
    sheet = sheet_of("27b", config, dict.fromkeys(inventory(config), "bf16"), 2)
    found = messages_of([ledger_of(sheet, Shape(1, 3))])
    logits = 4 * 124160
    assert found == [("gather", 1, logits), ("gather", 4, 4 * logits), ("reduce", 1, 10240), ("reduce", 4, 40960)]
