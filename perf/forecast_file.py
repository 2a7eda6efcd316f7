"""Forecasts on record before anything is measured, and the comparison with what then was.

A forecast file holds date and commit, so that it can be shown that it came first. A file of measured rounds is any JSON
object with `rounds`: a list of objects with context, drafts, lanes, tp, kv and the milliseconds of a round, `ms`.
"""

import datetime
import math
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from .. import __version__
from ..checkpoint.directory import read_json
from ..checkpoint.errors import InputError, one_line
from .predict import Forecast, at_mean_size, forecast

FORMAT = "duovolt-forecast-1"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A round: what it was of, and its milliseconds (median, if measured)."""

    ms: float
    context: int
    drafts: int = 0
    lanes: int = 1
    tp: int = 1
    kv: str = "int8"
    model: str | None = None

    @property
    def key(self) -> tuple[int, int, int, int, str]:
        return self.tp, self.context, self.drafts, self.lanes, self.kv


class ForecastRound(Round, frozen=True, kw_only=True):
    """A forecast. `ms_mean`: had every linear the mean size. `families`: milliseconds by kernel family.

    `graphs`: `on` of launches that overlap where the card can, `serial` of launches in turn; None: an old file's, in turn.
    """

    ms_mean: float
    tokens: float
    link: str
    families: dict[str, float]
    graphs: str | None = None


class ForecastFile(msgspec.Struct, frozen=True):
    """What `predict --write` leaves. `commit` None: not run from a repository."""

    date: str
    commit: str | None
    version: str
    card: str
    card_source: str
    rounds: list[ForecastRound]
    format: str = FORMAT


class MeasuredFile(msgspec.Struct, frozen=True):
    """The part of a file of measurements that is compared; what else it holds is its own."""

    rounds: list[Round]
    model: str | None = None
    graphs: str | None = None


def record(forecasts: Iterable[Forecast]) -> ForecastFile:
    """All forecasts of one card as they go into a file."""
    rounds, card = [], None
    for found in forecasts:
        card, shape = found.card, found.ledger.shape
        mean = forecast(at_mean_size(found.ledger), found.card, found.setting)
        rounds.append(
            ForecastRound(
                ms=round(found.seconds * 1e3, 4),
                ms_mean=round(mean.seconds * 1e3, 4),
                context=shape.context,
                drafts=shape.drafts,
                lanes=shape.lanes,
                tp=found.ledger.tp,
                kv=shape.kv,
                model=found.ledger.label,
                tokens=round(found.tokens, 4),
                link=found.setting.link,
                families={name: round(seconds * 1e3, 4) for name, (_, _, seconds) in found.families.items()},
                graphs="on" if found.setting.overlap else "serial",
            )
        )
    assert card is not None, "a record needs a forecast"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return ForecastFile(now, _commit(), __version__, card.name, card.source, rounds)


def _commit() -> str | None:
    """The commit of the repository that this package lies in, `+` behind it if files differ from it."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        run = [
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return run[0].strip() + ("+" if run[1].strip() else "")


def read_forecast(path: Path) -> ForecastFile:
    """Raises InputError for what is no forecast file."""
    try:
        found = msgspec.convert(read_json(path), ForecastFile)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: not a file of `duovolt predict --write`: {one_line(error)}.") from None
    if found.format != FORMAT:
        raise InputError(f"{path}: format {found.format!r:.40}, this duovolt reads {FORMAT}.")
    return found


def read_measured(path: Path) -> MeasuredFile:
    """Raises InputError for a file without measured rounds."""
    try:
        found = msgspec.convert(read_json(path), MeasuredFile)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: no measured rounds: {one_line(error)}.") from None
    if bad := [one for one in found.rounds if not (math.isfinite(one.ms) and one.ms > 0)]:
        raise InputError(f"{path}: a round of {bad[0].ms} ms.")
    return found


@dataclass(frozen=True)
class Compared:
    """A forecast beside its measurement."""

    forecast: ForecastRound
    measured: float

    @property
    def error(self) -> float:
        """Forecast over measured, less one."""
        return self.forecast.ms / self.measured - 1

    @property
    def mean_error(self) -> float:
        """The same for the forecast from mean sizes."""
        return self.forecast.ms_mean / self.measured - 1


def compare(forecasts: Sequence[ForecastRound], measured: Sequence[MeasuredFile]) -> list[Compared]:
    """Every measured round that was forecast.

    Where both name models, they must agree in what stands before the first comma; where both say whether launches overlap, in
    that. Raises InputError if no round was.
    """
    found = []
    for file, one in ((source, one) for source in measured for one in source.rounds):
        for candidate in forecasts:
            same = candidate.key == one.key and _same_model(candidate.model, one.model or file.model)
            if same and (candidate.graphs is None or file.graphs in (None, candidate.graphs)):
                found.append(Compared(candidate, one.ms))
                break
    if not found:
        raise InputError(
            "no measured round was forecast: ranks, context, drafts, lanes, KV, model and --graphs must agree."
        )
    return found


def _same_model(first: str | None, second: str | None) -> bool:
    if first is None or second is None:
        return True
    return first.partition(",")[0].strip().lower() == second.partition(",")[0].strip().lower()


def median_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    """Of the errors' magnitudes."""
    sizes = [abs(error) for error in errors]
    return statistics.median(sizes), max(sizes)
