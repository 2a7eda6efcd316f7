"""Numbers that people write: on command lines, in the environment, inside other words. One reading for all of them.

Python's own `int` and `float` take more than is meant: digits of every script, `1_000`, `nan`, `inf`, `1e999`.
"""

import math
import re

_WHOLE = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]{1,40}(?:\.[0-9]{0,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?")


def whole_number(text: str) -> int:
    """ASCII digits, at most 20, with a sign or without. Raises ValueError for everything else."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a whole number")
    return int(text)


def decimal_number(text: str) -> float:
    """A finite number in ASCII digits, with a point or an exponent if it has one. Raises ValueError for everything else."""
    if not _DECIMAL.fullmatch(text) or not math.isfinite(value := float(text)):
        raise ValueError(f"{shown(text)} is not a number")
    return value


def is_count(text: str, most_digits: int = 19) -> bool:
    """True for ASCII digits alone, at most `most_digits` of them."""
    return text.isascii() and text.isdecimal() and len(text) <= most_digits


def shown(text: str) -> str:
    """What was written, for a message: quoted, its start only if it is long."""
    return repr(text if len(text) <= 40 else text[:40] + "...")
