"""`duovolt predict SRC --card CARD`: milliseconds a round and tokens a second from bytes and bandwidth."""

import argparse
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec

from ..checkpoint.errors import CheckFailed, InputError, without_effect
from ..checkpoint.stage import disk_errors
from ..model.partition import MAX_RANKS
from ..perf.cards import MEASURED, Card, card_names, load_card
from ..perf.forecast_file import compare, median_and_worst, read_forecast, read_measured, record
from ..perf.gguf_ledger import gguf_ledger
from ..perf.kernel_shares import read_shares
from ..perf.launch_file import coverage, printable, read_launch_times
from ..perf.ledger import Shape
from ..perf.model_source import sheet_at
from ..perf.predict import CODE, Forecast, Setting, forecast
from ..perf.variants import Case, variants
from .ledger import OF_FAMILY
from .numbers import decimal, whole
from .predict_published import print_published, print_study
from .reads import ALWAYS, Reads, given, without

EXAMPLE = """examples:
  duovolt predict qwen3.8-27b --card v100-877 --tp 2 --link nvlink --drafts 3 --context 8192 186000
  duovolt predict ranks/rank-0-of-2 --card curve.json --drafts 3 --what-if
  duovolt predict qwen3.8-27b --card h200 --tp 1 2 --drafts 3 --context 8192 32768 131072 262144 --write forecast.json
  duovolt predict --check measured.json --against forecast.json --within 3 5

SRC as for `ledger`. A card is a curve that `duovolt bench curve --json` measured, a card file, or one of those that come
with duovolt, each of which says where its numbers are from. docs/predict.md has the model and how far off it was."""


_FORECAST = without("check", "study", "published")
_OF_FAMILY = _FORECAST & OF_FAMILY
READS = Reads(
    {
        ALWAYS: "check study published",
        given("check"): "against within json",
        _FORECAST: "source card context drafts lanes kv host_us kernels launches write json",
        _FORECAST & given("drafts"): "acceptance",
        _OF_FAMILY & given("drafts"): "draft_head",
        _OF_FAMILY: "recipe tp link graphs fuse head",
        _OF_FAMILY & without("json"): "what_if",
    }
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.add_argument("source", nargs="?", metavar="SRC", help="directory, .gguf, config.json or known name")
    parser.add_argument("--card", metavar="C", help=f"{', '.join(card_names())}, a .toml, or a curve's .json")
    parser.add_argument("--recipe", metavar="R", help="as for ledger")
    parser.add_argument("--tp", type=whole, nargs="+", metavar="N", help="ranks, one or several numbers (default: 1)")
    parser.add_argument("--context", type=whole, nargs="+", default=[0], metavar="N", help="tokens in the cache")
    parser.add_argument("--drafts", type=whole, default=0, metavar="K", help="tokens drafted a round (default: 0)")
    parser.add_argument(
        "--lanes", type=whole, nargs="+", default=[1], metavar="L", help="sequences at once (default: 1)"
    )
    parser.add_argument("--kv", choices=("int8", "fp16"), default="int8", help="form of the KV cache (default: int8)")
    parser.add_argument("--draft-head", type=whole, metavar="ROWS", help="as if there were a draft head (0: none)")
    parser.add_argument("--acceptance", type=decimal, default=CODE, metavar="A", help=f"of a draft (default: {CODE})")
    parser.add_argument(
        "--link",
        metavar="L",
        help="between ranks: none, pcie, nvlink, measured (by --launches), or microseconds a message (default: measured, "
        "else the card's first)",
    )
    parser.add_argument(
        "--graphs",
        choices=("on", "serial"),
        default="on",
        help="as for serve: launches overlap where the card can, or follow in turn (default: on)",
    )
    parser.add_argument("--host-us", type=decimal, default=0.0, metavar="U", help="host time a round (default: 0)")
    parser.add_argument("--fuse", type=whole, default=1, metavar="N", help="linears in a row that are one launch")
    parser.add_argument(
        "--head",
        choices=("split", "candidates", "whole"),
        help="each rank its rows, and all logits are gathered, or candidates (serve --head-split on); or all rows on each "
        "(default: split)",
    )
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="shares measured by `bench kernels --json`")
    parser.add_argument(
        "--launches", type=Path, nargs="+", metavar="FILE", help="times measured by `bench launches --json`"
    )
    parser.add_argument("--what-if", action="store_true", help="also with one thing changed at a time")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the forecasts with date and commit")
    parser.add_argument("--json", action="store_true", help="machine-readable: what --write would write")
    parser.add_argument(
        "--check", type=Path, nargs="+", metavar="MEASURED", help="compare measured rounds with --against"
    )
    parser.add_argument("--against", type=Path, nargs="+", metavar="FORECAST", help="files of --write")
    parser.add_argument(
        "--within", type=decimal, nargs=2, metavar=("MEDIAN", "WORST"), help="fail --check beyond so many percent"
    )
    parser.add_argument("--study", action="store_true", help="reproduce a published bandwidth study")
    parser.add_argument("--published", action="store_true", help="derive published figures of V100s")


def _cases(args: argparse.Namespace) -> list[Case]:
    found = []
    for tp, lanes, context in itertools.product(args.tp or [None], args.lanes, args.context):
        if tp is not None and not 1 <= tp <= MAX_RANKS:
            raise InputError(f"--tp {tp}: expected 1 to {MAX_RANKS}.")
        sheet = sheet_at(args.source, tp, args.recipe)
        if args.draft_head is not None:
            if not 0 <= args.draft_head <= 1 << 24:
                raise InputError(f"--draft-head {args.draft_head}: expected a number of rows of the vocabulary.")
            sheet = sheet.with_draft_head(args.draft_head)
        shape = Shape(context, args.drafts, lanes, args.kv, head_split=args.head == "candidates")
        setting = Setting(args.acceptance, args.link or "none", args.host_us, args.graphs == "on")
        found.append(Case(sheet, shape, setting, args.fuse, args.head != "whole"))
    return found


def _linked(case: Case, card: Card, link: str | None) -> Case:
    """The case with the link that was asked for, or the card's first; one rank has none."""
    if case.sheet.tp == 1:
        return replace(case, setting=replace(case.setting, link="none"))
    if link is None and card.has_exchanges:
        link = MEASURED
    if link is None and not card.links:
        raise InputError(f"{card.name}: no figures of a link: give --link none, or a card file that has them.")
    return replace(case, setting=replace(case.setting, link=link or next(iter(card.links))))


def describe(found: Forecast) -> list[str]:
    """A forecast in lines."""
    shape, tp = found.ledger.shape, found.ledger.tp
    ranks = f"{tp} ranks, link {found.setting.link}" if tp > 1 else "one rank"
    lanes = f", {shape.lanes} lanes" if shape.lanes > 1 else ""
    drafts = f", {shape.drafts} drafts of which {found.setting.acceptance:.0%} stand" if shape.drafts else ""
    lines = [
        f"{ranks}{lanes}, {shape.context:,} deep, {shape.kv} KV{drafts}: {found.seconds * 1e3:.2f} ms a round, "
        f"{found.rate:.1f} tok/s (bytes alone: {found.floor * 1e3:.2f} ms)"
    ]
    for family, (count, moved, seconds) in found.families.items():
        rate = f"{moved / seconds / 1e9:>7,.0f} GB/s" if moved > 1e6 and seconds else ""
        lines.append(f"  {family:<11}{count:>5} launches {moved / 1e6:>11,.1f} MB {seconds * 1e3:>8.2f} ms {rate}")
    return lines


def _what_if(case: Case, card: Card) -> list[str]:
    """One line a change. Where launches were measured but not those of the change, by what the card file makes of it."""
    base, lines = case.forecast(card), []
    plain = card.without_launches()
    for what, changed in variants(case, card):
        measured, launches = coverage(changed.ledger().launches, card.exact)
        if card.exact and measured < launches:
            before, other = (_unmeasured(one, card).forecast(plain) for one in (case, changed))
            seconds, mark = base.seconds * other.seconds / before.seconds, "  by the card file"
        else:
            other = changed.forecast(card)
            seconds, mark = other.seconds, ""
        change, rate = seconds - base.seconds, other.tokens / seconds
        lines.append(
            f"  if {what:<36}{seconds * 1e3:>8.2f} ms ({change * 1e3:+.2f}) {rate:>8.1f} tok/s "
            f"({rate / base.rate - 1:+.1%}){mark}"
        )
    return lines


def _unmeasured(case: Case, card: Card) -> Case:
    """The case with a link of the card file in place of a measured one."""
    if case.setting.link != MEASURED:
        return case
    return replace(case, setting=replace(case.setting, link=next(iter(card.links), "none")))


def _check(args: argparse.Namespace) -> int:
    if args.against is None:
        raise InputError("--check needs --against FORECAST, a file of `duovolt predict --write`.")
    if args.within and not all(math.isfinite(limit) and limit >= 0 for limit in args.within):
        raise InputError(f"--within {args.within[0]} {args.within[1]}: expected two numbers of percent, 0 or more.")
    files, measured = [read_forecast(path) for path in args.against], [read_measured(path) for path in args.check]
    found = compare([row for file in files for row in file.rounds], measured)
    without = sum(len(file.rounds) for file in measured) - len(found)
    median, worst = median_and_worst([one.error for one in found])
    mean_median, mean_worst = median_and_worst([one.mean_error for one in found])
    if args.json:
        rows = [
            {"forecast": msgspec.to_builtins(one.forecast), "ms": one.measured, "error": one.error} for one in found
        ]
        facts = {"median": median, "worst": worst, "median_of_means": mean_median, "worst_of_means": mean_worst}
        facts |= {"measured_without_forecast": without}
        made = [{"date": file.date, "commit": file.commit} for file in files]
        print(json.dumps({"forecasts": made, "rounds": rows} | facts, indent=1))
    elif not args.quiet:
        for line in dict.fromkeys(f"{one.card}, forecast on {one.date} at commit {one.commit}" for one in files):
            print(line)
        for one in found:
            row = one.forecast
            graphs = f", graphs {row.graphs}" if row.graphs else ""
            print(
                f"  {row.model or '':<28} tp {row.tp} {row.context:>8,} deep, {row.drafts} drafts, {row.lanes} lanes, "
                f"{row.kv}{graphs}: {row.ms:>7.2f} ms forecast, {one.measured:>7.2f} measured, {one.error:+.1%}"
            )
        print(
            f"{len(found)} rounds: median error {median:.1%}, worst {worst:.1%}; had every linear the mean size: "
            f"{mean_median:.1%}, {mean_worst:.1%}"
        )
        if without:
            print(f"measured but not forecast: {without} round{'s' if without > 1 else ''}")
    if args.within and not (median <= args.within[0] / 100 and worst <= args.within[1] / 100):  # no limit is NaN
        raise CheckFailed(
            f"{', '.join(map(str, args.check))}: median error {median:.1%}, worst {worst:.1%}: beyond {args.within[0]} and "
            f"{args.within[1]} %."
        )
    return 0


def run(args: argparse.Namespace) -> int:
    if args.check is not None:
        return _check(args)
    if args.against or args.within:
        raise InputError("--against and --within are read with --check only: give --check MEASURED.")
    if args.study and args.published:
        raise InputError("--study and --published are two tables: give one of them.")
    if args.study or args.published:
        if not args.quiet:
            print_study() if args.study else print_published()
        return 0
    if args.source is None or args.card is None:
        raise InputError("predict needs a model and a --card: `duovolt predict qwen3.8-27b --card v100-877`.")
    if not 1 <= args.fuse <= 64:
        raise InputError(f"--fuse {args.fuse}: expected 1 to 64.")
    card = load_card(args.card)
    if args.kernels is not None:
        card = card.with_shares(read_shares(args.kernels))
    files = [read_launch_times(path) for path in args.launches or ()]
    if files:
        card = card.with_launches(files)
    cases = []
    if args.source.endswith(".gguf"):
        shapes = [
            Shape(context, args.drafts, lanes, args.kv)
            for lanes, context in itertools.product(args.lanes, args.context)
        ]
        setting = Setting(args.acceptance, "none", args.host_us)
        found = [forecast(gguf_ledger(Path(args.source), shape), card, setting) for shape in shapes]
    else:
        cases = _cases(args)
        if all(case.sheet.tp == 1 for case in cases):
            for option, idle in (("link", "none"), ("head", "split")):
                if getattr(args, option) not in (None, idle):
                    raise without_effect(f"--{option}", "one rank has the whole head and exchanges nothing")
        cases = [_linked(case, card, args.link) for case in cases]
        found = [case.forecast(card) for case in cases]
    written = msgspec.json.format(msgspec.json.encode(record(found)), indent=1) + b"\n"
    if args.write is not None:
        with disk_errors(args.write.parent):
            args.write.write_bytes(written)
    if args.json:
        print(written.decode(), end="")
        return 0
    if args.quiet:
        return 0
    print(f"{card.name}: {card.source}\nassumed: {card.assumed}\n{found[0].ledger.label}")
    for file in files:
        print(printable(f"launches of {', '.join(file.models)}, measured on {file.machine.named}"))
    for chain in (chain for file in files for chain in file.chains if chain.fault):
        print(printable(f"left out, {chain.model}, {chain.tp} ranks, {chain.lanes} lanes: {chain.fault}"))
    if found[0].setting.overlap and not card.savings:
        print("launches in turn: what overlap saves on this card has not been measured, or it has none (below sm_90)")
    for index, one in enumerate(found):
        if card.exact:
            print("{} of {} launches were measured".format(*coverage(one.ledger.launches, card.exact)))
        print("\n".join(describe(one)))
        if cases and 0 < card.memory < (held := cases[index].held):
            print(
                f"  does not fit: weights, keys and values take {held / 1e9:.1f} GB, and the card has {card.memory / 1e9:.1f}"
            )
        if args.what_if and cases:
            print("\n".join(_what_if(cases[index], card)))
    return 0
