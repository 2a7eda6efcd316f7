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
// The same weight where K goes in slices, as the order of additions must be that of linear_slices.cuh.
template <class Weight> struct Sliced : Weight {
    static constexpr bool kSliced = true;
};
template <class Weight, int kTiles, bool, Form kForm, int kStages>
using Turns = AmpereTurns<Weight, kTiles, kForm, kStages>;
constexpr int kBlocks[] = {3, 2, 2}; // that a multiprocessor should hold, by token tiles
constexpr int kHalfBlocks[] = {4, 3, 2}; // of those that hold half a band
constexpr bool kAskEarly = true; // what an output is made of beside its sum: asked for before the products, not behind them
#else
#include "linear_volta.cuh"
template <class Weight, int kTiles, bool kAhead, Form, int> using Turns = VoltaTurns<Weight, kTiles, kAhead>;
constexpr int kBlocks[] = {3, 2, 2}; // that a multiprocessor should hold, by token tiles
constexpr bool kAskEarly = false;
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

// Sums of one band or half of one, a warp's part each, then the gates of SwiGLU. One word of padding a row, against lanes
// that would meet in one bank.
template <int kTiles, int kHeld, int kChains> using Partial = float[kChains + 1][kTiles * kTokens][kHeld + 1];

// One chain of products of a warp with one item: turns from `first` to `end`.
template <class Weight, int kTiles, class Walk>
__device__ __forceinline__ void multiply_chain(Walk &walk, const Task &task, const Matrix &matrix, int band,
                                               Partial<kTiles, Walk::kHeld, Walk::kChains> &partial, int chain, int end) {
    const int lane = threadIdx.x % 32;
    constexpr int kSums = Walk::kHeld / 4;
    float sum[kTiles][kSums] = {};
#pragma unroll 1
    for (int turn = walk.ahead.first_turn(chain); turn < end; turn += walk.ahead.kStride) {
        if (Weight::kBlocks) {
            const int block = band / matrix.block_bands * matrix.block_columns + turn / matrix.block_turns;
            const float scale = __ldg(matrix.block_scales + block);
            float products[kTiles][kSums] = {};
            walk.multiply(products, turn, end);
#pragma unroll
            for (int index = 0; index < kTiles * kSums; ++index) {
                float &total = sum[index / kSums][index % kSums];
                total = fmaf(scale, products[index / kSums][index % kSums], total);
            }
        } else {
            walk.multiply(sum, turn, end);
        }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            const int token = tile * kTokens + Walk::token(lane, i);
            if (token < task.tokens) {
                partial[chain][token][Walk::row(lane, i)] = sum[tile][i];
            }
        }
    }
}

// The products of one warp with one item: a chain, or one for each of its slices.
template <class Weight, int kTiles, class Walk>
__device__ void multiply_band(Walk &walk, const Task &task, const Matrix &matrix, int band,
                              Partial<kTiles, Walk::kHeld, Walk::kChains> &partial) {
    const int warp = threadIdx.x / 32;
    if constexpr (Walk::kChains == kWarps) {
        multiply_chain<Weight, kTiles>(walk, task, matrix, band, partial, warp, walk.ahead.turns());
    } else {
#pragma unroll 1
        for (int chain = warp; chain < Walk::kChains; chain += kWarps) {
            multiply_chain<Weight, kTiles>(walk, task, matrix, band, partial, chain, walk.ahead.last_turn(chain));
        }
    }
}

template <class Weight> __device__ __forceinline__ float scale_of(const Matrix &matrix, int row) {
    return Weight::kBlocks ? 1.0f : __ldg(matrix.scale + row * matrix.scale_stride);
}

// One output: the warps' sums in order, times the scale of the row.
template <class Weight, int kTiles, int kHeld, int kChains>
__device__ __forceinline__ float total(const Partial<kTiles, kHeld, kChains> &partial, int token, int held_row, float scale) {
    float sum = partial[0][token][held_row];
#pragma unroll
    for (int part = 1; part < kChains; ++part) {
        sum += partial[part][token][held_row];
    }
    return sum * Weight::kUnit * scale;
}

__device__ __forceinline__ size_t place_of(const Matrix &matrix, int token, int row) {
    return static_cast<size_t>(token) * matrix.out_stride + row;
}

__device__ __forceinline__ void store(const Task &task, const Matrix &matrix, int token, int row, float value,
                                      float residual) {
    const size_t place = place_of(matrix, token, row);
    if (matrix.residual != nullptr) { // minus zero would not survive adding nothing
        value += residual;
    }
    if (task.epilogue == kFloat) {
        static_cast<float *>(matrix.out)[place] = value;
    } else {
        static_cast<unsigned short *>(matrix.out)[place] = saturated(value, task.overflows);
    }
}

// What the output of a thread is made of beside its sum, where each has one at most.
struct Beside {
    float scale = 0.0f, residual = 0.0f;

    template <class Weight, int kHeld> __device__ void ask(const Task &task, const Matrix &matrix, int first_row) {
        const int token = threadIdx.x / kHeld, row = first_row + threadIdx.x % kHeld;
        if (token < task.tokens && row < matrix.rows) {
            scale = scale_of<Weight>(matrix, row);
            if (matrix.residual != nullptr) {
                residual = matrix.residual[place_of(matrix, token, row)];
            }
        }
    }
};

// Brings what `finish` will read near: from memory it would come late, at the very end.
__device__ __forceinline__ void prefetch_rest(const Task &task, const Matrix &matrix, int first_row) {
    if (threadIdx.x == 0 && matrix.scale_stride == 1) {
        prefetch(matrix.scale + first_row);
    }
    if (matrix.residual != nullptr && threadIdx.x < task.tokens) {
        prefetch(matrix.residual + static_cast<size_t>(threadIdx.x) * matrix.out_stride + first_row);
    }
}

__device__ __forceinline__ float silu(float value) { return value / (1.0f + expf(-value)); }

// What follows the product, an output a thread: those of one band or half of one.
template <class Weight, int kTiles, int kHeld, int kChains>
__device__ __forceinline__ void finish_one(const Task &task, const Matrix &matrix, int first_row, const Beside &beside,
                                           const Partial<kTiles, kHeld, kChains> &partial) {
    const int token = threadIdx.x / kHeld, held = threadIdx.x % kHeld, row = first_row + held;
    if (token < task.tokens && row < matrix.rows) {
        const float value = total<Weight, kTiles, kHeld, kChains>(partial, token, held, beside.scale);
        store(task, matrix, token, row, value, beside.residual);
    }
}

// The same for any number of tokens, or the gates of a band.
template <class Weight, int kTiles, int kHeld, int kChains>
__device__ __forceinline__ void finish(const Task &task, const Matrix &matrix, int first_row, int part,
                                       Partial<kTiles, kHeld, kChains> &partial) {
    for (int index = threadIdx.x; index < task.tokens * kHeld; index += blockDim.x) {
        const int token = index / kHeld, band_row = index % kHeld, row = first_row + band_row;
        if (row < matrix.rows) {
            // Asked for first: it comes while the sums are added.
            const float residual = matrix.residual == nullptr ? 0.0f : matrix.residual[place_of(matrix, token, row)];
            const float scale = scale_of<Weight>(matrix, row);
            const float value = total<Weight, kTiles, kHeld, kChains>(partial, token, band_row, scale);
            float &gate = partial[kChains][token][band_row];
            if (task.epilogue != kSwiglu) {
                store(task, matrix, token, row, value, residual);
            } else if (part == 0) {
                gate = silu(value);
            } else {
                store(task, matrix, token, row, gate * value, residual);
            }
        }
    }
}

// The same for sixteen rows of gate that stand above the sixteen of up.
template <class Weight, int kTiles, int kHeld, int kChains>
__device__ __forceinline__ void finish_pairs(const Task &task, int first_row, Partial<kTiles, kHeld, kChains> &partial) {
    const Matrix &gates = task.matrix[0], &ups = task.matrix[1];
    for (int index = threadIdx.x; index < task.tokens * kHalfRows; index += blockDim.x) {
        const int token = index / kHalfRows, own = index % kHalfRows, row = first_row + own;
        if (row < gates.rows) {
            const float gate_scale = scale_of<Weight>(gates, row), up_scale = scale_of<Weight>(ups, row);
            const float gate = total<Weight, kTiles, kHeld, kChains>(partial, token, own, gate_scale);
            const float up = total<Weight, kTiles, kHeld, kChains>(partial, token, own + kHalfRows, up_scale);
            store(task, ups, token, row, silu(gate) * up, 0.0f);
        }
    }
}

// kForm, kStages: of `AmpereTurns`; sm_70 has bands and no ring.
template <class Weight, int kTiles, bool kAhead = kTiles == 1 && Weight::kBytes <= 16 && !Weight::kBlocks,
          Form kForm = Weight::kPairs ? kPaired : kWhole, int kStages = Weight::kStages>
__device__ __forceinline__ void run(const Task &task, Items items) {
    using Own = Turns<Weight, kTiles, kAhead, kForm, kStages>;
    using Sums = Partial<kTiles, Own::kHeld, Own::kChains>;
    Sums &partial = *reinterpret_cast<Sums *>(dynamic_shared());
    Own walk(task, items, dynamic_shared() + sizeof(Sums));
    take_over(); // weights are on their way; what else is read, the launch before may have written
    const bool whole = Own::whole(task); // bands
    constexpr bool kEarly = kAskEarly && kTiles == 1;
    const bool early = kEarly && (kForm == kHalved || task.epilogue != kSwiglu); // gates take two parts; halves have none
    static_assert(!kEarly || kTokens * Own::kHeld <= 32 * kWarps, "an output a thread");
#pragma unroll 1
    for (int item = items.first; item < items.end; item += items.step) {
#pragma unroll 1
        for (int part = 0; part < Own::parts_of(task); ++part) {
            int band;
            const Matrix &matrix = matrix_of(task, whole ? item : item / 2, part, band);
            const int first_row = band * kRows + (whole ? 0 : item % 2 * kHalfRows);
            Beside beside;
            if (early) {
                beside.ask<Weight, Own::kHeld>(task, matrix, first_row);
            } else if (kTiles < 3) { // for three, its registers would be one too many on sm_70
                prefetch_rest(task, matrix, first_row);
            }
            multiply_band<Weight, kTiles>(walk, task, matrix, band, partial);
            __syncthreads();
            if (early) {
                finish_one<Weight, kTiles, Own::kHeld, Own::kChains>(task, matrix, first_row, beside, partial);
            } else if (kForm == kPaired && !whole) {
                finish_pairs<Weight, kTiles, Own::kHeld, Own::kChains>(task, first_row, partial);
            } else {
                finish<Weight, kTiles, Own::kHeld, Own::kChains>(task, matrix, first_row, part, partial);
            }
            __syncthreads(); // before the next band's sums
        }
    }
}

// Matrices of different encodings. A block has one item, so that the encodings share no state and no register is spilled.
template <class Weight, int kTiles> __device__ __forceinline__ void run_one(const Task &task, int item) {
    run<Weight, kTiles, false, kWhole, Weight::kMixedStages>(task, {item, item + 1, 1});
}
template <int kTiles> __device__ __forceinline__ void run_any(const Task &task, Items items) {
    int band;
    switch (matrix_of(task, items.first, 0, band).encoding) {
    case kNvfp4:
        run_one<Fp4Lane, kTiles>(task, items.first);
        break;
    case kFp8:
        run_one<Fp8Lane, kTiles>(task, items.first);
        break;
    case kFp8Blocks:
        run_one<Fp8BlocksLane, kTiles>(task, items.first);
        break;
    default:
        run_one<Half, kTiles>(task, items.first);
    }
}

// Half a band an item; kMore: turns in a warp's ring beyond the usual ones.
template <class Weight, int kTiles, int kMore = 0> __device__ __forceinline__ void run_halves(const Task &task, Items items) {
    run<Weight, kTiles, false, kHalved, Weight::kHalfStages + kMore>(task, items);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#include "linear_pair_pass.cuh"
#include "linear_pass.cuh"
#include "linear_slices_run.cuh"
#endif

#define LINEAR(name, call, blocks_a_sm)                                                                                \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, blocks_a_sm) name(const __grid_constant__ Task task) {   \
        call(task, {static_cast<int>(blockIdx.x), task.items, static_cast<int>(gridDim.x)});                           \
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define HALVES(tokens, tiles)                                                                                          \
    LINEAR(linear_nvfp4_halves_##tokens, (run_halves<Fp4Lane, tiles>), kHalfBlocks[tiles - 1])                            \
    LINEAR(linear_fp8_halves_##tokens, (run_halves<Fp8Lane, tiles>), kHalfBlocks[tiles - 1])
// Half bands of up to eight tokens where few blocks share a multiprocessor (`DEEP` in kernels/tuning.py).
#define DEEP LINEAR(linear_fp8_deep_8, (run_halves<Fp8Lane, 1, 1>), kHalfBlocks[0])
// Launches in slices of K (kernels/slices.py, kernels/one_pass.py, kernels/pair_pass.py): up to eight tokens, and more.
#define SLICES                                                                                                         \
    extern "C" __global__ void __launch_bounds__(kSlices * 32, 1) linear_nvfp4_slices_8(                               \
        const __grid_constant__ Task task) {                                                                           \
        run_slices<Fp4Lane, 5, 3>(task);                                                                               \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kSlices * 32, 1) linear_nvfp4_pass_8(                                 \
        const __grid_constant__ Task task) {                                                                           \
        run_pass<Fp4Lane, 3>(task);                                                                                    \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(kSlices * 32, 1) linear_nvfp4_pairs_8(                                \
        const __grid_constant__ Task task) {                                                                           \
        run_pair_pass<Fp4Lane>(task);                                                                                  \
    }
#define SLICED(tokens, tiles) LINEAR(linear_nvfp4_sliced_##tokens, (run<Sliced<Fp4Lane>, tiles>), kBlocks[tiles - 1])
#else
#define HALVES(tokens, tiles)
#define SLICED(tokens, tiles)
#define DEEP
#define SLICES
#endif
#define LINEARS(tokens, tiles)                                                                                         \
    LINEAR(linear_nvfp4_##tokens, (run<Fp4Lane, tiles>), kBlocks[tiles - 1])                                             \
    LINEAR(linear_fp8_##tokens, (run<Fp8Lane, tiles>), kBlocks[tiles - 1])                                                 \
    LINEAR(linear_fp8_blocks_##tokens, (run<Fp8BlocksLane, tiles>), tiles == 3 ? 1 : kBlocks[tiles - 1])                   \
    LINEAR(linear_half_##tokens, (run<Half, tiles>), tiles == 3 ? 1 : 2)                                                                \
    LINEAR(linear_any_##tokens, run_any<tiles>, tiles == 3 ? 1 : 2)                                                                       \
    HALVES(tokens, tiles)
