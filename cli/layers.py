"""Options of a long-running command in layers: command line, then environment, then a TOML file, then defaults."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.errors import InputError

PREFIX = "DUOVOLT_"
_TRUTHS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_OTHERS = {  # other commands' and the test doors'
    f"{PREFIX}{name}"
    for name in (
        "COUNT_WRITES", "FAIL_AT_WRITE", "FUZZ", "KERNELS", "LINK_FAULT", "LOCKSTEP_FAULT", "LOCKSTEP_LOG", "MAILBOX_FAULT",
        "START_FAULT", "STOP_AT_WRITE",
    )
}  # fmt: skip
_NEAR = 0.75  # likeness from which an unknown variable is taken for a slip of the pen


@dataclass(frozen=True)
class Option:
    """One option, `--NAME` on the command line. `parse` reads a text and raises ArgumentTypeError.

    `many`: may be given several times; a tuple. `place`: a path, which a file means from its own folder; `place_after`: so is
    what stands after this word.
    """

    name: str
    parse: Callable[[str], Any]
    help: str
    metavar: str | None = None
    many: bool = False
    place: bool = False
    place_after: str = ""

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return PREFIX + self.field.upper()


@dataclass(frozen=True)
class Stated:
    """A value and where it stands: a variable's name, or a file and its key; empty for the command line."""

    value: Any
    place: str = ""


def truth(text: str) -> bool:
    """A switch written out. Raises ArgumentTypeError."""
    if text.lower() not in _TRUTHS:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return _TRUTHS[text.lower()]


def add_options(parser: argparse.ArgumentParser, options: Sequence[Option]) -> None:
    """Options without defaults: what is not given does not appear among the arguments."""
    for option in options:
        name = f"--{option.name}"
        common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": option.help}
        if option.parse is truth:
            parser.add_argument(name, action=argparse.BooleanOptionalAction, **common)
        elif option.many:
            parser.add_argument(name, action="append", type=option.parse, metavar=option.metavar, **common)
        else:
            parser.add_argument(name, type=option.parse, metavar=option.metavar, **common)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"TOML file of these options by name; the environment's {PREFIX}NAME and the command line go before it",
    )


def settle(args: argparse.Namespace, options: Sequence[Option]) -> dict[str, Stated]:
    """Field -> value, and its place, for every option that some layer gives.

    Raises InputError for unknown names, with the nearest known one, and for values that an option does not take.
    """
    given = {option.field: getattr(args, option.field, None) for option in options}
    stated = {
        name: Stated(tuple(value) if isinstance(value, list) else value)
        for name, value in given.items()
        if value is not None
    }
    variables = {name: Stated(value, PREFIX + name.upper()) for name, value in _environment(options).items()}
    path = args.config or (Path(text) if (text := os.environ.get(f"{PREFIX}CONFIG")) else None)
    filed = _file(path, options) if path is not None else {}
    return (
        {name: Stated(value, f"{path}: {name.replace('_', '-')}") for name, value in filed.items()} | variables | stated
    )


def _environment(options: Sequence[Option]) -> dict[str, Any]:
    known = {option.variable: option for option in options}
    found = {}
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(PREFIX) or variable in _OTHERS or variable == f"{PREFIX}CONFIG":
            continue
        option = known.get(variable)
        if option is None:
            near = difflib.get_close_matches(variable.removeprefix(PREFIX), _bare(known), 1, _NEAR)
            if near:
                raise InputError(f"{variable} is no option's variable; did you mean {PREFIX}{near[0]}?")
            print(f"duovolt: {variable} is no option's variable; it does nothing.", file=sys.stderr)
        elif option.many:
            found[option.field] = tuple(_parse(option, word, variable) for word in text.split(",") if word.strip())
        elif text:
            found[option.field] = _parse(option, text, variable)
    return found


def _bare(variables: dict[str, Option]) -> list[str]:
    return [variable.removeprefix(PREFIX) for variable in variables]


def _file(path: Path, options: Sequence[Option]) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # no TOML, no text, or a number of thousands of digits
        raise InputError(f"--config {path}: not TOML: {error}.") from error
    known = {option.name: option for option in options}
    found = {}
    for key, value in document.items():
        option = known.get(key.replace("_", "-"))
        if option is None:
            near = difflib.get_close_matches(key.replace("_", "-"), known, 1, 0)
            raise InputError(f"--config {path}: no option {key!r}; the nearest is {near[0]!r}.")
        if option.field in found:
            raise InputError(f"--config {path}: {option.name!r} stands there twice, with - and with _.")
        found[option.field] = _value(option, value, path)
    return found


def _value(option: Option, value: Any, path: Path) -> Any:
    where = f"--config {path}, {option.name}"
    if option.many:
        values = value if isinstance(value, list) else [value]
        return tuple(_one(option, entry, where, path) for entry in values)
    return _one(option, value, where, path)


def _one(option: Option, value: Any, where: str, path: Path) -> Any:
    if isinstance(value, bool):
        if option.parse is not truth:
            raise InputError(f"{where}: a truth value, where {option.metavar or 'a value'} is expected.")
        return value
    if not isinstance(value, str | int | float):
        raise InputError(f"{where}: a {type(value).__name__}, where one value is expected.")
    parsed = _parse(option, str(value), where)
    if option.place_after and parsed.startswith(option.place_after):
        return f"{option.place_after}{path.parent / parsed.removeprefix(option.place_after)}"
    return path.parent / parsed if option.place and str(parsed) != "-" else parsed


def _parse(option: Option, text: str, where: str) -> Any:
    try:
        return option.parse(text.strip())
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{where}: {error}.") from error
