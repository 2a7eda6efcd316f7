"""What the sources' conventions have in common: a configuration as rules over modules, a weight as stored parts."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ..container import TensorEntry
from ..encodings import PartName
from ..errors import InputError

TILE = (128, 128)  # what block FP8 means where a configuration does not say


@dataclass(frozen=True)
class SourceWeight:
    """One logical weight as a source stores it: `parts` maps part name -> the source's tensor.

    `name` is the source's spelling of the logical name; `shape` that of the values.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    parts: Mapping[PartName, TensorEntry]


@dataclass(frozen=True)
class Scheme:
    """How a rule says that a weight is quantised.

    `words`: `fp8_e4m3` or `nvfp4`. `scales`: what the scales may be, in order of preference: `row`, `tensor`, `tile` for
    FP8, `multiplier` or `divisor` for nvfp4. `label` is the configuration's own word for it.
    """

    words: str
    scales: tuple[str, ...]
    label: str
    tile: tuple[int, int] = TILE


@dataclass(frozen=True)
class Rule:
    """A target or an exception of a configuration: `text` as it is spelt there, `matches(module)`.

    `by_class`: the rule names a class of layers ("Linear"), not modules, so that it reaches every matrix.
    """

    text: str
    matches: Callable[[str], bool]
    by_class: bool = False


@dataclass(frozen=True)
class Declaration:
    """What a configuration says: `targets` give a module its scheme, `ignored` come before them.

    Several targets may match a module, and libraries differ on which of them then holds: what is stored decides.
    `where` names the file for messages, `producer` the library whose convention it is.
    """

    producer: str
    where: str
    targets: list[tuple[Rule, Scheme]]
    ignored: list[Rule] = field(default_factory=list)

    def of(self, module: str) -> list[tuple[Rule, Scheme]]:
        """The rules and schemes that a module falls under; empty: declared plain."""
        if self.ignoring(module) is not None:
            return []
        return [(rule, scheme) for rule, scheme in self.targets if rule.matches(module)]

    def ignoring(self, module: str) -> Rule | None:
        """The exception that a module falls under."""
        return next((rule for rule in self.ignored if rule.matches(module)), None)


def everything(text: str) -> Rule:
    """The class of all linear layers."""
    return Rule(text, lambda module: True, by_class=True)


def exact(text: str) -> Rule:
    """A module by its name, with everything below it."""
    return Rule(text, lambda module: module == text or module.startswith(text + "."))


def suffix(text: str) -> Rule:
    """A module by whole components of its name, at the beginning or the end."""
    return Rule(text, lambda module: f".{module}.".endswith(f".{text}.") or f"{module}.".startswith(f"{text}."))


def wildcard(text: str) -> Rule:
    """A module by a shell pattern, with everything below it; patterns may also be made for parameter names."""
    names = (text, f"{text}.*")
    return Rule(text, lambda module: any(fnmatchcase(n, p) for p in names for n in (module, f"{module}.weight")))


def expression(text: str, pattern: str, where: str) -> Rule:
    """A module by a regular expression, anchored at the beginning. Raises InputError for one that is not valid."""
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"{where}: the rule {text!r} is no regular expression ({error}).") from None
    return Rule(text, lambda module: compiled.match(module) is not None)


def strings(value: Any, key: str, where: str) -> list[str]:
    """A list of strings out of a configuration; absent or null is empty. Raises InputError for anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InputError(f"{where}: {key} is {str(value)[:80]!r}, expected a list of names.")
    return value


def section(value: Any, key: str, where: str) -> dict[str, Any]:
    """A JSON object out of a configuration. Raises InputError for anything else."""
    if not isinstance(value, dict):
        raise InputError(f"{where}: {key} is {str(value)[:80]!r}, expected a JSON object.")
    return value


def pair(value: Any, key: str, where: str) -> tuple[int, int]:
    """Two extents of a tile. Raises InputError for anything else."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 65536 for n in value):
        raise InputError(f"{where}: {key} is {value!r}, expected two positive whole numbers.")
    return value[0], value[1]


def listed(items: Iterable[str], most: int = 4) -> str:
    """The first few of a list, for a message."""
    found = list(items)
    return "; ".join(found[:most]) + (f"; and {len(found) - most} more" if len(found) > most else "")
