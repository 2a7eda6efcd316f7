// The decode linear's inner part for sm_70: m8n8k4, a lane a row of the band, weights from memory to registers.
#pragma once
#include "encodings.cuh"
#include "linear_finish.cuh"
#include "linear_task.cuh"
#include "volta.cuh"

// kAhead: the next turn is loaded before this one is multiplied, for twice the registers.
template <class Weight, int kTiles, bool kAhead> struct VoltaTurns {
    static constexpr int kTurn = 4;

    Walk<kTurn> ahead;
    Weight next[kTurn];
    int lane;

    __device__ VoltaTurns(const Task &task, Items items, unsigned char *)
        : ahead(task, items), lane(kept(threadIdx.x % 32)) {
        if (kAhead) {
            load();
        }
    }

    __device__ void load() {
        if (ahead.done()) {
            return;
        }
#pragma unroll
        for (int step = 0; step < kTurn; ++step) {
            const int group = ahead.turn * kTurn + step;
            const size_t own = static_cast<size_t>(ahead.first_tile + group) * kRows + lane;
#ifdef ABLATE_LOADS
            next[step] = Weight{};
#else
            next[step] = group < ahead.task.groups ? Weight::load(ahead.words, ahead.group_scales, own) : Weight{};
#endif
        }
        ahead.next();
    }

    // sum[tile][i]: token `token(i)` of token tile `tile`, row `row(i)` of the band.
    __device__ static int token(int lane, int i) { return (lane & 1) + (i & 2) + lane / 16 * 4; }
    __device__ static int row(int lane, int i) {
        const int column = (i & 4) + (lane & 2) + (i & 1); // of the quad-pair's eight weight rows
        return lane / 4 % 4 * 4 + column % 4 + column / 4 * 16;
    }

    // Adds the products of a warp's next turn, which is turn `turn` of the band.
    __device__ void multiply(float (&sum)[kTiles][8], int turn) {
        const Task &task = ahead.task;
        const int own_token = lane % 4 + lane / 16 * 4;
        Weight now[kTurn];
        if (!kAhead) {
            load();
        }
#pragma unroll
        for (int step = 0; step < kTurn; ++step) {
            now[step] = next[step];
        }
        if (kAhead) {
            load();
        }
        // A fence for the compiler: without it ptxas moves each load down to its use, and one is in flight at a time.
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kTurn; ++step) {
            const int group = turn * kTurn + step;
#ifndef ABLATE_ARITHMETIC
            now[step].prepare();
#endif
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const int token = tile * kTokens + own_token;
                uint4 low = {}, high = {};
#ifndef ABLATE_LOADS
                if (token < task.tokens && group < task.groups) {
                    const uint4 *row = reinterpret_cast<const uint4 *>(task.x) + (token * task.groups + group) * 2;
                    low = kTiles == 3 ? read_now(row) : __ldg(row); // three tiles' loads at once would not fit
                    high = kTiles == 3 ? read_now(row + 1) : __ldg(row + 1);
                }
#endif
#ifdef ABLATE_ARITHMETIC
                sum[tile][0] += __int_as_float(now[step].mix() ^ low.x ^ high.y);
#else
                multiply_accumulate(sum[tile], low.x, low.y, now[step].pair(0), now[step].pair(1));
                multiply_accumulate(sum[tile], low.z, low.w, now[step].pair(2), now[step].pair(3));
                multiply_accumulate(sum[tile], high.x, high.y, now[step].pair(4), now[step].pair(5));
                multiply_accumulate(sum[tile], high.z, high.w, now[step].pair(6), now[step].pair(7));
#endif
            }
        }
    }
};

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

__device__ __forceinline__ void add_and_store(const Task &task, const Matrix &matrix, int token, int row, float value) {
    const size_t place = static_cast<size_t>(token) * matrix.out_stride + row;
    if (matrix.residual != nullptr) {
        value += matrix.residual[place];
    }
    store(task, matrix, place, value);
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
                add_and_store(task, matrix, token, row, value);
            } else if (part == 0) {
                gate = value / (1.0f + expf(-value));
            } else {
                add_and_store(task, matrix, token, row, gate * value);
            }
        }
    }
}

// The products of one warp with one band.
template <class Weight, int kTiles, bool kAhead>
__device__ void multiply_band(VoltaTurns<Weight, kTiles, kAhead> &walk, const Task &task, const Matrix &matrix, int band,
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
            const int token = tile * kTokens + VoltaTurns<Weight, kTiles, kAhead>::token(lane, i);
            if (token < task.tokens) {
                partial[warp][token][VoltaTurns<Weight, kTiles, kAhead>::row(lane, i)] = sum[tile][i];
            }
        }
    }
}

template <class Weight, int kTiles, bool kAhead = kTiles == 1 && Weight::kBytes <= 16 && !Weight::kBlocks>
__device__ __forceinline__ void run(const Task &task, Items items) {
    Partial<kTiles> &partial = *reinterpret_cast<Partial<kTiles> *>(dynamic_shared());
    VoltaTurns<Weight, kTiles, kAhead> walk(task, items, dynamic_shared() + sizeof(Partial<kTiles>));
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

// Blocks that a multiprocessor should hold, by token tiles.
__device__ constexpr int blocks_a_sm(int tiles, bool wide) { return tiles == 3 ? (wide ? 1 : 2) : tiles == 2 || wide ? 2 : 3; }

#define LINEAR_KERNEL(name, call, blocks)                                                                              \
    extern "C" __global__ void __launch_bounds__(kWarps * 32, blocks) name(const __grid_constant__ Task task) {        \
        call(task, {static_cast<int>(blockIdx.x), task.items, static_cast<int>(gridDim.x)});                           \
    }
