// What follows the products of a band: the warps' sums in order, the scale, the residual, fp16, the gates of SwiGLU.
#pragma once
#include "linear_task.cuh"

constexpr float kLargestHalf = 65504.0f;

// The fp16 nearest to a value, +-65504 for what lies beyond; those are counted.
__device__ __forceinline__ unsigned short saturated(float value, unsigned *overflows) {
    if (fabsf(value) > kLargestHalf) {
        value = copysignf(kLargestHalf, value);
        if (overflows != nullptr) {
            atomicAdd(overflows, 1u);
        }
    }
    return static_cast<unsigned short>(half_bits(value));
}

// Sums of one band, a warp's part each, then the gates of SwiGLU. One word of padding a row, against lanes that would meet
// in one bank.
template <int kTiles> using Partial = float[kWarps + 1][kTiles * kTokens][kRows + 1];

// One output: the warps' sums in order, times the scale of the row.
template <class Weight, int kTiles>
__device__ float total(const Partial<kTiles> &partial, const Matrix &matrix, int token, int band_row, int row) {
    float sum = partial[0][token][band_row];
#pragma unroll
    for (int part = 1; part < kWarps; ++part) {
        sum += partial[part][token][band_row];
    }
    const float scale = Weight::kBlocks ? 1.0f : __ldg(matrix.scale + row * matrix.scale_stride);
    return sum * Weight::kUnit * scale;
}

__device__ __forceinline__ void store(const Task &task, const Matrix &matrix, int token, int row, float value) {
    const size_t place = static_cast<size_t>(token) * matrix.out_stride + row;
    if (matrix.residual != nullptr) {
        value += matrix.residual[place];
    }
    if (task.epilogue == kFloat) {
        static_cast<float *>(matrix.out)[place] = value;
    } else {
        static_cast<unsigned short *>(matrix.out)[place] = saturated(value, task.overflows);
    }
}

// Brings what `finish` will read near: from memory it would come late, at the very end.
__device__ __forceinline__ void prefetch_rest(const Task &task, const Matrix &matrix, int band) {
    const int row = band * kRows;
    if (threadIdx.x == 0 && matrix.scale_stride == 1) {
        prefetch(matrix.scale + row);
    }
    if (matrix.residual != nullptr && threadIdx.x < task.tokens) {
        prefetch(matrix.residual + static_cast<size_t>(threadIdx.x) * matrix.out_stride + row);
    }
}

// What follows the product: one band's outputs, or its gates.
template <class Weight, int kTiles>
__device__ __forceinline__ void finish(const Task &task, const Matrix &matrix, int band, int part,
                                       Partial<kTiles> &partial) {
    for (int index = threadIdx.x; index < task.tokens * kRows; index += blockDim.x) {
        const int token = index / kRows, band_row = index % kRows, row = band * kRows + band_row;
        if (row < matrix.rows) {
            const float value = total<Weight, kTiles>(partial, matrix, token, band_row, row);
            float &gate = partial[kWarps][token][band_row];
            if (task.epilogue != kSwiglu) {
                store(task, matrix, token, row, value);
            } else if (part == 0) {
                gate = value / (1.0f + expf(-value));
            } else {
                store(task, matrix, token, row, gate * value);
            }
        }
    }
}
