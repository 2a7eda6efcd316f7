"""The known answers that a rank asks of its card at start, asked of the emulated kernels: right ones must pass."""

import pytest

from duovolt.runtime.engine.cuda.selftest import LARGEST_ERROR, all_cases, check_answers

LAUNCHED = [case for case in all_cases() if case.name.startswith(("attention", "delta", "norm"))]  # no tuned choices


@pytest.mark.parametrize("case", LAUNCHED, ids=lambda case: case.name)
def test_the_kernels_give_the_known_answers(device, case):
    ((name, error),) = check_answers(device, [case])
    assert (name, error <= LARGEST_ERROR) == (case.name, True)
