"""The default formulas and the search as compiled loops: one pass over the data, the layout included.

Byte for byte what checkpoint/encodings, convert/quantisers/search.py and checkpoint/layouts say in numpy (which is what
the tests compare with). Importing this module imports numba; compiled code is cached (see `compiled.py`), so every loop
stands in this one file: numba looks at nothing else to tell whether its cache is stale.

Every loop works on a piece of a row at a time, in stages over scratch rows; each stage is simple enough for the compiler
to vectorise. Arithmetic is float32 with one rounding an operation: no fast-math, whose
contractions would change bytes. All of them release the GIL.

Arrays: `source` is uint16 [rows, columns] of BF16 words, or float32 [rows, columns]; columns are a multiple of 16;
`tiled` says whether the output is in tiles of 32 rows (docs/layouts.md) or canonical.
"""

import numba
import numpy as np
from numba import types
from numba.extending import overload

U8, U32, U64, F32 = np.uint8, np.uint32, np.uint64, np.float32

_jit = numba.njit(nogil=True, error_model="numpy", cache=True)

_CHUNK = 4096  # columns at a time: scratch stays in the first-level cache, the tiles being written near it

_MAGNITUDE = U32(0x7FFFFFFF)
_SMALLEST, _LARGEST = F32(2.0**-9), F32(448)
_ONE_WORD = U32(0x38)
_NORMAL = U32(0x3C800000)  # bits of 2^-6, the least normal E4M3
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BIAS = U32(120 << 3)  # float32's bias less E4M3's, in E4M3's exponent field


def _load(words, row):
    """float32 `row` of BF16 words or float32 values."""
    row[:] = (words.astype(np.uint32) << U32(16)).view(np.float32) if words.dtype == np.uint16 else words


@overload(_load, inline="never")
def _load_overload(words, row):
    if words.dtype == types.uint16:

        def widen(words, row):
            bits = row.view(np.uint32)
            for j in range(len(words)):
                bits[j] = U32(words[j]) << U32(16)

        return widen

    def copy(words, row):
        row[:] = words

    return copy


@_jit
def _block_scales(row, multiplier, wanted, words, factors):
    """Default block scales of one row: E4M3 words, and what each block is divided by; `wanted` float32 is scratch."""
    bits = row.view(np.uint32)
    wanted_bits, amax_bits = wanted.view(np.uint32), factors.view(np.uint32)
    for g in range(len(words)):
        top = U32(0)
        for j in range(16):
            top = max(top, bits[16 * g + j] & _MAGNITUDE)
        amax_bits[g] = top
    six = F32(6) * multiplier
    for g in range(len(words)):
        wanted[g] = min(max(factors[g] / six, _SMALLEST), _LARGEST)
    for g in range(len(words)):
        b = wanted_bits[g]
        normal = U32(((b + U32(0x7FFFF) + ((b >> U32(20)) & U32(1))) >> U32(20)) - _BIAS)
        small = U32(np.rint(wanted[g] * F32(512)))
        word = small if b < _NORMAL else normal
        words[g] = U8(_ONE_WORD if amax_bits[g] == U32(0) else word)
    _block_factors(words, multiplier, factors)


@_jit
def _block_factors(words, multiplier, factors):
    """What the codes of each block are multiplied with."""
    bits = factors.view(np.uint32)
    for g in range(len(words)):
        word = U32(words[g])
        small = F32(word) * F32(2.0**-9)
        bits[g] = (word + _BIAS) << U32(20)
        factors[g] = (small if word < U32(8) else factors[g]) * multiplier


@_jit
def _codes(row, factors, codes):
    """E2M1 codes of one row: nearest, ties to even; zero is code 0."""
    for g in range(len(factors)):
        factor = factors[g]
        for j in range(16):
            y = row[16 * g + j] / factor
            m = abs(y)
            code = U8(1) if m > F32(0.25) else U8(0)
            code = U8(2) if m >= F32(0.75) else code
            code = U8(3) if m > F32(1.25) else code
            code = U8(4) if m >= F32(1.75) else code
            code = U8(5) if m > F32(2.5) else code
            code = U8(6) if m >= F32(3.5) else code
            code = U8(7) if m > F32(5) else code
            codes[16 * g + j] = code | (U8(8) if y < F32(-0.25) else U8(0))


@_jit
def _pack(codes, packed):
    """Eight codes a 32-bit word, the first in the lowest nibble."""
    wide = codes.view(np.uint64)
    for i in range(len(packed)):
        x = wide[i]
        x = (x | x >> U64(4)) & U64(0x00FF00FF00FF00FF)
        x = (x | x >> U64(8)) & U64(0x0000FFFF0000FFFF)
        packed[i] = U32((x | x >> U64(16)) & U64(0xFFFFFFFF))


@_jit
def _interleave(packed):
    """Nibbles 0..7 to the order 0, 2, 4, 6, 1, 3, 5, 7."""
    for i in range(len(packed)):
        x = packed[i]
        even = x & U32(0x0F0F0F0F)
        even = (even | even >> U32(4)) & U32(0x00FF00FF)
        even = (even | even >> U32(8)) & U32(0xFFFF)
        odd = (x >> U32(4)) & U32(0x0F0F0F0F)
        odd = (odd | odd >> U32(4)) & U32(0x00FF00FF)
        odd = (odd | odd >> U32(8)) & U32(0xFFFF)
        packed[i] = U32(even | odd << U32(16))


@_jit
def _place(row_index, first_group, groups, tiled):
    """Where a row's group stands in the output, and the stride to its next, both in groups; `groups` are a row's."""
    if tiled:
        return (row_index // 32 * groups + first_group) * 32 + row_index % 32, 32
    return row_index * groups + first_group, 1


@_jit
def _store_nvfp4(row_index, first_group, groups, codes, block_scales, packed, words, scales, tiled_words, tiled_scales):
    _pack(codes, packed)
    if tiled_words:
        _interleave(packed)
    pairs = packed.view(np.uint64)
    at, stride = _place(row_index, first_group, groups, tiled_words)
    for g in range(len(block_scales)):
        words[at + g * stride] = pairs[g]
    at, stride = _place(row_index, first_group, groups, tiled_scales)
    for g in range(len(block_scales)):
        scales[at + g * stride] = block_scales[g]


@_jit
def _search(row, multiplier, importance, offsets, block_scales, codes):
    """Block scales and codes of one row, from the default block scales: see search.py for the rule."""
    columns, groups = len(row), len(block_scales)
    trial, trial_codes, factors = np.empty(groups, np.uint8), np.empty(columns, np.uint8), np.empty(groups, np.float32)
    possible = np.empty(groups, np.bool_)
    terms = np.empty(columns, np.float64)
    usual = block_scales.copy()
    best = np.full(groups, np.inf)
    for step in offsets:
        for g in range(groups):
            word = np.int64(usual[g]) + step
            possible[g] = (word >= 1) & (word <= 0x7E)
            trial[g] = U8(word) if possible[g] else U8(_ONE_WORD)
        _block_factors(trial, multiplier, factors)
        _codes(row, factors, trial_codes)
        for g in range(groups):
            for j in range(16 * g, 16 * g + 16):
                miss = np.float64(row[j]) - np.float64(_VALUES[trial_codes[j]] * factors[g])
                terms[j] = miss * miss * importance[j]
        for g in range(groups):
            error = terms[16 * g : 16 * g + 16]
            for j in range(8):
                error[j] += error[j + 8]
            for j in range(4):
                error[j] += error[j + 4]
            total = (error[0] + error[2]) + (error[1] + error[3])
            if possible[g] and total < best[g]:
                best[g] = total
                block_scales[g] = trial[g]
                for j in range(16 * g, 16 * g + 16):
                    codes[j] = trial_codes[j]


@_jit
def nvfp4(source, multiplier, words, scales, tiled_words, tiled_scales):
    """`words` uint64 and `scales` uint8, one element a block of 16, are written."""
    rows, columns = source.shape
    for top in range(0, rows, 32):
        for left in range(0, columns, _CHUNK):
            width = min(_CHUNK, columns - left)
            codes, packed = np.empty(width, np.uint8), np.empty(width // 8, np.uint32)
            block_scales, factors = np.empty(width // 16, np.uint8), np.empty(width // 16, np.float32)
            row, wanted = np.empty(width, np.float32), np.empty(width // 16, np.float32)
            for r in range(top, min(top + 32, rows)):
                _load(source[r, left : left + width], row)
                _block_scales(row, multiplier, wanted, block_scales, factors)
                _codes(row, factors, codes)
                _store_nvfp4(
                    r, left // 16, columns // 16, codes, block_scales, packed, words, scales, tiled_words, tiled_scales
                )


@_jit
def nvfp4_search(source, multiplier, importance, offsets, words, scales, tiled_words, tiled_scales):
    """As `nvfp4`, with block scales by search; `importance` float64 [columns], `offsets` int64."""
    rows, columns = source.shape
    for top in range(0, rows, 32):
        for left in range(0, columns, _CHUNK):
            width = min(_CHUNK, columns - left)
            codes, packed = np.empty(width, np.uint8), np.empty(width // 8, np.uint32)
            block_scales, factors = np.empty(width // 16, np.uint8), np.empty(width // 16, np.float32)
            row, wanted = np.empty(width, np.float32), np.empty(width // 16, np.float32)
            for r in range(top, min(top + 32, rows)):
                _load(source[r, left : left + width], row)
                _block_scales(row, multiplier, wanted, block_scales, factors)
                _search(row, multiplier, importance[left : left + width], offsets, block_scales, codes)
                _store_nvfp4(
                    r, left // 16, columns // 16, codes, block_scales, packed, words, scales, tiled_words, tiled_scales
                )


@_jit
def _fp8_codes(row, scale, scaled, shifted, codes):
    """E4M3 codes of one row, as in fp8.to_e4m3."""
    for j in range(len(row)):
        scaled[j] = row[j] / scale
    for j in range(len(row)):
        shifted[j] = min(abs(scaled[j]), F32(448)) + F32(2.0**14)  # rounds to the subnormals' step, 2^-9
    bits, shifted_bits = scaled.view(np.uint32), shifted.view(np.uint32)
    for j in range(len(row)):
        m = min(bits[j] & _MAGNITUDE, U32(0x43E00000))  # 448
        normal = U32(((m + U32(0x7FFFF) + ((m >> U32(20)) & U32(1))) >> U32(20)) - _BIAS)
        code = U32(shifted_bits[j] - U32(0x46800000)) if m < _NORMAL else normal
        sign = (bits[j] >> U32(24)) & U32(0x80)
        codes[j] = U8(code | (sign if code != U32(0) else U32(0)))


@_jit
def _swap_middle(wide):
    """k0 k1 k2 k3 to k0 k2 k1 k3 in each four bytes."""
    for i in range(len(wide)):
        x = wide[i]
        wide[i] = (
            (x & U64(0xFF0000FFFF0000FF))
            | ((x >> U64(8)) & U64(0x0000FF000000FF00))
            | ((x << U64(8)) & U64(0x00FF000000FF0000))
        )


@_jit
def fp8(source, scales, words, tiled):
    """`words` uint64, two elements a group of 16 columns, from row `scales` float32 [rows]."""
    rows, columns = source.shape
    for top in range(0, rows, 32):
        for left in range(0, columns, _CHUNK):
            width = min(_CHUNK, columns - left)
            row, scaled, shifted = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
            codes = np.empty(width, np.uint8)
            wide = codes.view(np.uint64)
            for r in range(top, min(top + 32, rows)):
                _load(source[r, left : left + width], row)
                _fp8_codes(row, scales[r], scaled, shifted, codes)
                if tiled:
                    _swap_middle(wide)
                at, stride = _place(r, left // 16, columns // 16, tiled)
                for g in range(width // 16):
                    words[2 * (at + g * stride)] = wide[2 * g]
                    words[2 * (at + g * stride) + 1] = wide[2 * g + 1]


@_jit
def row_tops(words, mask, tops):
    """`tops[r]`: the largest `words[r] & mask` of each row of unsigned integers."""
    for r in range(words.shape[0]):
        top = words[r, 0] & mask
        for j in range(words.shape[1]):
            top = max(top, words[r, j] & mask)
        tops[r] = top


@_jit
def nonzero_codes(words, mask, high):
    """Number of codes that are not a zero (flushed.py) among uint64 `words`."""
    count = U64(0)
    for word in words:
        flags = ((word & mask) + mask) & high
        flags -= (flags >> U64(1)) & U64(0x5555555555555555)
        flags = (flags & U64(0x3333333333333333)) + ((flags >> U64(2)) & U64(0x3333333333333333))
        flags = (flags + (flags >> U64(4))) & U64(0x0F0F0F0F0F0F0F0F)
        count += (flags * U64(0x0101010101010101)) >> U64(56)
    return count
