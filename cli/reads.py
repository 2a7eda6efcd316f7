"""Which options a run reads. Each command declares it beside its options; one that would be ignored is refused.

    READS = Reads({ALWAYS: "source json", given("url"): "model api_key_file", without("url"): "words"})

says that --model is read only with --url. An option may stand under several conditions: it is read if one of them holds.
At its default, or at a value that asks for nothing (`NEUTRAL`), it may stand anywhere. A test walks all commands, so that
no option is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoint.errors import without_effect

# What these switch off or leave open is so in a run that has no use for it.
NEUTRAL = (None, False, 0, "off", "none", "auto")


@dataclass(frozen=True)
class Condition:
    """Of the other arguments: `text` completes "it is read only ..."; `holds` judges them. `parts`: of one that was joined."""

    text: str
    holds: Callable[[argparse.Namespace], bool]
    parts: tuple[Condition, ...] = ()

    def __and__(self, other: Condition) -> Condition:
        parts = (*(self.parts or (self,)), *(other.parts or (other,)))
        text = " and ".join(part.text for part in parts)
        return Condition(text, lambda args: self.holds(args) and other.holds(args), parts)

    def missing(self, args: argparse.Namespace) -> str:
        """`text` of the parts that do not hold."""
        return " and ".join(part.text for part in self.parts or (self,) if not part.holds(args))


ALWAYS = Condition("", lambda args: True)


def spelled(name: str) -> str:
    """`draft_head` as it is written: --draft-head."""
    return "--" + name.replace("_", "-")


def asks_for_nothing(value: Any, default: Any) -> bool:
    """Whether a run without a use for the option does as it says."""
    if value == default or value in NEUTRAL:
        return True
    return isinstance(value, list | tuple) and all(asks_for_nothing(one, None) for one in value)


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
    `contrary`: condition -> options of which such a run has another value than their default, which asks for something then.
    """

    def __init__(
        self,
        table: Mapping[Condition, str],
        *,
        layered: bool = False,
        judged: str | None = None,
        contrary: Mapping[Condition, str] | None = None,
    ) -> None:
        self.layered = layered
        self._contrary = contrary or {}
        self._judged = judged
        self._conditions: dict[str, list[Condition]] = {}
        for condition, names in table.items():
            for name in names.split():
                self._conditions.setdefault(name, []).append(condition)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._conditions)

    def unread(
        self, args: argparse.Namespace, stated: Iterable[str], defaults: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """(name, why) of the options `stated` that ask for something and that `args` give no use for."""
        if self._judged is not None and getattr(args, self._judged):
            return
        for name in stated:
            conditions = self._conditions.get(name, [ALWAYS])
            if any(condition.holds(args) for condition in conditions):
                continue
            contrary = any(name in names.split() and one.holds(args) for one, names in self._contrary.items())
            if contrary or not asks_for_nothing(getattr(args, name), defaults.get(name)):
                needed = ", or ".join(dict.fromkeys(condition.missing(args) for condition in conditions))
                yield name, f"it is read only {needed}"

    def refuse_unread(self, args: argparse.Namespace, stated: Iterable[str], defaults: Mapping[str, Any]) -> None:
        """Raises InputError for the first of them."""
        for name, why in self.unread(args, stated, defaults):
            raise without_effect(spelled(name), why)
