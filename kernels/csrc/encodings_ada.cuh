// The encodings for sm_89 and newer, whose conversion of E4M3 takes two values in one instruction.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"

struct AdaNvfp4 : Nvfp4 {
    static constexpr float kUnit = 16384.0f;

    // Of the codes' two words, a byte a code * 2^-14: sign at bit 7 and magnitude at bits 3..1, as in the upper byte of fp16,
    // and other bits of the word in between and at the end.
    unsigned even[2], odd[2];

    __device__ static void split(uint4 words, unsigned scales, AdaNvfp4 &upper, AdaNvfp4 &lower) {
        Nvfp4::split(words, 0, upper, lower);
        const unsigned factors = e4m3_pair(static_cast<unsigned short>(scales));
        upper.factor = both_lower(factors);
        lower.factor = both_upper(factors);
    }
    __device__ static void take_two(SharedAddress row, SharedAddress row_scales, AdaNvfp4 &upper, AdaNvfp4 &lower) {
        split(shared_16(row), shared_2(row_scales), upper, lower);
    }

    __device__ static void one(uint2 words, unsigned scale, AdaNvfp4 &weight) {
        weight.codes = words;
        weight.factor = both_lower(e4m3_pair(static_cast<unsigned short>(scale)));
    }
    __device__ static void take_one(SharedAddress row, SharedAddress row_scale, AdaNvfp4 &weight) {
        one(shared_8(row), shared_1(row_scale), weight);
    }

    // A code * 2^-14 times a scale is a multiple of 2^-24 and six bits wide: exact, as a subnormal if need be.
    __device__ void prepare() {
        const unsigned words[2] = {codes.x, codes.y};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            even[i] = chosen(0x0E0E0E0Eu, words[i] * 2, words[i] * 16);
            odd[i] = chosen(0x0E0E0E0Eu, words[i] >> 3, words[i]);
        }
    }

    // Codes of two columns in a row stand two bytes apart. Products stand for shifts, which another pipe would have to do.
    __device__ void quarter(int j, unsigned &first, unsigned &second) const {
        const unsigned e = j % 2 ? even[j / 2] : even[j / 2] * 256, o = j % 2 ? odd[j / 2] : odd[j / 2] * 256;
        first = multiply_pairs(e & 0x8E008E00u, factor);
        second = multiply_pairs(o & 0x8E008E00u, factor);
    }
};

struct AdaFp8 : Fp8 {
    static constexpr float kUnit = 1.0f;

    template <int kHeld> __device__ static AdaFp8 take(SharedAddress row) { return {Fp8::take<kHeld>(row)}; }

    // Columns (0, 2) and (1, 3) of four, which stand in one half-word; the activations are paired likewise.
    __device__ void quarter(int j, unsigned &first, unsigned &second) const {
        const unsigned word = j == 0 ? values.x : j == 1 ? values.y : j == 2 ? values.z : values.w;
        first = e4m3_pair(static_cast<unsigned short>(word));
        second = e4m3_pair(static_cast<unsigned short>(word >> 16));
    }

    __device__ static uint4 arrange(uint4 x) {
        return {permute(x.x, x.y, 0x5410), permute(x.x, x.y, 0x7632), permute(x.z, x.w, 0x5410),
                permute(x.z, x.w, 0x7632)};
    }
};

struct AdaFp8Blocks : AdaFp8 {
    static constexpr bool kBlocks = true, kPairs = false;

    template <int kHeld> __device__ static AdaFp8Blocks take(SharedAddress row) { return {AdaFp8::take<kHeld>(row)}; }
};
