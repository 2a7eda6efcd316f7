// Linears of more tokens than the decode kernel takes: each tile of weights is decoded once for up to 64 tokens.
//
// A tile of outputs is 256 rows for up to 64 tokens. A block has two groups of four warps; a warp takes two bands of the rows,
// and the groups take turns of 64 columns of K, whose tokens' values stand in shared memory for the group. Blocks that share
// rows (one for each 64 tokens) run side by side. What whole tiles leave over is cut along K into equal runs, one a block:
// their FP32 sums meet in memory, where `wide_sum` adds them in their order.
// So an output is a few chains of FP32 additions, in the order of K: its bits follow from its token, its matrix, the matrices
// of the launch, the number of token blocks and of blocks.
#pragma once
#include "half.cuh"
#include "linear_task.cuh"

namespace wide {

constexpr int kGroups = 2; // of a block's warps, parts of K
constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = 32 * kGroupWarps;
constexpr int kThreads = kGroups * kGroupThreads;
constexpr int kBands = 2; // of a warp
constexpr int kTileBands = kBands * kGroupWarps;
constexpr int kTileRows = kTileBands * kRows;
constexpr int kStepTiles = 4;                         // tiles of weights along K
constexpr int kStepBytes = kStepTiles * kColumns * 2; // of a token
constexpr int kChunks = kStepBytes / 16;
constexpr int kSlots = 2; // runs are shorter than a tile: they lie in two at most
constexpr int kSumTokens = 8; // of a block of wide_sum
constexpr float kLargest = 65504.0f;

// Where 16 bytes of a token's step lie among its 128: such that eight lanes that read one place of eight tokens, or places of
// four tiles for two tokens, meet all banks.
__device__ __forceinline__ int chunk_place(int token, int chunk) {
    return token * kStepBytes + (chunk ^ (token % kChunks)) * 16;
}

// Waits for the warps of the own group.
__device__ __forceinline__ void meet_group() {
    if (threadIdx.x < kGroupThreads) {
        meet<1>(kGroupThreads);
    } else {
        meet<2>(kGroupThreads);
    }
}

// Bands by number: those of all matrices one after another, or the gate and the up of a band in turn.
__device__ __forceinline__ int bands_of(const Task &task) { return task.epilogue == kSwiglu ? 2 * task.items : task.items; }

__device__ __forceinline__ const Matrix &matrix_at(const Task &task, int number, int &band) {
    return task.epilogue == kSwiglu ? matrix_of(task, number / 2, number % 2, band) : matrix_of(task, number, 0, band);
}

// How tiles of rows are shared by `workers` blocks (for each token block alike): `whole` each in turn, then the others cut
// into runs of turns (a step for each group), one a worker.
struct Shares {
    int workers, turns, whole, others;

    __device__ Shares(const Task &task, int workers) : workers(workers) {
        const int tiles = (bands_of(task) + kTileBands - 1) / kTileBands;
        turns = (task.groups + kGroups * kStepTiles - 1) / (kGroups * kStepTiles); // of a tile
        whole = tiles / workers;
        others = tiles - whole * workers;
    }

    __device__ int total() const { return others * turns; }
    __device__ int begin(int worker) const {
        return static_cast<int>(static_cast<long long>(worker) * total() / workers);
    }
    __device__ int owner(int turn) const { // the worker in whose run it lies
        return static_cast<int>((static_cast<long long>(turn + 1) * workers - 1) / total());
    }
};

// What a block does at a time: turns first .. end of a tile of rows; slot -1: all of them.
struct Part {
    int tile, first, end, slot;

    // Part number n of a worker; `first` == `end` if there is none.
    __device__ Part(const Shares &shares, int worker, int n) : slot(-1) {
        if (n < shares.whole) {
            tile = n * shares.workers + worker;
            first = 0;
            end = shares.turns;
            return;
        }
        slot = n - shares.whole;
        const int begin = shares.begin(worker), stop = shares.begin(worker + 1);
        const int other = begin / shares.turns + slot;
        tile = shares.whole * shares.workers + other;
        first = max(begin - other * shares.turns, 0);
        end = max(min(stop - other * shares.turns, shares.turns), first);
        if (slot >= kSlots || begin == stop) {
            end = first;
        }
    }
};

__device__ __forceinline__ void put(const Task &task, const Matrix &matrix, int token, int row, float value) {
    const size_t place = static_cast<size_t>(token) * matrix.out_stride + row;
    if (task.epilogue == kFloat) {
        write(static_cast<float *>(matrix.out) + place, value);
        return;
    }
    if (fabsf(value) > kLargest) {
        value = copysignf(kLargest, value);
        if (task.overflows != nullptr) {
            add(reinterpret_cast<int *>(task.overflows) + token, 1);
        }
    }
    write(static_cast<unsigned short *>(matrix.out) + place, static_cast<unsigned short>(half_bits(value)));
}

__device__ __forceinline__ float scale_of(const Matrix &matrix, int row) {
    return matrix.scale == nullptr ? 1.0f : __ldg(matrix.scale + row * matrix.scale_stride);
}

__device__ __forceinline__ float gated(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// The sums of a warp on their way out: eight tokens of its 64 rows, and padding against lanes that would meet in one bank.
constexpr int kOutPitch = kBands * kRows + 4;
constexpr int kOutFloats = kTokens * kOutPitch;
constexpr int kOutBytes = kGroups * kGroupWarps * kOutFloats * 4;

// What follows the sums of eight tokens (from `first_token` on) of 64 rows (of bands from `number` on): a warp's `rows`
// [8, kOutPitch] of the first group, and of the other one kGroupWarps * kOutFloats further. A warp of either group takes four
// of the tokens. Parts of a tile go to `partial` [tokens, 256] of this part, at the warp's own column.
__device__ __forceinline__ void hand_over(const Task &task, int number, float *partial, const float *rows, int first_token,
                                          int tile_token) {
    const int lane = threadIdx.x % 32, group = threadIdx.x / kGroupThreads;
    const bool pairs = partial == nullptr && task.epilogue == kSwiglu;
    for (int half = 0; half < (pairs ? 1 : kBands); ++half) {
        if (number + half >= bands_of(task)) {
            return;
        }
        int band;
        const Matrix &matrix = matrix_at(task, number + half, band);
        const int row = band * kRows + lane;
        const bool there = row < matrix.rows;
        const float scale = there && partial == nullptr ? scale_of(matrix, row) : 1.0f;
        const float up_scale = there && pairs ? scale_of(task.matrix[1], row) : 1.0f;
        for (int n = group * kTokens / kGroups; n < (group + 1) * kTokens / kGroups; ++n) {
            const int token = first_token + n;
            if (token >= task.tokens) {
                break;
            }
            const float *own = rows + n * kOutPitch + half * kRows + lane, *other = own + kGroupWarps * kOutFloats;
            const float value = *own + *other;
            if (partial != nullptr) {
                write(partial + (tile_token + n) * kTileRows + half * kRows + lane, value);
            } else if (there) {
                put(task, matrix, token, row, pairs ? gated(value * scale, (own[kRows] + other[kRows]) * up_scale) : value * scale);
            }
        }
    }
}

// Where the sums of a worker's slot for a token block lie: FP32 [width, 256] each.
__device__ __forceinline__ size_t partial_place(int worker, int slot, int token_blocks, int token_block, int width) {
    return ((static_cast<size_t>(worker) * kSlots + slot) * token_blocks + token_block) * width * kTileRows;
}

// Outputs of the tiles that were cut: a thread a row of kSumTokens tokens, whose parts it finds once. Grid: (tiles that were
// cut, runs of tokens), threads: 256.
__device__ __forceinline__ void add_up(const Task &task, const float *partial, int token_blocks, int workers, int width) {
    const Shares shares(task, workers);
    const int other = blockIdx.x, first_token = blockIdx.y * kSumTokens, column = threadIdx.x;
    const bool pairs = task.epilogue == kSwiglu;
    const int number = (shares.whole * workers + other) * kTileBands + column / kRows;
    if (number >= bands_of(task) || (pairs && number % 2)) {
        return;
    }
    int band;
    const Matrix &matrix = matrix_at(task, number, band);
    const int row = band * kRows + column % kRows;
    if (row >= matrix.rows) {
        return;
    }
    const int first = shares.owner(other * shares.turns), last = shares.owner((other + 1) * shares.turns - 1);
    float sum[kSumTokens] = {}, up[kSumTokens] = {};
    for (int worker = first; worker <= last; ++worker) {
        if (shares.begin(worker) == shares.begin(worker + 1)) {
            continue; // fewer turns than workers: this one has none
        }
        const int slot = shares.begin(worker) / shares.turns == other ? 0 : 1;
        const float *own = partial + partial_place(worker, slot, token_blocks, first_token / width, width) +
                           first_token % width * kTileRows + column;
#pragma unroll
        for (int n = 0; n < kSumTokens; ++n) { // of tokens beyond the last one there is nothing to read
            const bool there = first_token + n < task.tokens;
            sum[n] += there ? __ldg(own + n * kTileRows) : 0.0f;
            up[n] += there && pairs ? __ldg(own + n * kTileRows + kRows) : 0.0f;
        }
    }
    const float scale = scale_of(matrix, row), up_scale = pairs ? scale_of(task.matrix[1], row) : 1.0f;
#pragma unroll
    for (int n = 0; n < kSumTokens; ++n) {
        if (first_token + n < task.tokens) {
            const float value = sum[n] * scale;
            put(task, matrix, first_token + n, row, pairs ? gated(value, up[n] * up_scale) : value);
        }
    }
}

} // namespace wide
