// What one lane holds of one row of a tile, for each encoding: 16 values times a power of two, as fp16 pairs.
//
// kBytes: of a row of a tile. kTurn: tiles that a warp takes at a time. kUnit: the power of two that the decoders leave out.
// kPairs: whether gate and up may stand side by side. kStages: turns in a warp's ring of tiles in shared memory; kHalfStages:
// where they hold half a band. `load` reads global memory (`load_half` its columns 0..7 or 8..15, in the place of 0..7), `take`
// the row at an address of shared memory whose tiles hold kHeld rows, or `take_two` it and the next; `one` and `split` make the
// same of what was read; `prepare` comes before
// `pair`. `quarter` j gives the pairs of columns 4j .. 4j + 3, and `arrange` the activations of eight columns in the same order.
// `mix` stands for all arithmetic where that is measured.
#pragma once
#include "decode.cuh"
#include "half.cuh"
#include "linear_task.cuh"
#include "shared.cuh"
#include "volta.cuh"

#ifndef NVFP4_TURN
#define NVFP4_TURN 8
#endif
#ifndef NVFP4_STAGES
#define NVFP4_STAGES 2
#endif
#ifndef NVFP4_HALF_STAGES
#define NVFP4_HALF_STAGES 3
#endif
#ifndef FP8_STAGES
#define FP8_STAGES 3
#endif
#ifndef FP8_HALF_STAGES
#define FP8_HALF_STAGES 2
#endif
#ifndef FP8_MIXED_STAGES
#define FP8_MIXED_STAGES 2
#endif
#ifndef HALF_STAGES
#define HALF_STAGES 2
#endif

struct Nvfp4 {
    static constexpr int kBytes = 8;
    static constexpr float kUnit = 256.0f;
    static constexpr bool kBlocks = false, kGroupScales = true, kPairs = true, kSliced = false;
    static constexpr int kTurn = NVFP4_TURN;
    static constexpr int kStages = NVFP4_STAGES, kHalfStages = NVFP4_HALF_STAGES, kMixedStages = kStages;

    uint2 codes;
    unsigned factor;

    __device__ static Nvfp4 load(const unsigned char *words, const unsigned char *scales, size_t lane) {
        // .cs: weights pass once, and should not push the activations out of the caches.
        return {__ldcs(reinterpret_cast<const uint2 *>(words) + lane), __ldcs(scales + lane)};
    }

    __device__ static Nvfp4 load_half(const unsigned char *words, const unsigned char *scales, size_t lane, int half) {
        return {{__ldcs(reinterpret_cast<const unsigned *>(words) + 2 * lane + half), 0}, __ldcs(scales + lane)};
    }

    // A row and the next: their words stand together, and so do their scales.
    __device__ static void split(uint4 words, unsigned scales, Nvfp4 &upper, Nvfp4 &lower) {
        upper.codes = {words.x, words.y};
        upper.factor = scales & 0xFFu;
        lower.codes = {words.z, words.w};
        lower.factor = scales >> 8;
    }
    __device__ static void take_two(SharedAddress row, SharedAddress row_scales, Nvfp4 &upper, Nvfp4 &lower) {
        split(shared_16(row), shared_2(row_scales), upper, lower);
    }

    // One row.
    __device__ static void one(uint2 words, unsigned scale, Nvfp4 &weight) {
        weight.codes = words;
        weight.factor = scale;
    }
    __device__ static void take_one(SharedAddress row, SharedAddress row_scale, Nvfp4 &weight) {
        one(shared_8(row), shared_1(row_scale), weight);
    }

    // (code * 2^-14) * (scale * 2^-8 * 2^14): at most 10.5, at least 2^-18, six bits wide, so exact in fp16.
    __device__ void prepare() { factor = multiply_pairs(scale_pair(factor), 0x74007400u); }

    __device__ unsigned pair(int index) const {
        return multiply_pairs(nvfp4_pair(index < 4 ? codes.x : codes.y, index % 4), factor);
    }

    __device__ void quarter(int j, unsigned &first, unsigned &second) const {
        first = pair(2 * j);
        second = pair(2 * j + 1);
    }

    __device__ static uint4 arrange(uint4 x) { return x; }

    __device__ unsigned mix() const { return codes.x ^ codes.y ^ factor; }
};

struct Fp8 {
    static constexpr int kBytes = 16;
    static constexpr float kUnit = 256.0f;
    static constexpr bool kBlocks = false, kGroupScales = false, kPairs = true, kSliced = false;
    static constexpr int kTurn = 4;
    static constexpr int kStages = FP8_STAGES, kHalfStages = FP8_HALF_STAGES, kMixedStages = FP8_MIXED_STAGES;

    uint4 values;

    __device__ static Fp8 load(const unsigned char *words, const unsigned char *, size_t lane) {
        return {__ldcs(reinterpret_cast<const uint4 *>(words) + lane)};
    }

    __device__ static Fp8 load_half(const unsigned char *words, const unsigned char *, size_t lane, int half) {
        const uint2 found = __ldcs(reinterpret_cast<const uint2 *>(words) + 2 * lane + half);
        return {{found.x, found.y, 0, 0}};
    }

    template <int kHeld> __device__ static Fp8 take(SharedAddress row) { return {shared_16(row)}; }

    __device__ void prepare() {}

    __device__ unsigned pair(int index) const {
        const unsigned word = index < 2 ? values.x : index < 4 ? values.y : index < 6 ? values.z : values.w;
        return fp8_pair(word, index % 2);
    }

    __device__ void quarter(int j, unsigned &first, unsigned &second) const {
        first = pair(2 * j);
        second = pair(2 * j + 1);
    }

    __device__ static uint4 arrange(uint4 x) { return x; }

    __device__ unsigned mix() const { return values.x ^ values.y ^ values.z ^ values.w; }
};

// The same words; sums of a turn are multiplied by the scale of their block.
struct Fp8Blocks : Fp8 {
    static constexpr bool kBlocks = true, kPairs = false;

    __device__ static Fp8Blocks load(const unsigned char *words, const unsigned char *scales, size_t lane) {
        return {Fp8::load(words, scales, lane)};
    }

    __device__ static Fp8Blocks load_half(const unsigned char *words, const unsigned char *scales, size_t lane, int half) {
        return {Fp8::load_half(words, scales, lane, half)};
    }

    template <int kHeld> __device__ static Fp8Blocks take(SharedAddress row) { return {Fp8::take<kHeld>(row)}; }
};

struct Half {
    static constexpr int kBytes = 32;
    static constexpr float kUnit = 1.0f;
    static constexpr bool kBlocks = false, kGroupScales = false, kPairs = false, kSliced = false;
    static constexpr int kTurn = 4;
    static constexpr int kStages = HALF_STAGES, kMixedStages = kStages;

    uint4 low, high; // columns 0..7 and 8..15: halves of a tile, each [32 lanes, 16 bytes]

    __device__ static Half load(const unsigned char *words, const unsigned char *, size_t lane) {
        const uint4 *half = reinterpret_cast<const uint4 *>(words) + lane + lane / kRows * kRows;
        return {__ldcs(half), __ldcs(half + kRows)};
    }

    __device__ static Half load_half(const unsigned char *words, const unsigned char *, size_t lane, int half) {
        return {__ldcs(reinterpret_cast<const uint4 *>(words) + lane + (lane / kRows + half) * kRows), {}};
    }

    template <int kHeld> __device__ static Half take(SharedAddress row) {
        return {shared_16(row), shared_16(row + kHeld * 16)};
    }

    __device__ void prepare() {}

    __device__ unsigned pair(int index) const {
        const uint4 &part = index < 4 ? low : high;
        return index % 4 == 0 ? part.x : index % 4 == 1 ? part.y : index % 4 == 2 ? part.z : part.w;
    }

    __device__ void quarter(int j, unsigned &first, unsigned &second) const {
        first = pair(2 * j);
        second = pair(2 * j + 1);
    }

    __device__ static uint4 arrange(uint4 x) { return x; }

    __device__ unsigned mix() const { return low.x ^ low.y ^ low.z ^ low.w ^ high.x ^ high.y ^ high.z ^ high.w; }
};
