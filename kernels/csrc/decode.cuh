// Stored words of the v100 layouts (docs/layouts.md) to pairs of fp16 bit patterns, by shifts and masks alone:
// sm_70 converts integers to fp16 at a fraction of its logic rate. A pair is the bits of a half2, the even column in the
// low half. Integers only, so that a host compiler can compile this file for a test.
#pragma once

// E2M1 code * 2^-14: sign to bit 15, exponent and mantissa to bits 9..11 (E2M1 has bias 1, fp16 bias 15). Exact, the
// code 0.5 becoming the subnormal 2^-15. `pair` is 0..3, columns 2 pair and 2 pair + 1 of the word's eight.
// Signs are first moved three bits up, to where one shift brings them to bit 15 together with their magnitude: even and
// odd nibbles apart, for their neighbours' bits are in the way. What the pairs of a word share is computed once.
__device__ __forceinline__ unsigned nvfp4_pair(unsigned word, int pair) {
    if (pair == 3) {
        return (word & 0x80008000u) | (word >> 3 & 0x0E000E00u);
    }
    const unsigned own = pair == 1 ? 0x70707070u : 0x07070707u;
    const unsigned joined = (word & own) | (word << 3 & ~own);
    return joined << (9 - 4 * pair) & 0x8E008E00u;
}

// E4M3 value * 2^-8: sign to bit 15, exponent and mantissa to bits 7..13 (bias 7 against 15). Exact, subnormals
// included. The NaN codes 0x7F and 0xFF would read as +-480: the converter refuses them. `pair` is 0 or 1.
__device__ __forceinline__ unsigned fp8_pair(unsigned word, int pair) {
    return pair == 0 ? (word & 0x00800080u) << 8 | (word & 0x007F007Fu) << 7
                     : (word & 0x80008000u) | (word & 0x7F007F00u) >> 1;
}

// E4M3 block scale * 2^-8, in both halves.
__device__ __forceinline__ unsigned scale_pair(unsigned char scale) {
    const unsigned bits = (scale & 0x80u) << 8 | (scale & 0x7Fu) << 7;
    return bits | bits << 16;
}
