"""A published bandwidth study of llama.cpp on an RTX 5090, reproduced from its own curve and counts; and what sums add.

The study's method: bytes of weights at the curve's bandwidth for the mean size of a kernel (on a line in the logarithm of
the size), every other kernel at one cost that was fitted on the mixture of experts, state and KV at the plain read. Its
figures: Q4_0 files, one sequence, RTX 5090 with 1,792 GB/s on paper.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from .cards import Card, load_card
from .curve import READ

PLAIN_READ = 1671e9  # bytes/s, 1.5 GiB
OTHER_US = 0.88  # a kernel that is no matrix-vector product, fitted by the study
QUANTISATIONS = 295  # kernels that quantise activations: not published; the only count that gives all merged forecasts


@dataclass(frozen=True)
class Counted:
    """A model as the study counts it. `state_fitted`: its state's time is in the fitted cost of other kernels."""

    name: str
    weights: float
    kernels: float
    others: int
    state: float
    state_fitted: bool
    forecast: float
    measured: float


MOE = Counted("MoE 35B-A3B", 2.007e9, 437.8, 1142, 0.126e9, True, 317.1, 317.45)
DENSE = Counted("dense 9B", 4.900e9, 220.4, 638, 0.101e9, False, 248.6, 239.62)
# (tokens, KV bytes read a token, forecast, measured), for the mixture
DEPTHS = ((0, 5.8e6, 317.1, 317.45), (4096, 98.0e6, 311.6, 309.88), (16384, 374.9e6, 296.3, 289.52),
          (32768, 744.0e6, 278.1, 271.53))  # fmt: skip
# (kernels, forecast with activation quantisation merged too, and kept)
FEWER = ((438, 317, 317), (219, 392, 373), (109, 447, 411), (41, 489, 438))


@dataclass(frozen=True)
class Reproduced:
    """One figure in tokens a second: ours by the study's method, the study's forecast, what it measured (0: nothing)."""

    what: str
    ours: float
    published: float
    measured: float = 0.0

    @property
    def off(self) -> float:
        """Relative difference from the study's forecast."""
        return self.ours / self.published - 1


def _rate(card: Card, nbytes: float) -> float:
    """Bytes/s at a size: between two points a line in the logarithm of the size, at the ends the nearest point."""
    points = card.series[READ][0].points
    for low, high in itertools.pairwise(points):
        if nbytes <= high.nbytes:
            part = max(0.0, math.log(nbytes / low.nbytes) / math.log(high.nbytes / low.nbytes))
            return (low.gbps + part * (high.gbps - low.gbps)) * 1e9
    return points[-1].gbps * 1e9


def _seconds(card: Card, model: Counted, kernels: float, others: float, more_kv: float = 0.0) -> float:
    state = 0.0 if model.state_fitted else model.state / PLAIN_READ
    weights = model.weights / _rate(card, model.weights / kernels)
    return weights + others * OTHER_US * 1e-6 + state + more_kv / PLAIN_READ


def reproduce() -> Iterator[Reproduced]:
    """The study's forecasts, model by model, over depth, and for fewer kernels."""
    card = load_card("rtx-5090")
    for model in (MOE, DENSE):
        seconds = _seconds(card, model, model.kernels, model.others)
        yield Reproduced(model.name, 1 / seconds, model.forecast, model.measured)
    for depth, kv, published, measured in DEPTHS:
        seconds = _seconds(card, MOE, MOE.kernels, MOE.others, kv - DEPTHS[0][1])
        yield Reproduced(f"{MOE.name}, {depth:,} deep", 1 / seconds, published, measured)
    for kernels, merged, kept in FEWER:
        fewer = QUANTISATIONS * (1 - kernels / FEWER[0][0])
        for what, others, published in (("merged", MOE.others - fewer, merged), ("kept", MOE.others, kept)):
            seconds = _seconds(card, MOE, kernels, others)
            yield Reproduced(f"{MOE.name} in {kernels} kernels, quantisation {what}", 1 / seconds, published)


@dataclass(frozen=True)
class Sizes:
    """Kernels of real sizes: (count, bytes) each; `seconds` of all of them as measured."""

    what: str
    kernels: tuple[tuple[int, float], ...]
    seconds: float

    def by_sum(self, card: Card) -> float:
        series = card.series[READ][0]
        return sum(count * series.seconds(nbytes) for count, nbytes in self.kernels)

    def by_mean(self, card: Card) -> float:
        count = sum(count for count, _ in self.kernels)
        nbytes = sum(count * nbytes for count, nbytes in self.kernels)
        return count * card.series[READ][0].seconds(nbytes / count)


# Plain reads at the sizes of the 27B's launches on a rank of two, measured on an H200 apart from the curve of its card file
# (docs/benchmarks.md, "Linears, measured on an H200"): launches a token, MB, GB/s.
_READS = ((16, 36.7, 3674), (48, 42.6, 3741), (64, 15.7, 2765), (64, 50.1, 3789), (64, 25.1, 3307), (1, 636.2, 4440))
H200_READS = Sizes(
    "27B on a rank of two, plain reads on an H200",
    tuple((count, megabytes * 1e6) for count, megabytes, _ in _READS),
    sum(count * megabytes / 1e3 / gbps for count, megabytes, gbps in _READS),
)
_Q4, _Q6, _F32 = 18 / 32, 210 / 256, 4.0  # bytes an element of Q4_0, of Q6_K (the head), of what is left in FP32


def dense_kernels() -> tuple[tuple[int, float], ...]:
    """The 9B's matrix-vector kernels in Q4_0: 24 delta and 9 attention layers, gate and up in one, then the head."""
    hidden, inner, vocabulary = 4096, 12288, 248_320
    delta = [(1, 8192 * hidden * _Q4), (2, 4096 * hidden * _Q4), (2, 32 * hidden * _F32)]
    attention = [(1, 8192 * hidden * _Q4), (2, 1024 * hidden * _Q4), (1, 4096 * hidden * _Q4)]
    mlp = [(1, 2 * inner * hidden * _Q4), (1, inner * hidden * _Q4)]
    layers = [(24 * n, b) for n, b in delta] + [(9 * n, b) for n, b in attention] + [(33 * n, b) for n, b in mlp]
    return (*layers, (1, 2 * hidden * hidden * _Q4), (1, vocabulary * hidden * _Q6))
