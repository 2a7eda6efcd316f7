"""Which ways for prompts suit a card: the numbers of tokens from which and up to which the wide linear is faster than the other
ways, whether dequantising beside the vendor's product pays, and whether making the next linears' weights beside this one's does.
Unlike the other choices they change bits: kernels/prefill.py."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from msgspec.structs import replace

from ..kernels.tuning import AHEAD, Choice, using
from .prompt_layers import measure_layers
from .prompt_linears import PrefillRow, measure_prefill

SURE = 97  # tokens: where the wide linear is not faster, it is not taken at all
PROMPTS = (25, 49, SURE, 128, 192, 256, 384, 512, 768)
LONG_PROMPT = 2048
CHUNKS = (512, 1024, 2048)  # tokens of what prompts are read in
SPARING_TRIED = (0, 512, 1024)
_WORTH = 1.01


def for_prompts(chosen: Choice, device: torch.device, tell: Callable[[str], None]) -> Choice:
    """The choice with the ways that are measured as the fastest; `tell` gets a line a measurement."""
    rows = []
    with using(chosen):
        for tokens, routes in (((LONG_PROMPT,), ("narrow", "beside")), (PROMPTS, ("narrow", "wide"))):
            for row in measure_prefill(tokens, device, routes):
                shape = f"{row.encoding} {row.rows} x {row.columns}, T {row.tokens}"
                tell(f"{row.seconds * 1e6:8.2f} us  {shape}, {row.route}")
                rows.append(row)
    found = with_prompts(chosen, rows)
    return found if found.overlap_dequantising else ahead_for(found, device, tell)


def ahead_for(chosen: Choice, device: torch.device, tell: Callable[[str], None]) -> Choice:
    """The choice with plain weights made ahead, and as many multiprocessors left to that, as makes layers fastest (geometric
    mean over kinds and lengths); without where that gains too little."""

    def mean(tried: Choice, route: str) -> float:
        with using(tried):
            rows = list(measure_layers(CHUNKS, device, [route], parts=False))
        for row in rows:
            sparing = f", sparing up to {tried.sparing_up_to}" if route == "ahead" else ""
            tell(f"{row.seconds * 1e6:8.2f} us  layer of {row.layer}, T {row.tokens}, {row.route}{sparing}")
        return math.exp(sum(math.log(row.seconds) for row in rows) / len(rows))

    times = {most: mean(replace(chosen, sparing_up_to=most), "ahead") for most in SPARING_TRIED}
    best = min(times, key=lambda most: times[most])
    if mean(chosen, "narrow") / times[best] <= _WORTH:
        return replace(chosen, plain_ahead=0)
    return replace(chosen, plain_ahead=AHEAD, sparing_up_to=best)


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
