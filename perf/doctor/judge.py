"""From facts to findings, and from findings to lines."""

from .facts import Facts, Finding
from .judge_cards import judge_cards
from .judge_host import judge_host
from .judge_links import judge_links
from .judge_software import judge_software


def judge(facts: Facts) -> list[Finding]:
    """All findings, in the order in which one would look."""
    return [*judge_cards(facts), *judge_software(facts), *judge_links(facts), *judge_host(facts)]


def lines(findings: list[Finding]) -> list[str]:
    """A line a finding, its remedy below, and the count."""
    width = max((len(one.about) for one in findings), default=0)
    printed = []
    for one in findings:
        printed.append(f"{one.grade:<8} {one.about:<{width}}  {one.text}")
        if one.remedy is not None:
            printed.append(f"{'':<8} {'':<{width}}  -> {one.remedy}")
    counts = {grade: sum(one.grade == grade for one in findings) for grade in ("good", "limited", "broken")}
    printed.append(", ".join(f"{count} {grade}" for grade, count in counts.items()))
    return printed


def exit_code(findings: list[Finding]) -> int:
    """1 if anything is broken."""
    return int(any(one.grade == "broken" for one in findings))
