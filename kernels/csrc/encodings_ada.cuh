// The encodings for sm_89 and newer, whose conversion of E4M3 takes two values in one instruction.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"

struct AdaNvfp4 : Nvfp4 {
    static constexpr float kUnit = 16384.0f;

    unsigned even[2], odd[2]; // of the codes' two words: a byte a code * 2^-14, sign and bits 9..11 of fp16

    __device__ static AdaNvfp4 take(SharedAddress tile, int row) { return {Nvfp4::take(tile, row)}; }

    // A code * 2^-14 times a scale is a multiple of 2^-24 and six bits wide: exact, as a subnormal if need be.
    __device__ void prepare() {
        factor = e4m3_pair(static_cast<unsigned short>(permute(factor, factor, 0x7700)));
        const unsigned words[2] = {codes.x, codes.y};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            even[i] = (words[i] << 1 & 0x0E0E0E0Eu) | (words[i] << 4 & 0x80808080u);
            odd[i] = (words[i] >> 3 & 0x0E0E0E0Eu) | (words[i] & 0x80808080u);
        }
    }

    // A code's byte is the upper one of its fp16 number. Codes of two columns in a row stand two bytes apart.
    __device__ void quarter(int j, unsigned &first, unsigned &second) const {
        const unsigned e = even[j / 2], o = odd[j / 2];
        first = multiply_pairs(j % 2 ? e & 0xFF00FF00u : permute(e, 0, 0x2404), factor);
        second = multiply_pairs(j % 2 ? o & 0xFF00FF00u : permute(o, 0, 0x2404), factor);
    }
};

struct AdaFp8 : Fp8 {
    static constexpr float kUnit = 1.0f;

    __device__ static AdaFp8 take(SharedAddress tile, int row) { return {Fp8::take(tile, row)}; }

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
    static constexpr bool kBlocks = true;

    __device__ static AdaFp8Blocks take(SharedAddress tile, int row) { return {AdaFp8::take(tile, row)}; }
};
