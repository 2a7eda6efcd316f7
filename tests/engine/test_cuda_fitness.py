"""Whether a model, a card and its code fit the CUDA engine, told before weights are read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from duovolt.checkpoint.errors import CheckFailed, InputError
from duovolt.kernels import slices
from duovolt.model.config import ModelConfig
from duovolt.runtime.engine.cuda.fitness import check_fitness, check_limits, needs_of
from duovolt.runtime.engine.cuda.selftest import COLUMNS, MANY_COLUMNS, Case, all_cases, check_answers, relative_error

TINY = ModelConfig.read(Path(__file__).parents[2] / "tiny" / "checkpoint")


def with_text(**changes: int) -> ModelConfig:
    return replace(TINY, text=replace(TINY.text, **changes))


@pytest.mark.parametrize("tp", [1, 2])
def test_the_bundled_model_has_its_kernels(tp: int) -> None:
    check_fitness(TINY, tp, "tiny")
    assert all(need.met for need in needs_of(TINY, tp))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head_dim": 128}, "attention: head dimension 128, built for 256"),
        ({"num_attention_heads": 96, "num_key_value_heads": 2}, "query heads a KV head 48, built for at most 40"),
        ({"linear_value_head_dim": 64}, "value head dimension 64, built for 128"),
        ({"linear_conv_kernel_dim": 3}, "convolution width 3, built for 4"),
        ({"hidden_size": 136}, "columns of the hidden size 136, built for multiples of 16"),
        ({"hidden_size": 16384}, "hidden size 16384, built for at most 8192"),
        ({"partial_rotary_factor": 0.5}, "turned pairs 64, built for 32"),
    ],
)
def test_a_missing_kernel_is_listed_at_start(changes: dict[str, int], said: str) -> None:
    """L03: what is needed and what there is, not a failed launch at the first token."""
    with pytest.raises(InputError, match=said):
        check_fitness(with_text(**changes), 1, "model")


def test_lanes_and_drafts_have_bounds() -> None:
    check_limits(4, 5)
    with pytest.raises(InputError, match="5 lanes"):
        check_limits(5, 0)
    with pytest.raises(InputError, match="8 drafts"):
        check_limits(1, 8)


def test_the_self_test_passes_where_answers_are_right() -> None:
    """L04, on the CPU: the references against themselves, so that every case is a case."""
    cases = [Case(case.name, case.on_cpu, case.on_cpu) for case in all_cases()]
    errors = check_answers(torch.device("cpu"), cases)
    assert len(errors) == 24 and all(error == 0 for _, error in errors)
    assert all(bool(case.on_cpu(torch.device("cpu")).abs().sum() > 0) for case in cases)


def test_what_serves_is_what_is_tried() -> None:
    """L04: of each format what one token's product takes and what a prompt's takes; and another token is another answer."""
    names = [case.name for case in all_cases()]
    for encoding in ("nvfp4", "fp8", "fp8_blocks", "half"):
        assert {f"linear {encoding}", f"linear of a prompt {encoding}"} <= set(names)
    (decision,) = (case for case in all_cases() if case.name == "decision")
    found = decision.on_cpu(torch.device("cpu"))
    tokens = found.argmax(2) - 1
    assert (tokens[0, :2] >= 0).all() and tokens[0, 2] == -1 and tokens[1, 0] >= 0 and tokens[1, 1] == -1
    for place in ((0, 0), (1, 0)):
        other = found.clone()
        other[place] = found[place].roll(1)
        assert relative_error(other, found) > 0.1
    assert slices.goes("nvfp4", MANY_COLUMNS, "sm_90", 227 << 10) and not slices.goes(
        "nvfp4", COLUMNS, "sm_90", 227 << 10
    )


@pytest.mark.parametrize("damage", [1.01, float("nan"), 0.0])
def test_a_wrong_answer_is_not_ready(damage: float) -> None:
    """L04: one family a little off, or not finite, or silent."""
    cases = [Case(case.name, case.on_cpu, case.on_cpu) for case in all_cases()]
    good = cases[4]
    cases[4] = Case(good.name, lambda device: good.on_cpu(device) * damage, good.on_cpu)
    with pytest.raises(CheckFailed, match="wrong answers of attention int8 "):
        check_answers(torch.device("cpu"), cases)


@pytest.mark.gpu
def test_this_card_gives_right_answers() -> None:
    """L04."""
    errors = dict(check_answers(torch.device("cuda", 0)))
    assert max(errors.values()) < 4e-3 and errors["linear fp8"] < 1e-5
