// What the kernels of the gated delta rule share: extents, the convolution, and what a lane keeps of it.
#pragma once
#include "common.cuh"

constexpr int kHead = 128;       // dimensions of a key and of a value head
constexpr int kQuads = kHead / 4;
constexpr int kKept = 3;         // rows of history: the convolution is four wide
constexpr int kMaxTokens = 8;    // tokens a round
constexpr int kRowsKept = kKept + kMaxTokens;
constexpr float kQueryScale = 0.08838834764831845f; // 1 / sqrt(128)

__device__ __forceinline__ float convolved(float a, float b, float c, float d, float4 taps) {
    return silu(a * taps.x + b * taps.y + c * taps.z + d * taps.w);
}

// Elements of a row of the history: channels and gates, up to a multiple of four.
__device__ __forceinline__ int row_width(int channels, int value_heads) { return (channels + 2 * value_heads + 3) / 4 * 4; }

// The rows of a lane's history: half `turn` of `rows`, FP32 [2, all_lanes, kRowsKept, width].
template <class T> __device__ __forceinline__ T *rows_of(T *rows, int turn, int all_lanes, int lane, int width) {
    return rows + (static_cast<size_t>(turn & 1) * all_lanes + lane) * kRowsKept * width;
}

// After a prompt's chunk of `tokens` tokens: its last inputs become the history. The threads of a grid share the channels.
__device__ __forceinline__ void keep_history(const float *x, int x_stride, float *history, int width, int channels,
                                             int tokens, int thread, int threads) {
    for (int channel = thread; channel < channels; channel += threads) {
        float kept[kKept];
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            const int token = tokens - kKept + i;
            kept[i] = token < 0 ? read(history + (token + kKept) * width + channel)
                                : read(x + static_cast<size_t>(token) * x_stride + channel);
        }
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            write(history + i * width + channel, kept[i]);
        }
    }
}
