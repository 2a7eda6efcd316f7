// Decode linear: y[T, N] = x[T, K] W[N, K]^T for T = 1..24, several matrices a launch, with what follows them.
//
// A block owns bands of 32 rows of W and splits K over its eight warps, whose sums are added in the order of the warps, in
// shared memory. A token's bits depend on its own row of x and on W alone: every output is the same chain of FP32
// additions for every T and every grid, and no sum is atomic. docs/kernels.md says why it is cut this way.
#pragma once
#include "linear_task.cuh"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#include "encodings_ada.cuh"
using Fp4Lane = AdaNvfp4;
using Fp8Lane = AdaFp8;
using Fp8BlocksLane = AdaFp8Blocks;
#else
#include "encodings.cuh"
using Fp4Lane = Nvfp4;
using Fp8Lane = Fp8;
using Fp8BlocksLane = Fp8Blocks;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#include "linear_ampere.cuh"
template <class Weight, int kTiles, bool> using Turns = AmpereTurns<Weight, kTiles>;
constexpr int kBlocks[] = {3, 2, 2}; // that a multiprocessor should hold, by token tiles
#else
#include "linear_volta.cuh"
template <class Weight, int kTiles, bool kAhead> using Turns = VoltaTurns<Weight, kTiles, kAhead>;
constexpr int kBlocks[] = {3, 2, 2}; // that a multiprocessor should hold, by token tiles
#endif

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

// The products of one warp with one band.
template <class Weight, int kTiles, bool kAhead>
__device__ void multiply_band(Turns<Weight, kTiles, kAhead> &walk, const Task &task, const Matrix &matrix, int band,
                              Partial<kTiles> &partial) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    float sum[kTiles][8] = {};
#pragma unroll 1
    for (int turn = warp; turn < walk.ahead.turns(); turn += kWarps) {
        if (Weight::kBlocks) {
            const int block = band / matrix.block_bands * matrix.block_columns + turn / matrix.block_turns;
            const float scale = __ldg(matrix.block_scales + block);
            float products[kTiles][8] = {};
            walk.multiply(products, turn);
#pragma unroll
            for (int index = 0; index < kTiles * 8; ++index) {
                sum[index / 8][index % 8] = fmaf(scale, products[index / 8][index % 8], sum[index / 8][index % 8]);
            }
        } else {
            walk.multiply(sum, turn);
        }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int token = tile * kTokens + Turns<Weight, kTiles, kAhead>::token(lane, i);
            if (token < task.tokens) {
                partial[warp][token][Turns<Weight, kTiles, kAhead>::row(lane, i)] = sum[tile][i];
            }
        }
    }
}

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

template <class Weight, int kTiles, bool kAhead = kTiles == 1 && Weight::kBytes <= 16 && !Weight::kBlocks>
__device__ __forceinline__ void run(const Task &task, Items items) {
    Partial<kTiles> &partial = *reinterpret_cast<Partial<kTiles> *>(dynamic_shared());
    Turns<Weight, kTiles, kAhead> walk(task, items, dynamic_shared() + sizeof(Partial<kTiles>));
    take_over(); // weights are on their way; what else is read, the launch before may have written
#pragma unroll 1
    for (int item = items.first; item < items.end; item += items.step) {
#pragma unroll 1
        for (int part = 0; part <= (task.epilogue == kSwiglu ? 1 : 0); ++part) {
            int band;
            const Matrix &matrix = matrix_of(task, item, part, band);
            if (kTiles < 3) { // for three, its registers would be one too many on sm_70
                prefetch_rest(task, matrix, band);
            }
            multiply_band<Weight, kTiles, kAhead>(walk, task, matrix, band, partial);
            __syncthreads();
            finish<Weight, kTiles>(task, matrix, band, part, partial);
            __syncthreads(); // before the next band's sums
        }
    }
}

// Matrices of different encodings. A block has one item, so that the encodings share no state and no register is spilled.
template <int kTiles> __device__ __forceinline__ void run_any(const Task &task, Items items) {
    const Items one = {items.first, items.first + 1, 1};
    int band;
    switch (matrix_of(task, items.first, 0, band).encoding) {
    case kNvfp4:
        run<Fp4Lane, kTiles, false>(task, one);
        break;
    case kFp8:
        run<Fp8Lane, kTiles, false>(task, one);
        break;
    case kFp8Blocks:
        run<Fp8BlocksLane, kTiles, false>(task, one);
        break;
    default:
        run<Half, kTiles, false>(task, one);
    }
}

#define LINEAR(name, call, blocks_a_sm)                                                                                \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, blocks_a_sm) name(const __grid_constant__ Task task) {   \
        call(task, {static_cast<int>(blockIdx.x), task.items, static_cast<int>(gridDim.x)});                           \
    }
#define LINEARS(tokens, tiles)                                                                                         \
    LINEAR(linear_nvfp4_##tokens, (run<Fp4Lane, tiles>), kBlocks[tiles - 1])                                             \
    LINEAR(linear_fp8_##tokens, (run<Fp8Lane, tiles>), kBlocks[tiles - 1])                                                 \
    LINEAR(linear_fp8_blocks_##tokens, (run<Fp8BlocksLane, tiles>), tiles == 3 ? 1 : kBlocks[tiles - 1])                   \
    LINEAR(linear_half_##tokens, (run<Half, tiles>), tiles == 3 ? 1 : 2)                                                                \
    LINEAR(linear_any_##tokens, run_any<tiles>, tiles == 3 ? 1 : 2)
