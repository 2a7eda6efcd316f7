"""Every known fault of servers (A, O01), of loading (L), of speculation (M) and of pairs of ranks (R) has a test that names
it."""

from __future__ import annotations

import re
from pathlib import Path

API = {f"A{number:02}" for number in range(1, 16)}
SPECULATION = {f"M{number:02}" for number in range(1, 7)}
LOADING = {f"L{number:02}" for number in range(1, 10)}
PAIRS = {f"R{number:02}" for number in range(1, 12)}
HEALTH = {"O01"}


def test_every_case_is_named_by_a_test() -> None:
    named: set[str] = set()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        if path != Path(__file__):
            for text in re.findall(
                r'def test_\w+\((?:[^()]|\([^()]*\))*\)[^:]*:\n\s+"""(.*?)"""', path.read_text(), re.DOTALL
            ):
                named |= set(re.findall(r"\b[ALMRO]\d\d\b", text))
    assert (API | LOADING | SPECULATION | PAIRS | HEALTH) - named == set()
