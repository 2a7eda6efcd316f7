"""The choices of the decode linear that suit a card: each alone against the defaults, the best of each kept.

No choice changes a bit of any result: docs/kernels.md says why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from ..checkpoint.errors import EnvironmentFault
from ..kernels.tuning import STAGES, Choice, choice_on, using
from ..kernels.weights import Weight
from .kernels import CASES, Case, copies_of, launches, random_weight, time_graph

TOKENS = (1, 4)
STAGES_TRIED = (2, 3, 4, 6)
BLOCKS_TRIED = (0, 2, 3)
POOL_BYTES = 1 << 30
_CASES = {"nvfp4": ("gate up", "down"), "fp8": ("attention in", "mixer out"), "half": ("delta in",)}


@dataclass(frozen=True)
class Trial:
    """A choice and its mean microseconds (geometric, over cases and token counts)."""

    chosen: Choice
    microseconds: float


def tune(device: torch.device, tell: Callable[[str], None]) -> Trial:
    """Measures and returns the best choice found; `tell` gets a line a trial."""
    cases = {case.name: case for case in CASES if _used(case.name)}
    sets = {name: _weights(case, device) for name, case in cases.items()}

    def mean(chosen: Choice, names: tuple[str, ...]) -> float:
        times = []
        try:
            with using(chosen):
                for name in names:
                    for tokens in TOKENS:
                        times.append(time_graph(launches(cases[name], sets[name], tokens, device)) * 1e6)
        except EnvironmentFault as fault:  # more shared memory than the card has
            tell(f"{chosen.stages}: {fault}")
            return math.inf
        found = math.exp(sum(map(math.log, times)) / len(times))
        tell(f"{found:8.2f} us  {chosen.stages}  blocks a SM {chosen.blocks_a_sm or 'all'}")
        return found

    stages = dict(STAGES)
    for encoding, names in _CASES.items():
        stages[encoding] = min(STAGES_TRIED, key=lambda n, e=encoding, ns=names: mean(Choice(stages | {e: n}), ns))  # type: ignore[misc]
    everything = tuple(sets)
    blocks = min(BLOCKS_TRIED, key=lambda count: mean(Choice(stages, count), everything))
    # What this does not try stays as it was chosen.
    best = msgspec.structs.replace(choice_on(device), stages=stages, blocks_a_sm=blocks)
    return Trial(best, mean(best, everything))


def _used(name: str) -> bool:
    return any(name in names for names in _CASES.values())


def _weights(case: Case, device: torch.device) -> list[list[Weight]]:
    first = [random_weight(*matrix, device) for matrix in case.matrices]
    count = copies_of(sum(weight.nbytes for weight in first), POOL_BYTES)
    return [first] + [[random_weight(*matrix, device) for matrix in case.matrices] for _ in range(count - 1)]
