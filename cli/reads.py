"""Which options a run reads. Each command declares it beside its options; one that would be ignored is refused.

    READS = Reads({ALWAYS: "source json", given("url"): "model api_key_file", without("url"): "words"})

says that --model is read only with --url. An option may stand under several conditions: it is read if one of them holds.
A test walks all commands, so that no option is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.errors import without_effect


@dataclass(frozen=True)
class Condition:
    """Of the other arguments: `text` completes "it is read only ..."; `holds` judges them."""

    text: str
    holds: Callable[[argparse.Namespace], bool]

    def __and__(self, other: Condition) -> Condition:
        return Condition(f"{self.text} and {other.text}", lambda args: self.holds(args) and other.holds(args))


ALWAYS = Condition("", lambda args: True)


def spelled(name: str) -> str:
    """`draft_head` as it is written: --draft-head."""
    return "--" + name.replace("_", "-")


def given(name: str, text: str = "") -> Condition:
    """With that option, set to something: neither none, off nor 0."""
    return Condition(f"with {text or spelled(name)}", lambda args: bool(getattr(args, name)))


def without(*names: str) -> Condition:
    """With none of these options."""
    return Condition(
        f"without {' or '.join(map(spelled, names))}", lambda args: not any(getattr(args, name) for name in names)
    )


def valued(name: str, *values: Any, text: str = "") -> Condition:
    """With that option, or argument, at one of these values."""
    words = text or f"with {spelled(name)} {' or '.join(map(str, values))}"
    return Condition(words, lambda args: getattr(args, name) in values)


class Reads:
    """Condition -> names of the options that are read under it, with spaces between.

    `layered`: the command judges for itself, when it has put together what other places than the command line say.
    `judged`: an argument of a run whose words are all those of another, which have been judged there.
    """

    def __init__(self, table: Mapping[Condition, str], *, layered: bool = False, judged: str | None = None) -> None:
        self.layered = layered
        self._judged = judged
        self._conditions: dict[str, list[Condition]] = {}
        for condition, names in table.items():
            for name in names.split():
                self._conditions.setdefault(name, []).append(condition)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._conditions)

    def refuse_unread(self, args: argparse.Namespace, stated: Iterable[str]) -> None:
        """Raises InputError for the first of the options `stated` that `args` give no use for."""
        if self._judged is not None and getattr(args, self._judged):
            return
        for name in stated:
            conditions = self._conditions.get(name, [ALWAYS])
            if not any(condition.holds(args) for condition in conditions):
                needed = ", or ".join(dict.fromkeys(condition.text for condition in conditions))
                raise without_effect(spelled(name), f"it is read only {needed}")
