"""A result as a table, and what two of them say."""

from collections.abc import Iterable

from ..choices import named_choices
from .result import CHANCE, Outcome, Paired, Result, pair, two_sided

_NAMED = 12  # questions listed by name


def table(result: Result) -> str:
    """What it is of, text scores, then a row a kind of question, then what failed and why."""
    lines = [_of(result)]
    if (text := result.text) is not None:
        lines.append(
            f"text: perplexity {text.perplexity:.3f} over {text.tokens:,} tokens, {text.bits_per_byte:.3f} bits a byte "
            f"({text.bytes:,} bytes in {len(text.windows)} windows)"
        )
    if (found := result.divergence) is not None:
        lines.append(
            f"divergence: KL at least {found.mean:.5f} nats a token (largest {found.largest:.3f}), likeliest token the same "
            f"{found.agreement:.1%}, {found.seen:.1%} of the reference's probability seen ({found.tokens:,} tokens)"
        )
    if result.graded:
        lines.append("kind     right   of  share  tokens an answer")
        for kind in (*dict.fromkeys(one.kind for one in result.graded), "all"):
            rows = [one for one in result.graded if kind in (one.kind, "all")]
            right, tokens = sum(one.passed for one in rows), sum(one.tokens for one in rows)
            lines.append(f"{kind:<8} {right:>5} {len(rows):>4} {right / len(rows):>6.0%}  {tokens / len(rows):.0f}")
        lines += [f"  wrong: {one.id}: {one.why}" for one in result.graded if not one.passed]
    if result.sandbox:
        lines.append(f"answers that are code ran in {result.sandbox}")
    return _printable(lines)


def _of(result: Result) -> str:
    """Model, conversion, recipe, choices, cards and driver as far as the server told them."""
    told = result.server
    named = [f"conversion {told['conversion_id']}"] if "conversion_id" in told else []
    named += [f"recipe {told['recipe']}"] if "recipe" in told else []
    named += [f"backend {told['backend']}"] if "backend" in told else []
    named += named_choices(told)
    named += [f"{key} {word}" for key, word in told.items() if key == "driver" or key[:5] == "card "]
    return "; ".join(
        [result.model, ", ".join(named) or "nothing told of itself", f"{result.date[:10]}, duovolt {result.version}"]
    )


def verdict(paired: Paired) -> str:
    """One sentence: did it get dumber?"""
    lost, gained = len(paired.lost), len(paired.gained)
    if lost == gained:
        return "no difference in the questions"
    way = "worse" if lost > gained else "better"
    if paired.p < CHANCE:
        return f"{way}, by more than chance explains (p = {paired.p:.2g})"
    return f"{way}, but no more than chance explains (p = {paired.p:.2g})"


def comparison(before: Result, after: Result) -> str:
    """The later result against the earlier."""
    lines = [f"before: {before.model} ({before.date}); after: {after.model} ({after.date})"]
    if before.settings != after.settings:
        lines.append("note: the two runs had different settings")
    if before.text is not None and after.text is not None:
        if before.text.digest == after.text.digest and len(before.text.windows) == len(after.text.windows):
            pairs = list(zip(before.text.windows, after.text.windows, strict=True))
            worse, better = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
            lines.append(
                f"text: {after.text.bits_per_byte - before.text.bits_per_byte:+.4f} bits a byte, perplexity "
                f"{before.text.perplexity:.3f} to {after.text.perplexity:.3f}; worse in {worse} windows, better in {better} "
                f"(sign test p = {two_sided(worse, better):.2g})"
            )
        else:
            lines.append("text: other tokens or other windows; not compared")
    paired = pair(before.graded, after.graded)
    if (count := paired.both + paired.neither + len(paired.lost) + len(paired.gained)) == 0:
        return _printable([*lines, "questions: none in common"])
    lines.append(
        f"questions: {count} in common: right in both {paired.both}, before only {len(paired.lost)}, after only "
        f"{len(paired.gained)}, in neither {paired.neither}: {verdict(paired)}"
    )
    reasons = {one.id: one for one in after.graded}
    lines += _named("lost", paired.lost, reasons) + _named("gained", paired.gained, reasons)
    return _printable(lines)


def _printable(lines: list[str]) -> str:
    """Names and reasons come from servers and files."""
    return "\n".join("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in lines)


def _named(word: str, ids: Iterable[str], reasons: dict[str, Outcome]) -> list[str]:
    every = list(ids)
    shown = [f"  {word}: {one}" + (f": {reasons[one].why}" if reasons[one].why else "") for one in every[:_NAMED]]
    return shown + ([f"  {word}: {len(every) - _NAMED} more"] if len(every) > _NAMED else [])


def facts(before: Result, after: Result) -> dict[str, object]:
    """The comparison for a program."""
    paired = pair(before.graded, after.graded)
    return {
        "both": paired.both, "lost": paired.lost, "gained": paired.gained, "neither": paired.neither, "p": paired.p,
        "worse": paired.worse, "verdict": verdict(paired),
    }  # fmt: skip
