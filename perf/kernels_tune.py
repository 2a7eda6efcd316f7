"""The choices of the decode linear that suit a card: each alone against the defaults, the best kept.

No choice changes a bit of any result: docs/kernels/linear.md says why.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from ..checkpoint.errors import EnvironmentFault
from ..kernels.tuning import BAND, HALF_STAGES, Choice, choice_on, using
from ..kernels.weights import Weight
from .kernels import CASES, Case, copies_of, launches, random_weight, time_graph

TOKENS = (1, 4)
STAGES_TRIED = (2, 3, 4, 6)
HALF_STAGES_TRIED = (2, 3, 4)
MIXED_STAGES_TRIED = (2, 3)
ROWS_TRIED = (32, 16, 0)
BLOCKS_TRIED = (0, 2, 3)
_RINGS = (8, 0)  # compute capability from which there are rings, and items of half a band
POOL_BYTES = 1 << 30
_WORTH = 1.01
_CASES = {"nvfp4": ("gate up", "down"), "fp8": ("attention in", "mixer out"), "half": ("delta in",)}


@dataclass(frozen=True)
class Trial:
    """A choice and its mean microseconds (geometric, over cases and token counts)."""

    chosen: Choice
    microseconds: float


def tune(device: torch.device, tell: Callable[[str], None]) -> Trial:
    """Measures and returns the best choice found; `tell` gets a line a trial.

    Launches overlap where the card can, as in the engine's rounds: what is best in turn need not be best there.
    """
    cases = {case.name: case for case in CASES if _used(case.name)}
    sets = {name: _weights(case, device) for name, case in cases.items()}

    def mean(chosen: Choice, names: tuple[str, ...]) -> float:
        times = []
        try:
            with using(chosen):
                for name in names:
                    for tokens in TOKENS:
                        calls = launches(cases[name], sets[name], tokens, device)
                        times.append(time_graph(calls, overlap=True) * 1e6)  # as the engine's rounds have them
        except EnvironmentFault as fault:  # more shared memory than the card has
            tell(f"{told(chosen)}: {fault}")
            return math.inf
        found = math.exp(sum(map(math.log, times)) / len(times))
        tell(f"{found:8.2f} us  {told(chosen)}")
        return found

    kept = choice_on(device)  # exchanges are not tried here, and stay as they were chosen
    best, everything = Choice(early=kept.early, asked=kept.asked), tuple(sets)

    def settle(names: tuple[str, ...], choices: list[Choice]) -> Choice:
        times = [(mean(one, names), one) for one in choices]
        fastest, found = min(times, key=lambda pair: pair[0])
        kept = [time for time, one in times if one == best]  # what differs less than two runs do stays as it was
        return best if kept and kept[0] <= fastest * _WORTH else found

    if torch.cuda.get_device_capability(device) >= _RINGS:
        for encoding, names in _CASES.items():
            best = settle(names, [replace(best, stages=best.stages | {encoding: n}) for n in STAGES_TRIED])
        best = settle(_CASES["half"], [replace(best, mixed_stages=n) for n in MIXED_STAGES_TRIED])
        halved = [name for encoding in HALF_STAGES for name in _CASES[encoding]]
        best = settle(tuple(halved), [replace(best, rows=rows) for rows in ROWS_TRIED])
        for encoding in HALF_STAGES if best.rows != BAND else ():
            deeper = [replace(best, half_stages=best.half_stages | {encoding: n}) for n in HALF_STAGES_TRIED]
            best = settle(_CASES[encoding], deeper)
    best = settle(everything, [replace(best, blocks_a_sm=count) for count in BLOCKS_TRIED])
    return Trial(best, mean(best, everything))


def told(chosen: Choice) -> str:
    """A choice in a line."""
    rows = f"rows {chosen.rows or 'by launch'}"
    if chosen.rows != BAND:
        rows += f" {chosen.half_stages}"
    return f"{chosen.stages} mixed {chosen.mixed_stages}  {rows}  blocks a SM {chosen.blocks_a_sm or 'all'}"


def _used(name: str) -> bool:
    return any(name in names for names in _CASES.values())


def _weights(case: Case, device: torch.device) -> list[list[Weight]]:
    first = [random_weight(*matrix, device) for matrix in case.matrices]
    count = copies_of(sum(weight.nbytes for weight in first), POOL_BYTES)
    return [first] + [[random_weight(*matrix, device) for matrix in case.matrices] for _ in range(count - 1)]
