// The encodings for sm_89 and newer, whose conversion of E4M3 takes two values in one instruction.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"

#ifndef NVFP4_DECODE
#define NVFP4_DECODE 2
#endif
struct AdaNvfp4 : Nvfp4 {
    static constexpr float kUnit = NVFP4_DECODE == 2 ? 64.0f : 16384.0f;

    unsigned even[2], odd[2]; // of the codes' two words: a byte a code, of the even and of the odd nibbles

    __device__ static AdaNvfp4 take(SharedAddress tile, int row) { return {Nvfp4::take(tile, row)}; }

    __device__ void prepare() {
        factor = e4m3_pair(static_cast<unsigned short>(permute(factor, factor, 0x7700)));
#if NVFP4_DECODE == 1
        for (int i = 0; i < 2; ++i) {
            const unsigned word = i ? codes.y : codes.x;
            even[i] = (word << 1 & 0x0E0E0E0Eu) | (word << 4 & 0x80808080u);
            odd[i] = (word >> 3 & 0x0E0E0E0Eu) | (word & 0x80808080u);
        }
#elif NVFP4_DECODE == 2
        for (int i = 0; i < 2; ++i) {
            const unsigned word = i ? codes.y : codes.x;
            even[i] = (word << 2 & 0x1C1C1C1Cu) | (word << 4 & 0x80808080u);
            odd[i] = (word >> 2 & 0x1C1C1C1Cu) | (word & 0x80808080u);
        }
#endif
    }

#if NVFP4_DECODE == 1
    __device__ void quarter(int j, unsigned &first, unsigned &second) const {
        const unsigned e = even[j / 2], o = odd[j / 2];
        first = multiply_pairs(j % 2 ? e & 0xFF00FF00u : permute(e, 0, 0x2404), factor);
        second = multiply_pairs(j % 2 ? o & 0xFF00FF00u : permute(o, 0, 0x2404), factor);
    }
#elif NVFP4_DECODE == 2
    __device__ void quarter(int j, unsigned &first, unsigned &second) const {
        const unsigned bytes = j % 2 ? odd[j / 2] : even[j / 2];
        first = multiply_pairs(e4m3_pair(static_cast<unsigned short>(bytes)), factor);
        second = multiply_pairs(e4m3_pair(static_cast<unsigned short>(bytes >> 16)), factor);
    }
    __device__ static uint4 arrange(uint4 x) {
        return {permute(x.x, x.z, 0x5410), permute(x.x, x.z, 0x7632), permute(x.y, x.w, 0x5410),
                permute(x.y, x.w, 0x7632)};
    }
#endif
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
