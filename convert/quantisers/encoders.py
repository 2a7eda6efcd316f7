"""Who quantises: a graphics card if there is one and enough to do, compiled loops, or numpy. The bytes are the same."""

import functools
import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...checkpoint.encodings.plain import to_float32
from ...checkpoint.errors import EnvironmentFault, InputError
from . import QUANTISERS, compiled
from .bands import BandEncoder

DEVICES = ("auto", "cpu", "cuda")
WORTH_A_CARD = 2 << 30  # source bytes: below, loading torch and its libraries takes longer than the processor's loops
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # where there is neither, torch need not be asked


class Encoder(Protocol):
    """One recipe's encoder; see `BandEncoder`. `band_bytes`: source bytes it wants at a time. `str` names it."""

    @property
    def quantiser(self) -> str: ...

    @property
    def band_bytes(self) -> int: ...

    @property
    def most_at_once(self) -> int | None: ...

    def nvfp4(
        self, source: np.ndarray, dtype: str, scale: np.float32, words_layout: str, scales_layout: str
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def fp8(self, source: np.ndarray, dtype: str, scales: np.ndarray, layout: str) -> np.ndarray: ...

    def nonzero(self, words: np.ndarray, encoding: str) -> int: ...


def _specimen() -> np.ndarray:
    """BF16 words [64, 256] of many magnitudes and both signs, a block and a row of zeros among them."""
    words = (np.arange(64 * 256, dtype=np.uint64) * np.uint64(2654435761) >> np.uint64(13)).astype(np.uint16)
    words = (words & np.uint16(0xBFFF)).reshape(64, 256)
    words[3, 16:32] = words[7] = 0
    return words


def self_test(encoder: Encoder) -> None:
    """Raises ArithmeticError unless a small band gives the numpy formulas' bytes."""
    source, rules = _specimen(), QUANTISERS[encoder.quantiser]
    values = to_float32(source, "BF16")
    numpy = BandEncoder(encoder.quantiser, compiled.Loops(None, "self-test"))
    scale = rules.global_scale(float(np.abs(values).max()), "BF16")
    rows = rules.row_scales(np.abs(values).max(axis=1), "BF16")
    pairs = [
        *zip(*(e.nvfp4(source, "BF16", scale, "v100-nvfp4", "v100-scale") for e in (encoder, numpy)), strict=True),
        tuple(e.fp8(source, "BF16", rows, "v100-fp8") for e in (encoder, numpy)),
    ]
    if any(a.tobytes() != b.tobytes() for a, b in pairs):
        raise ArithmeticError("the card and numpy give different bytes")


@functools.cache
def _on_card(quantiser: str) -> Any:
    """A tested encoder on the first CUDA card. Raises whatever stands in the way."""
    if not any(path.exists() for path in DRIVERS):
        raise EnvironmentFault("no NVIDIA driver on this machine")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise EnvironmentFault("torch finds no CUDA card")
    encoder = importlib.import_module(".device", __package__).DeviceEncoder(quantiser, torch.device("cuda"))
    self_test(encoder)
    return encoder


def choose_encoder(quantiser: str, arithmetic: str, device: str, source_bytes: int) -> Encoder:
    """`arithmetic`: auto, compiled or numpy, on the processor; `device`: auto, cpu or cuda.

    `source_bytes` are those that will be quantised. Raises InputError for a choice of both, EnvironmentFault if what is
    asked for cannot be had.
    """
    if device == "cuda" and arithmetic != "auto":
        raise InputError(f"--device cuda and --arithmetic {arithmetic}: one or the other.")
    if device == "cuda" or (device == "auto" and arithmetic == "auto" and source_bytes >= WORTH_A_CARD):
        try:
            found: Encoder = _on_card(quantiser)
            return found
        except Exception as error:  # a driver or a library may fail in any way, and none of them must cost a conversion
            if device == "cuda":
                raise EnvironmentFault(
                    f"--device cuda: {str(error) or type(error).__name__}. `--device cpu` gives the same bytes."
                ) from None
    return BandEncoder(quantiser, compiled.choose(arithmetic, source_bytes))
