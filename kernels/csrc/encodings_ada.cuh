// The encodings for sm_89 and newer, whose conversion of E4M3 takes two values in one instruction.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"

struct AdaNvfp4 : Nvfp4 {
    static constexpr float kUnit = 16384.0f;

    __device__ static AdaNvfp4 take(SharedAddress tile, int row) { return {Nvfp4::take(tile, row)}; }

    // A code * 2^-14 times a scale is a multiple of 2^-24 and six bits wide: exact, as a subnormal if need be.
    __device__ void prepare() { factor = e4m3_pair(static_cast<unsigned short>(permute(factor, factor, 0x7700))); }
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
