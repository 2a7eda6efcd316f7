// Delta chunks, the first kernel: convolution, norms and gates of every token.
#pragma once
#include "chunks.cuh"

// The outputs are fp16: what the fast instructions get wrong is far below its steps.
__device__ __forceinline__ float fast_convolved(float a, float b, float c, float d, float4 taps) {
    const float x = a * taps.x + b * taps.y + c * taps.z + d * taps.w;
    return x * fast_inverse(1.0f + fast_exp2(-kLog2e * x));
}

constexpr int kRun = 16; // rows that a warp convolves one after another
constexpr int kAhead = 4;
constexpr int kConvolveThreads = 128;

// Row r of the chunks is token r - lead; rows of no token are zeros, with gates that change nothing. x, x_a, x_b, weight,
// rows: as in delta_decode. halves_out: fp16 [padded, channels]: queries and keys normalised, queries times 1 / sqrt(128),
// values. gates: FP32 [2, value_heads, padded], log decay and beta. Grid: (heads of 128 channels + 1, padded / 64).
extern "C" __global__ void __launch_bounds__(kConvolveThreads)
    chunks_convolve(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                    const float *a_log, const float *dt_bias, const float *rows, int all_lanes, int lane_index,
                    const int *turns, unsigned short *halves_out, float *gates, int lead, int tokens, int key_heads,
                    int value_heads, float eps) {
    const int head = blockIdx.x, heads = gridDim.x - 1, channels = heads * kHead, padded = gridDim.y * kChunk;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head == heads) {
        for (int index = threadIdx.x; index < kChunk * value_heads; index += kConvolveThreads) {
            const int row = blockIdx.y * kChunk + index / value_heads, own = index % value_heads, token = row - lead;
            const bool there = token >= 0 && token < tokens;
            const size_t from = static_cast<size_t>(token) * x_stride + own, to = static_cast<size_t>(own) * padded + row;
            write(gates + to, there ? -expf(read(a_log + own)) * softplus(read(x_a + from) + read(dt_bias + own)) : 0.0f);
            write(gates + static_cast<size_t>(value_heads) * padded + to, there ? sigmoid(read(x_b + from)) : 0.0f);
        }
        return;
    }
    const int width = row_width(channels, value_heads), channel = head * kHead + 2 * lane; // it, the next, and those 64 on
    const float *history = rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width);
    const auto input = [&](int token) -> float4 {
        if (token >= tokens || token < -kKept) {
            return {};
        }
        const float *from = (token < 0 ? history + static_cast<size_t>(token + kKept) * width
                                       : x + static_cast<size_t>(token) * x_stride) + channel;
        return {read(from), read(from + 1), read(from + 64), read(from + 65)};
    };
    float4 taps[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        taps[i] = read(reinterpret_cast<const float4 *>(weight) + channel + i % 2 + i / 2 * 64);
    }
    const int begin = blockIdx.y * kChunk + warp * kRun;
    const float factor = head < key_heads ? kQueryScale : 1.0f;
    float4 in[kKept + kAhead];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        in[i] = input(begin - lead - kKept + i);
    }
    for (int row = begin; row < begin + kRun; row += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            in[kKept + i] = input(row + i - lead);
        }
        float4 y[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int token = row + i - lead;
            const float4 *w = in + i;
            y[i] = {fast_convolved(w[0].x, w[1].x, w[2].x, w[3].x, taps[0]),
                    fast_convolved(w[0].y, w[1].y, w[2].y, w[3].y, taps[1]),
                    fast_convolved(w[0].z, w[1].z, w[2].z, w[3].z, taps[2]),
                    fast_convolved(w[0].w, w[1].w, w[2].w, w[3].w, taps[3])};
            if (token < 0 || token >= tokens) {
                y[i] = {};
            }
        }
        if (head < 2 * key_heads) {
            float squares[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                squares[i] = warp_sum(dot(y[i], y[i]));
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                y[i] = scaled(y[i], factor * fast_inverse_root(squares[i] + eps));
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            unsigned *to = reinterpret_cast<unsigned *>(halves_out + static_cast<size_t>(row + i) * channels + channel);
            write(to, halves(y[i].x, y[i].y));
            write(to + 32, halves(y[i].z, y[i].w));
        }
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            in[i] = in[kAhead + i];
        }
    }
}
