"""The choices of the linears that suit a card: each alone against the defaults, the best of each kept.

Those of the decode linear change no bit of any result: docs/kernels/linear.md says why. For prompts, the numbers of tokens from
which and up to which the wide linear is faster than the other ways, and whether dequantising beside the vendor's product pays.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from ..checkpoint.errors import EnvironmentFault
from ..kernels.tuning import BAND, HALF_STAGES, Choice, choice_on, using
from ..kernels.weights import Weight
from .kernels import CASES, Case, PrefillRow, copies_of, launches, measure_prefill, random_weight, time_graph

TOKENS = (1, 4)
STAGES_TRIED = (2, 3, 4, 6)
HALF_STAGES_TRIED = (2, 3, 4)
MIXED_STAGES_TRIED = (2, 3)
ROWS_TRIED = (32, 16, 0)
BLOCKS_TRIED = (0, 2, 3)
_RINGS = (8, 0)  # compute capability from which there are rings, and items of half a band
POOL_BYTES = 1 << 30
SURE = 97  # tokens: where the wide linear is not faster, it is not taken at all
PROMPTS = (25, 49, SURE, 128, 192, 256, 384, 512, 768)
LONG_PROMPT = 2048
_WORTH = 1.01
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
            tell(f"{told(chosen)}: {fault}")
            return math.inf
        found = math.exp(sum(map(math.log, times)) / len(times))
        tell(f"{found:8.2f} us  {told(chosen)}")
        return found

    kept = choice_on(device)  # what is not tried here stays as it was chosen
    best, everything = Choice(delta=kept.delta, early=kept.early), tuple(sets)

    def settle(names: tuple[str, ...], choices: list[Choice]) -> Choice:
        return min(choices, key=lambda one: mean(one, names))

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
    best = with_prompts(best, _prompts(best, device, tell))
    return Trial(best, mean(best, everything))


def told(chosen: Choice) -> str:
    """A choice in a line."""
    rows = f"rows {chosen.rows or 'by launch'}"
    if chosen.rows != BAND:
        rows += f" {chosen.half_stages}"
    return f"{chosen.stages} mixed {chosen.mixed_stages}  {rows}  blocks a SM {chosen.blocks_a_sm or 'all'}"


def _prompts(chosen: Choice, device: torch.device, tell: Callable[[str], None]) -> Iterator[PrefillRow]:
    with using(chosen):
        for tokens, routes in (((LONG_PROMPT,), ("narrow", "beside")), (PROMPTS, ("narrow", "wide"))):
            for row in measure_prefill(tokens, device, routes):
                shape = f"{row.encoding} {row.rows} x {row.columns}, T {row.tokens}"
                tell(f"{row.seconds * 1e6:8.2f} us  {shape}, {row.route}")
                yield row


def with_prompts(chosen: Choice, rows: Iterable[PrefillRow]) -> Choice:
    """The choice with the ways for prompts that are faster in `rows` (geometric mean over their matrices)."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    for row in rows:
        times[row.tokens, row.route].append(math.log(row.seconds))

    def gain(tokens: int, route: str) -> float:
        narrow, other = times[tokens, "narrow"], times[tokens, route]
        return math.exp(sum(narrow) / len(narrow) - sum(other) / len(other))

    beside = gain(LONG_PROMPT, "beside") > _WORTH
    first = last = PROMPTS.index(SURE)
    if gain(SURE, "wide") <= 1:
        return replace(chosen, wide_up_to=0, overlap_dequantising=beside)
    while first and gain(PROMPTS[first - 1], "wide") > 1:
        first -= 1
    while last + 1 < len(PROMPTS) and gain(PROMPTS[last + 1], "wide") > 1:
        last += 1
    return replace(chosen, wide_from=PROMPTS[first], wide_up_to=PROMPTS[last], overlap_dequantising=beside)


def _used(name: str) -> bool:
    return any(name in names for names in _CASES.values())


def _weights(case: Case, device: torch.device) -> list[list[Weight]]:
    first = [random_weight(*matrix, device) for matrix in case.matrices]
    count = copies_of(sum(weight.nbytes for weight in first), POOL_BYTES)
    return [first] + [[random_weight(*matrix, device) for matrix in case.matrices] for _ in range(count - 1)]
