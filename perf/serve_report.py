"""Tables and plots of `bench serve` runs: one row a cell, mean and range over seeds and lanes, and one run beside another."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.errors import EnvironmentFault, InputError
from .choices import named_choices
from .materials import PUBLISHED
from .serve_record import Answer, Head, Record

Cell = tuple[int, str, int]


@dataclass(frozen=True)
class Spread:
    """Mean and range of some figures."""

    mean: float
    least: float
    most: float
    count: int

    @staticmethod
    def of(values: Iterable[float | None]) -> "Spread | None":
        """None if there is no value."""
        found = [value for value in values if value is not None]
        return Spread(statistics.fmean(found), min(found), max(found), len(found)) if found else None


@dataclass(frozen=True)
class Row:
    """A cell. Seconds to the first token cold and cached; tokens a second of a lane; drafts; milliseconds a round.

    `prompt_tokens`: mean; `cached_tokens`: mean over cached answers, None if the server does not tell.
    """

    context: int
    material: str
    lanes: int
    prompt_tokens: float
    cold: Spread | None
    cached: Spread | None
    rate: Spread | None
    acceptance: Spread | None
    round_ms: Spread | None
    cached_tokens: float | None

    @property
    def cell(self) -> Cell:
        return self.context, self.material, self.lanes


def rows_of(record: Record) -> list[Row]:
    """One row a cell, in the order of the settings."""
    cells: dict[Cell, list[Answer]] = {}
    for answer in record.answers:
        cells.setdefault((answer.context, answer.material, answer.lanes), []).append(answer)
    return [_row(cell, answers) for cell, answers in sorted(cells.items(), key=lambda item: item[0])]


def _row(cell: Cell, answers: Sequence[Answer]) -> Row:
    cached = [answer for answer in answers if answer.mode == "cached"]
    told = Spread.of(answer.cached_tokens for answer in cached)
    return Row(
        *cell,
        statistics.fmean(answer.prompt_tokens for answer in answers),
        Spread.of(answer.first_ms / 1e3 for answer in answers if answer.mode == "cold"),
        Spread.of(answer.first_ms / 1e3 for answer in cached),
        Spread.of(answer.rate for answer in answers),
        Spread.of(answer.acceptance for answer in answers),
        Spread.of(answer.round_ms for answer in answers),
        None if told is None else told.mean,
    )


def _range(spread: Spread | None, form: str, unit: str = "") -> str:
    if spread is None:
        return "-"
    shown = f"{spread.mean:{form}}{unit}"
    if spread.count > 1:
        shown += f" ({spread.least:{form}} to {spread.most:{form}})"
    return shown


def named(head: Head) -> str:
    """What the figures are of, in a line."""
    server = head.server
    identity = [f"conversion {server['conversion_id']}"] if server.get("conversion_id") else []
    identity += [f"recipe {server['recipe']}"] if server.get("recipe") else []
    choices = [f"{key} {server[key]}" for key in ("ranks", "backend", "drafts", "lanes") if key in server]
    choices += named_choices(server)
    machine = [f"{key}: {value}" for key, value in head.machine.items()] or ["card, clock and driver not told"]
    settings = head.settings
    asked = f"{settings.seeds} seeds x {settings.tokens:,} tokens, temperature {settings.temperature:g}"
    return f"{head.model}; " + "; ".join([", ".join(part) for part in (identity, choices, machine) if part] + [asked])


def _lengths(head: Head) -> list[str]:
    """How long the materials are here, whose blocks were sized with another vocabulary."""
    told = [
        f"{PUBLISHED[name][0]:,} blocks of {name} are {count:,} tokens here (published: {PUBLISHED[name][1]:,})"
        for name, count in head.materials.items()
        if name in PUBLISHED
    ]
    return ["; ".join(told)] if told else []


def table(record: Record) -> str:
    """Markdown: what it is of, then a row a cell."""
    lines = [
        f"{named(record.head)}; {record.head.date[:10]}, duovolt {record.head.version}",
        *_lengths(record.head),
        "",
        "| context | material | lanes | prompt | first token, cold, s | cached, s | tok/s a lane | acceptance | ms a round |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows_of(record):
        lines.append(
            f"| {row.context:,} | {row.material} | {row.lanes} | {row.prompt_tokens:,.0f} | {_range(row.cold, '.2f')} | "
            f"{_range(row.cached, '.2f')} | {_range(row.rate, '.1f')} | {_range(row.acceptance, '.1%')} | "
            f"{_range(row.round_ms, '.2f')} |"
        )
    return "\n".join(lines)


def comparison(record: Record, other: Record) -> str:
    """Markdown: this run's means beside another's, cell by cell. Raises InputError if they have no cell in common."""
    theirs = {row.cell: row for row in rows_of(other)}
    both = [(row, theirs[row.cell]) for row in rows_of(record) if row.cell in theirs]
    if not both:
        raise InputError("the two runs have no context, material and number of lanes in common.")
    lines = [
        f"this: {named(record.head)}",
        f"other: {named(other.head)}",
        "",
        "| context | material | lanes | tok/s a lane | first token, cold, s | cached, s | acceptance | ms a round |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row, before in both:
        pairs = (
            (row.rate, before.rate, ".1f"), (row.cold, before.cold, ".2f"), (row.cached, before.cached, ".2f"),
            (row.acceptance, before.acceptance, ".1%"), (row.round_ms, before.round_ms, ".2f"),
        )  # fmt: skip
        cells = " | ".join(_beside(*pair) for pair in pairs)
        lines.append(f"| {row.context:,} | {row.material} | {row.lanes} | {cells} |")
    return "\n".join(lines)


def _beside(here: Spread | None, there: Spread | None, form: str) -> str:
    if here is None or there is None:
        return "-"
    change = f" ({here.mean / there.mean - 1:+.1%})" if there.mean else ""
    return f"{here.mean:{form}}, was {there.mean:{form}}{change}"


def facts(record: Record) -> dict[str, Any]:
    """The table as JSON values."""
    import dataclasses

    import msgspec

    return {"head": msgspec.to_builtins(record.head), "rows": [dataclasses.asdict(row) for row in rows_of(record)]}


def _name_lines(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Write each line's name at the right of the axes, at its last value or as near as the names below leave room."""
    to_axes = axes.transData + axes.transAxes.inverted()
    least = 0.0
    for value, name, colour in sorted(ends):
        height = max(float(to_axes.transform((axes.get_xlim()[1], value))[1]), least)
        axes.text(1.01, height, name, color=colour, transform=axes.transAxes, va="center")
        least = height + 0.05


def plot(record: Record, folder: Path) -> list[Path]:
    """Two SVGs, tokens a second and seconds to the first token against the prompt; every line named at its end.

    Raises EnvironmentFault without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise EnvironmentFault('plots need matplotlib: pip install "duovolt[plots]".') from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "duovolt"
    from matplotlib import pyplot

    rows, written = rows_of(record), []
    for name, label, log in (("rate", "tokens a second, a lane", False), ("cold", "seconds to the first token", True)):
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        ends: list[tuple[float, str, str]] = []
        for material, lanes in dict.fromkeys((row.material, row.lanes) for row in rows):
            points = [
                (row.prompt_tokens, spread)
                for row in rows
                if (row.material, row.lanes) == (material, lanes) and (spread := getattr(row, name)) is not None
            ]
            if not points:
                continue
            x, y = [at for at, _ in points], [spread.mean for _, spread in points]
            below = [spread.mean - spread.least for _, spread in points]
            above = [spread.most - spread.mean for _, spread in points]
            line = axes.errorbar(x, y, yerr=(below, above), marker="o", capsize=3)
            ends.append((y[-1], material if lanes == 1 else f"{material}, {lanes} lanes", line[0].get_color()))
        axes.set_xscale("log", base=2)
        if log:
            axes.set_yscale("log")
            for put in (
                axes.yaxis.set_major_formatter,
                axes.yaxis.set_minor_formatter,
            ):  # within a decade only minor ones stand
                put("{x:,g}")
        else:
            axes.set_ylim(bottom=0)
        ticks = sorted({round(row.prompt_tokens) for row in rows})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
        _name_lines(axes, ends)
        axes.set_xlabel("tokens of the prompt")
        axes.set_ylabel(label)
        axes.set_title(named(record.head), fontsize=7, wrap=True)
        axes.grid(alpha=0.3)
        path = folder / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
        written.append(path)
    return written
