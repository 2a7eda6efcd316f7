"""Published figures of another engine on V100s (Qwen3.8-27B, three drafts, INT8 KV, one request), derived from bytes.

Three numbers for each: the floor (all bytes at the bandwidth of one large read), the forecast with kernels that read as fast
as a plain read, and the forecast with the shares that its authors gave for their own kernels.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .cards import load_card
from .ledger import Shape
from .model_source import sheet_at
from .predict import CODE, Forecast, Setting
from .variants import Case

# Shares of a plain read that were published for its kernels: NVFP4 680/677/620 of 879 GB/s at 1, 4 and 8 tokens, FP8 719,
# a 4-bit head 843; INT8 attention at 186K positions 0.6 ms a rank and layer for 196 MB, that is 327 of 1,058 GB/s.
SHARES: Mapping[str, Mapping[int, float]] = {
    "swiglu.nvfp4": {1: 0.77, 4: 0.77, 8: 0.71},
    "linear.nvfp4": {1: 0.77, 4: 0.77, 8: 0.71},
    "linear.fp8": {1: 0.82},
    "linears.fp8": {1: 0.82},
    "head": {1: 0.96},
    "attention": {1: 0.31},
}
DRAFT_ROWS = 131_072  # of its draft head
DRAFTS = 3


@dataclass(frozen=True)
class Figure:
    """One published figure. `milliseconds` a round; from tok/s it is (1 + 3 x acceptance) / rate."""

    what: str
    card: str
    ranks: int
    link: str
    context: int
    milliseconds: float


def _round_ms(rate: float) -> float:
    return (1 + DRAFTS * CODE) / rate * 1e3


FIGURES = (
    Figure("two, NVLink, 8K, code", "v100-877", 2, "nvlink", 8192, 22.4),
    Figure("two, NVLink, 186K, code", "v100-877", 2, "nvlink", 186_000, _round_ms(105.7)),
    Figure("two, no NVLink, 8K, code", "v100-1107", 2, "pcie", 8192, _round_ms(140)),
    Figure("two, no NVLink, 186K, code", "v100-1107", 2, "pcie", 186_000, 32.4),
    Figure("one, 8K", "v100-1107", 1, "none", 8192, _round_ms(97)),
    Figure("one, 186K", "v100-1107", 1, "none", 186_000, _round_ms(56)),
)


@dataclass(frozen=True)
class Derived:
    """A figure beside `plain`, kernels as fast as reads, and `shares`, kernels as fast as theirs."""

    figure: Figure
    plain: Forecast
    shares: Forecast

    @property
    def off(self) -> float:
        """Relative difference of the forecast with their shares from the published round."""
        return self.shares.seconds * 1e3 / self.figure.milliseconds - 1


def derive() -> Iterator[Derived]:
    """Every figure, from the recipe v100 with a draft head as large as theirs."""
    for figure in FIGURES:
        sheet = sheet_at("qwen3.8-27b", figure.ranks, None).with_draft_head(DRAFT_ROWS)
        case = Case(sheet, Shape(figure.context, DRAFTS), Setting(link=figure.link))
        card = load_card(figure.card)
        yield Derived(figure, case.forecast(card), case.forecast(card.with_shares(SHARES)))
