"""Random words that are legal: every 16 random bits choose an entry of a table that holds no NaN and no bad scale.

Tables are quantiles of the distribution wanted, so that any number of words has its mean and spread, none is an outlier
beyond any scale, and the cost is that of one look-up.
"""

import functools
from statistics import NormalDist

import numpy as np

from ..checkpoint.digest import digest_bytes
from ..checkpoint.encodings import fp8, nvfp4
from ..checkpoint.encodings.plain import from_float32
from ..checkpoint.writer import Planned

BLOCK_BYTES = 4 << 20  # bytes made from one seed; a part of what the words are: another size makes other words
ENTRIES = 1 << 16
SPREAD = np.float32(0.02)  # standard deviation of weights
_FP8_SPREAD = np.float32(112)  # of FP8 words before their scale: the largest of a row lies near 448
_NVFP4_SPREAD = np.float32(2)
_BLOCK_SCALE = (0x68, 0x7F)  # E4M3 words 64 to 448
_BLOCK_MEAN = np.float32(256)


def _normal(count: int) -> np.ndarray:
    """Quantiles of the normal distribution in the middle of `count` equal shares, float32 [count]."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)], np.float32)


def _uniform(low: float, high: float) -> np.ndarray:
    return (low + (high - low) * (np.arange(ENTRIES) + 0.5) / ENTRIES).astype(np.float32)


def _pairs(words: np.ndarray) -> np.ndarray:
    """Two independent words uint8 of a table of 256, side by side in each uint16."""
    index = np.arange(ENTRIES)
    return words[index & 255].astype(np.uint16) | words[index >> 8].astype(np.uint16) << np.uint16(8)


def _values(kind: str) -> np.ndarray:
    """float32 [65536] of a kind that is stored as plain numbers. Raises KeyError for an unknown one."""
    around = float(SPREAD / _FP8_SPREAD)
    whole = float(SPREAD / (_NVFP4_SPREAD * _BLOCK_MEAN))
    return {
        "weight": lambda: _normal(ENTRIES) * SPREAD,
        "gain": lambda: 1 + _normal(ENTRIES) * SPREAD,
        "log decay": lambda: np.log(_uniform(1, 16)),
        "fp8 scale": lambda: _uniform(0.5 * around, 1.5 * around),
        "multiplier": lambda: _uniform(0.5 * whole, 1.5 * whole),
        "divisor": lambda: 1 / _uniform(0.5 * whole, 1.5 * whole),
        "one": lambda: np.ones(ENTRIES, np.float32),
    }[kind]()


@functools.cache
def table(kind: str, dtype: str) -> np.ndarray:
    """What 16 random bits become: [65536] of uint16 (two bytes, or a 16-bit word) or float32.

    kind: `weight`, `gain`, `log decay`, `fp8 scale`, `multiplier`, `divisor`, `one` in BF16, F16 or F32; `fp8` and
    `block scale` in F8_E4M3; `nvfp4` in U8.
    """
    if kind == "fp8":
        return _pairs(fp8.to_e4m3(_normal(256) * _FP8_SPREAD))
    if kind == "block scale":
        low, high = _BLOCK_SCALE
        return _pairs((low + np.arange(256) * (high - low) // 256).astype(np.uint8))
    if kind == "nvfp4":
        codes = nvfp4.to_e2m1(_normal(16) * _NVFP4_SPREAD)
        index = np.arange(256)
        return _pairs((codes[index & 15] | codes[index >> 4] << 4).astype(np.uint8))
    return from_float32(_values(kind), dtype)


def blocks(tensor: Planned) -> int:
    """Number of blocks that a tensor's bytes come in."""
    return -(-tensor.nbytes // BLOCK_BYTES)


def block(seed: int, tensor: Planned, kind: str, number: int) -> np.ndarray:
    """Bytes uint8 of block `number` of a tensor: the same for the same seed, name, kind and dtype, whoever asks when."""
    words = table(kind, tensor.dtype)
    nbytes = min(BLOCK_BYTES, tensor.nbytes - number * BLOCK_BYTES)
    count = -(-nbytes // words.itemsize)
    key = int(digest_bytes(tensor.name.encode()), 16)
    source = np.random.SFC64(np.random.SeedSequence((seed, key, number)))
    choice = source.random_raw(-(-count // 4)).view(np.uint16)[:count]
    return words.take(choice, mode="wrap").view(np.uint8)[:nbytes]
