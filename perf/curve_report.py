"""A curve in words and as a plot: the table, and what its variations rule in or out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint.errors import EnvironmentFault
from .curve import READ, Curve, Point, Series
from .curve_measure import COLUMNS

_NOTHING = 0.05  # differences within this share, or within the spread of the points, decide nothing


def table(curve: Curve) -> list[str]:
    """Bytes, GB/s as launched, net of the node, spread, for each series of all sizes; then what was refused."""
    lines = [facts(curve)]
    for series in curve.series:
        lines.append("")
        lines.append(title(series))
        if series.points:
            lines.append("        MB     GB/s  without node  spread  us a launch")
        for point in series.points:
            lines.append(
                f"{point.nbytes / 1e6:10.2f}  {point.gbps:7.1f}  {point.net_gbps:12.1f}  {100 * point.spread:5.1f}%  "
                f"{point.seconds * 1e6:11.2f}"
            )
        lines += [f"{one.nbytes / 1e6:10.2f}  no number: {one.why}" for one in series.refused]
    found = verdicts(curve)
    return [*lines, "", *found] if found else lines


def facts(curve: Curve) -> str:
    """What was measured, on what."""
    machine = curve.machine
    return (
        f"{machine.card}, {machine.multiprocessors} multiprocessors, memory {machine.memory_mhz} MHz "
        f"({machine.peak_gbps:.0f} GB/s on paper), L2 {machine.l2_bytes / 1e6:.0f} MB, driver {machine.driver}, "
        f"torch {machine.torch}, duovolt {machine.duovolt}, {machine.date}; a graph's node costs {curve.node_us:.2f} us; "
        f"pool {curve.pool_bytes / 1e9:.2f} GB, {curve.repeats} repeats"
    )


def title(series: Series) -> str:
    """A series' name."""
    if series.kernel == READ:
        return f"plain read ({series.arch})"
    return f"{series.kernel} linear, K {series.columns}, T {series.tokens} ({series.arch})"


def verdicts(curve: Curve) -> list[str]:
    """What the variations say: whether the number of blocks, or arithmetic, is what limits each encoding."""
    lines = []
    for kernel in dict.fromkeys(series.kernel for series in curve.series if series.kernel != READ):
        mine = [series for series in curve.series if series.kernel == kernel]
        lines += _row_length(kernel, [one for one in mine if one.columns != COLUMNS and one.tokens == 1])
        lines += _tokens(kernel, [one for one in mine if one.columns == COLUMNS])
    return lines


def _row_length(kernel: str, varied: list[Series]) -> list[str]:
    lines = []
    for targets in zip(*(one.points for one in varied), strict=False):
        best, worst = max(point.gbps for point in targets), min(point.gbps for point in targets)
        noise = max(_NOTHING, *(point.spread for point in targets))
        means = "not what limits it" if best <= worst * (1 + noise) else "part of what limits it"
        speeds = ", ".join(f"{point.gbps:.0f} at K {one.columns}" for one, point in zip(varied, targets, strict=True))
        lines.append(
            f"{kernel}, {targets[0].nbytes / 1e6:.1f} MB: {speeds} GB/s; the number of blocks and the row's length are "
            f"{means} ({100 * (best / worst - 1):.0f}%)."
        )
    return lines


def _tokens(kernel: str, varied: list[Series]) -> list[str]:
    by_tokens = {one.tokens: {point.nbytes: point for point in one.points} for one in varied}
    if len(by_tokens) < 2:
        return []
    few, many = min(by_tokens), max(by_tokens)
    common = sorted(set(by_tokens[few]) & set(by_tokens[many]))
    if not common:
        return []
    largest = common[-1]
    one, several = by_tokens[few][largest], by_tokens[many][largest]
    slower = several.seconds / one.seconds - 1
    noise = max(_NOTHING, one.spread, several.spread)
    means = "arithmetic does not limit it" if slower <= noise else "arithmetic takes part"
    return [
        f"{kernel}, {largest / 1e6:.0f} MB: T {many} takes {100 * slower:+.1f}% of the time of T {few}; {means} up to there."
    ]


def draw(curve: Curve, path: Path) -> None:
    """GB/s against bytes as an SVG, each line named at its end. Raises EnvironmentFault without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise EnvironmentFault('plots need matplotlib: pip install "duovolt[plots]"') from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "duovolt"  # the same curve gives the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # words stay words
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    mains = [one for one in curve.series if one.points and one.columns in (0, COLUMNS) and one.tokens in (0, 1)]
    for series in mains:
        sizes = [point.nbytes / 1e6 for point in series.points]
        axes.errorbar(
            sizes,
            [point.gbps for point in series.points],
            yerr=[point.gbps * point.spread / 2 for point in series.points],
            marker=".",
            linewidth=2 if series.kernel == READ else 1.2,
        )
    _name_ends(axes, mains)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("MB a kernel (cold, captured graph)")
    axes.set_ylabel("GB/s, launch included")
    axes.set_title(f"{curve.machine.card}, memory {curve.machine.memory_mhz} MHz, driver {curve.machine.driver}")
    if curve.machine.peak_gbps:
        axes.axhline(curve.machine.peak_gbps, color="grey", linestyle=":", linewidth=1)
        axes.annotate("on paper", (0.6, curve.machine.peak_gbps), color="grey", va="bottom")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.margins(x=0.15)
    figure.tight_layout()
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def _name_ends(axes: Any, mains: list[Series]) -> None:
    """Names at the right ends, pushed apart where lines end close together."""
    if not mains:
        return
    ends: list[tuple[Point, Series, int]] = [(one.points[-1], one, index) for index, one in enumerate(mains)]
    ends.sort(key=lambda end: end[0].gbps)
    apart = 0.045 * max(point.gbps for point, _, _ in ends)
    height = float("-inf")
    for point, series, index in ends:
        height = max(height + apart, point.gbps)
        name = "plain read" if series.kernel == READ else series.kernel
        end = (point.nbytes / 1e6, height)
        axes.annotate(name, end, (8, 0), textcoords="offset points", va="center", color=f"C{index % 10}")
