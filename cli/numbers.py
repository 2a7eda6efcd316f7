"""Types of options that are numbers: the one reading of `checkpoint.numbers`, in argparse's terms."""

import argparse
from collections.abc import Callable
from typing import TypeVar

from ..checkpoint.numbers import decimal_number, is_count, shown, whole_number

CARD_DIGITS = 3
_UNITS = "KMGT"
Number = TypeVar("Number", int, float)


def whole(text: str) -> int:
    """A whole number. Raises ArgumentTypeError."""
    try:
        return whole_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def decimal(text: str) -> float:
    """A finite number. Raises ArgumentTypeError."""
    try:
        return decimal_number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _or_none(read: Callable[[str], Number], text: str) -> Number | None:
    try:
        return read(text)
    except ValueError:
        return None


def whole_from(low: int, high: int | None = None) -> Callable[[str], int]:
    """The type of whole numbers from `low` to `high`."""

    def parse(text: str) -> int:
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        value = _or_none(whole_number, text)
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number, {bounds}")
        return value

    return parse


def decimal_from(low: float) -> Callable[[str], float]:
    """The type of finite numbers, at least `low`."""

    def parse(text: str) -> float:
        value = _or_none(decimal_number, text)
        if value is None or value < low:
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a number, {low:g} or more")
        return value

    return parse


def seconds(*, zero: bool) -> Callable[[str], float]:
    """The type of times: above 0, or from 0 on."""

    def parse(text: str) -> float:
        value = _or_none(decimal_number, text)
        if value is None or value < 0 or (value == 0 and not zero):
            least = "0 or more" if zero else "above 0"
            raise argparse.ArgumentTypeError(f"{shown(text)} is not a number of seconds, {least}")
        return value

    return parse


def positions(low: int) -> Callable[[str], int]:
    """The type of a number of positions, at least `low`; 0 for the word `auto`."""
    return lambda text: 0 if text == "auto" else whole_from(low)(text)


def memory(text: str) -> int:
    """Bytes from a number with K, M, G or T behind it; none from `off`. Raises ArgumentTypeError."""
    if text == "off":
        return 0
    unit = _UNITS.find(text[-1:].upper()) + 1 if text else 0
    digits = text[:-1] if unit else text
    if not is_count(digits) or int(digits) << 10 * unit >= 1 << 50:
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither off nor a size such as 512M or 4G")
    return int(digits) << 10 * unit


def memory_or_auto(text: str) -> int | None:
    """As `memory`; None for the word `auto`."""
    try:
        return None if text == "auto" else memory(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither auto, off nor a size such as 512M or 4G") from None


def cards(most: int | None = None, *, cpu: bool = True) -> Callable[[str], str]:
    """The type of cards by number, with commas between, at most so many; or `cpu` where that is allowed."""

    def parse(text: str) -> str:
        words = text.split(",")
        if text == "cpu" and cpu:
            return text
        if not all(is_count(word, CARD_DIGITS) for word in words) or (most is not None and len(words) > most):
            what = {None: "numbers of cards with commas between", 1: "the number of a card"}.get(
                most, f"the number of a card, nor of {most} with a comma between"
            )
            raise argparse.ArgumentTypeError(f"{shown(text)} is {f'neither cpu nor {what}' if cpu else f'not {what}'}")
        return text

    return parse


def numbers_of(text: str) -> list[int]:
    """The cards that `cards` let pass; none for `cpu`."""
    return [] if text == "cpu" else [int(word) for word in text.split(",")]
