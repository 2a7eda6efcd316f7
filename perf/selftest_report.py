"""A self-test's report in words: the doctor's lines, answers, and measured times beside the prediction for that card."""

from .cards import Card, card_file_of, card_of, load_card
from .curve import READ
from .curve_report import facts as curve_facts
from .doctor.judge import judge
from .doctor.judge import lines as doctor_lines
from .ledger import Launch, Shape, ledger_of
from .model_source import sheet_at
from .predict import Forecast, Setting, forecast
from .selftest import Report
from .selftest_slice import CONTEXT, LAYERS, SliceRow, line

MODEL, RANKS, DRAFTS = "qwen3.8-27b", 2, 3
_LAYERS_OF_MODEL = 64


def report_lines(report: Report) -> list[str]:
    """Everything that the report holds, and what was to be expected."""
    printed = doctor_lines(judge(report.facts))
    printed += ["", *answer_lines(report)]
    if report.tuned is not None:
        chosen = report.tuned.choice
        printed += ["", f"best choices: stages {chosen.stages}, blocks a multiprocessor {chosen.blocks_a_sm or 'all'}, "
                    f"{report.tuned.microseconds:.2f} us in the mean"]  # fmt: skip
    if report.curve is not None:
        printed += ["", curve_facts(report.curve)]
        for series in report.curve.series:
            points = "  ".join(f"{point.nbytes / 1e6:.1f} MB {point.gbps:.0f}" for point in series.points)
            refused = f"  (no number for {len(series.refused)} sizes)" if series.refused else ""
            printed.append(f"{series.kernel:<6} GB/s: {points}{refused}")
    if report.slice:
        printed += ["", *slice_lines(report)]
    for exchange in report.exchanges:
        ways = ", ".join(f"{way} {us:.1f} us" for way, us in exchange.microseconds.items())
        printed.append(f"exchange, {exchange.message}: {ways}")
    printed += ["", *(f"not done: {one}" for one in report.missing)] if report.missing else []
    return ["".join(c if c.isprintable() else "?" for c in one) for one in printed]  # a report may come from anyone


def answer_lines(report: Report) -> list[str]:
    """A line an architecture, and one for each answer that is wrong."""
    printed = []
    for arch in dict.fromkeys(answer.arch for answer in report.answers):
        mine = [answer for answer in report.answers if answer.arch == arch]
        errors = [answer.error for answer in mine if answer.error is not None]
        worst = f", largest relative error {max(errors):.1e}" if errors else ""
        printed.append(f"answers, {arch}: {sum(answer.right for answer in mine)} of {len(mine)} families right{worst}")
    for answer in report.wrong:
        why = answer.fault or ("two runs differ" if not answer.repeatable else f"relative error {answer.error:.2g}")
        printed.append(f"WRONG  {answer.family}, {answer.arch}: {why}")
    return printed


def slice_lines(report: Report) -> list[str]:
    """Measured rows; the slice beside what the curve, and the card file, predict for as many layers of the model."""
    printed = [line(row) for row in report.slice]
    measured = next((row for row in report.slice if row.what == "four layers" and not row.dry), None)
    cards = _cards(report)
    for what, card in cards:
        found = forecast(ledger_of(sheet_at(MODEL, RANKS, None), Shape(CONTEXT, DRAFTS)), card, Setting(link="none"))
        if measured is not None:
            printed.append(_beside(what, measured, _slice_seconds(found)))
        printed.append(
            f"{what}: predicted for {MODEL}, a rank of {RANKS} without its link, {CONTEXT} tokens deep, {DRAFTS} drafts: "
            f"{found.seconds * 1e3:.2f} ms a round"
        )
    return printed


def _beside(what: str, measured: SliceRow, predicted: float) -> str:
    off = 100 * (measured.seconds / predicted - 1)
    return (
        f"{what}: four layers predicted {predicted * 1e6:.1f} us, measured {measured.seconds * 1e6:.1f} ({off:+.1f}%)"
    )


def _slice_seconds(found: Forecast) -> float:
    """Of what the slice runs: a sixteenth of the main layers' launches, each at its own time, and what lies between."""
    card = found.card
    seconds = sum(card.seconds(launch) + card.gap_us * 1e-6 for launch in found.ledger.launches if _in_layers(launch))
    return seconds * LAYERS / _LAYERS_OF_MODEL


def _in_layers(launch: Launch) -> bool:
    return launch.part == "verify" and ".layers." in launch.what and launch.family != "collective"


def _cards(report: Report) -> list[tuple[str, Card]]:
    """The card by its own curve, and by the file that ships with duovolt."""
    found = []
    if report.curve is not None and any(one.kernel == READ and one.points for one in report.curve.series):
        found.append(("by its own curve", card_of(report.curve)))
    if report.machine is not None and (name := card_file_of(report.machine)) is not None:
        found.append((f"by the card file {name}", load_card(name)))
    return found
