"""Values that no sound source holds: NaN codes, scales that are zero, negative or not finite."""

import numpy as np

from ..container import NUMPY_DTYPE, TensorEntry, blocks
from ..encodings.plain import to_float32
from ..errors import InputError
from .base import SourceWeight


def bad_value(part: str, dtype: str, words: np.ndarray) -> tuple[int, str] | None:
    """(flat position, what it is) of the first word of a quantised weight's part that must not be there."""
    if dtype == "F8_E4M3":  # words, or block scales of nvfp4
        wrong = (words & 0x7F) == 0x7F
        kind = "NaN scale byte" if part == "block_scale" else "NaN code"
    elif part.endswith("_scale"):
        values = to_float32(words, dtype)
        wrong = ~(np.isfinite(values) & (values > 0))
        kind = "scale"
    else:
        return None
    if not wrong.any():
        return None
    at = int(np.argmax(wrong))
    shown = f"0x{int(words[at]):02x}" if dtype == "F8_E4M3" else f"{float(to_float32(words[at : at + 1], dtype)[0])}"
    return at, f"the {kind} {shown}"


def refusal(entry: TensorEntry, flat: int, what: str) -> InputError:
    """The error that names tensor, file and index of a bad value."""
    index = [int(n) for n in np.unravel_index(flat, entry.shape)] if entry.shape else []
    wanted = "" if "NaN" in what else " (a scale must be finite and above zero)"
    return InputError(
        f"{entry.path}: tensor {entry.name!r} holds {what} at index {index}{wanted}: the source is damaged, or its "
        "exporter failed on this tensor. Fetch it again and compare its digest, or take another export."
    )


def check_values(weight: SourceWeight) -> None:
    """Read the parts of a quantised weight that can hold such values. Raises InputError naming the first."""
    for part, entry in weight.parts.items():
        if part == "plain" or entry.dtype == "U8":
            continue
        done = 0
        for block in blocks(entry):
            words = np.frombuffer(block, NUMPY_DTYPE[entry.dtype])
            if (found := bad_value(part, entry.dtype, words)) is not None:
                raise refusal(entry, done + found[0], found[1])
            done += len(words)
