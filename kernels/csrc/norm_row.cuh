// The RMSNorm of a row that a block holds in registers: the same bits in every kernel that ends in it.
#pragma once
#include "common.cuh"

constexpr int kRowThreads = 512; // at most: as many as take a row of `columns` four float4 at a time (`row_threads` in norm.py)
constexpr int kRowQuads = 4;     // float4 a thread: rows of up to 8192 columns stay in registers

// y = x / sqrt(mean(x^2) + eps) * (1 + weight), quad k * blockDim.x + threadIdx.x of both in values[k] and weights[k],
// zero beyond the row. y goes to fp16 `half_out` and FP32 `wide_out`; what overflows is added to `overflows` (each may be
// null). scratch: a float a warp, that nobody else has read or written since the last barrier.
__device__ __forceinline__ void normalise_row(const float4 (&values)[kRowQuads], const float4 (&weights)[kRowQuads],
                                              int quads, float eps, unsigned short *half_out, float *wide_out,
                                              int *overflows, float *scratch) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        squares += dot(values[k], values[k]);
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = squares;
    }
    __syncthreads();
    float total = scratch[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) {
        total += scratch[warp];
    }
    const float inverse = 1.0f / sqrtf(total / (4 * quads) + eps);
    int overflowed = 0;
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        const int quad = k * blockDim.x + threadIdx.x;
        if (quad < quads) {
            const float4 w = weights[k];
            const float4 y = {values[k].x * inverse * (1.0f + w.x), values[k].y * inverse * (1.0f + w.y),
                              values[k].z * inverse * (1.0f + w.z), values[k].w * inverse * (1.0f + w.w)};
            if (wide_out) {
                write(reinterpret_cast<float4 *>(wide_out) + quad, y);
            }
            if (half_out) {
                const uint2 packed = {staged_pair(y.x, y.y, overflowed), staged_pair(y.z, y.w, overflowed)};
                write(reinterpret_cast<uint2 *>(half_out) + quad, packed);
            }
        }
    }
    count_overflows(overflowed, overflows);
}
