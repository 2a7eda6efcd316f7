"""What documentation states first about each object that it documents."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """What a document says first about one object: ``kind`` is the directive (function, method, class ...),
    ``name`` the dotted name, ``signature`` the call form, ``text`` the first prose paragraph."""

    kind: str
    name: str
    signature: str
    text: str


def first_sentences(text: str, limit: int) -> str:
    """The first sentences of ``text``, as many as fit in ``limit`` characters (at least one, if it fits)."""
    parts = re.split(r"(?<=[a-z0-9)`\]\"'])\.\s+(?=[A-Z`])", text)
    taken = ""
    for part in parts:
        sentence = part if part.endswith((".", ".)", "!", "?", ":")) else part + "."
        if len(taken) + len(sentence) + 1 > limit:
            break
        taken = f"{taken} {sentence}".strip()
    return taken
