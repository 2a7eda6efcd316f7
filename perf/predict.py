"""Milliseconds a round and tokens a second, before they are measured: every launch of the ledger at its bytes' time.

    round = sum over kernels of (curve(bytes) / share + gap) + sum over collectives of latency(bytes) + replay + host

curve is the card's plain read (or its own linears') with the launch in it, share what a kernel family is known to reach of
it. Where a model's own launches were measured alone, theirs are taken, and gap is what a few layers in a row took beyond
their sum. Where launches overlap, each begins early and saves what the same launch behind the same two others was measured
to save (perf/savings.py). A round yields lanes * (1 + drafts * acceptance) tokens.
"""

import math
from dataclasses import dataclass, replace

from ..checkpoint.errors import InputError
from .cards import MEASURED, Card
from .launch_file import is_within
from .ledger import FAMILIES, Launch, Ledger

CODE, CHINESE = 0.77, 0.46  # acceptance of three drafts, as published for the 27B
HOST, GAPS, REPLAY, OVERLAP = "host", "gaps", "replay", "overlap"


@dataclass(frozen=True)
class Setting:
    """What is not in the ledger: `acceptance` of drafts, `link` between ranks, host time a round that nothing hides.

    `overlap`: launches begin before the one before has ended, where the card can (`serve --graphs on`).
    """

    acceptance: float = CODE
    link: str = "none"
    host_us: float = 0.0
    overlap: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"an acceptance of {self.acceptance}: expected 0 to 1.")
        if not (math.isfinite(self.host_us) and 0 <= self.host_us <= 1e7):
            raise InputError(f"{self.host_us} us of host time: expected 0 to 10,000,000.")


@dataclass(frozen=True)
class Forecast:
    """`families`: name -> (launches, bytes, seconds) in a round, collectives and host among them. What overlap
    saves is below 0 there."""

    card: Card
    ledger: Ledger
    setting: Setting
    families: dict[str, tuple[int, float, float]]

    @property
    def seconds(self) -> float:
        """Of a round."""
        return sum(seconds for _, _, seconds in self.families.values())

    @property
    def tokens(self) -> float:
        """Mean tokens of a round, all lanes together."""
        shape = self.ledger.shape
        return shape.lanes * (1 + shape.drafts * self.setting.acceptance)

    @property
    def rate(self) -> float:
        """Tokens a second, all lanes together."""
        return self.tokens / self.seconds

    @property
    def floor(self) -> float:
        """Seconds if every byte came at the bandwidth of the largest read, and nothing else cost anything."""
        last = self.card.series["read"][0].points[-1]
        return (self.ledger.read + self.ledger.written) / last.gbps / 1e9


def forecast(ledger: Ledger, card: Card, setting: Setting) -> Forecast:
    """Raises InputError for a link that the card has no figures of."""
    families: dict[str, tuple[int, float, float]] = {}
    for family in FAMILIES:
        mine = [launch for launch in ledger.launches if launch.family == family]
        if mine:
            moved = sum(launch.moved + launch.message for launch in mine)
            families[family] = len(mine), moved, sum(_seconds(launch, card, setting) for launch in mine)
    if setting.overlap and card.savings:
        count, saved = card.savings.of_round([one for one in card.calls(ledger) if _is_called(one, setting)])
        families[OVERLAP] = count, 0.0, -saved
    if gap := card.gap(ledger, setting.overlap):
        families[GAPS] = 0, 0.0, gap * sum(_is_apart(launch, card, setting) for launch in ledger.launches)
    if card.replay:
        families[REPLAY] = 0, 0.0, card.replay
    if setting.host_us:
        families[HOST] = 0, 0.0, setting.host_us * 1e-6
    return Forecast(card, ledger, setting, families)


def _is_apart(launch: Launch, card: Card, setting: Setting) -> bool:
    """Whether a gap comes with it. One of a card file is known between kernels, a measured one between calls."""
    if launch.family == "collective":
        return setting.link == MEASURED
    return not is_within(launch, card.exact)


def _is_called(launch: Launch, setting: Setting) -> bool:
    """Where no link is there, nothing is exchanged."""
    return launch.family != "collective" or setting.link != "none"


def _seconds(launch: Launch, card: Card, setting: Setting) -> float:
    return card.message(launch, setting.link) if launch.family == "collective" else card.seconds(launch)


def at_mean_size(ledger: Ledger) -> Ledger:
    """The same linears and heads, every one of the mean size: what a forecast from two numbers sees."""
    mine = [launch for launch in ledger.launches if launch.family in ("linear", "head")]
    mean = sum(launch.weights for launch in mine) / max(1, len(mine))
    return replace(
        ledger,
        launches=tuple(
            replace(launch, weights=mean, form="") if launch.family in ("linear", "head") else launch
            for launch in ledger.launches
        ),
    )
