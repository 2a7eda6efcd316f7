"""JSON as the standard has it, where the library reads and writes more: NaN, infinities, 1e999, lone surrogates."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def parse(text: str) -> Any:
    """The value of JSON text. Raises ValueError, also for what only Python reads and for a nest too deep to follow."""
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def spell(value: Any) -> str:
    """JSON text of a value that `parse` gave, surrogates as they are. Raises ValueError for a nest too deep."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)
