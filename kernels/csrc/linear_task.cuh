// What a launch of the decode linear is asked to do (kernels/linear.py holds the same structures), and a warp's way
// through it.
#pragma once

constexpr int kRows = 32;    // rows of a band: the lanes of a warp
constexpr int kHalfRows = 16; // rows of half a band: of one tensor-core product on sm_80 and newer
constexpr int kColumns = 16; // columns of a tile: one nvfp4 group
constexpr int kTokens = 8;   // tokens of one tensor-core product
constexpr int kWarps = 8;    // of an item
constexpr int kSlices = 16;  // of K, where a matrix goes in slices (linear_slices.cuh)
constexpr int kFour = 4;     // tiles of a product; slices are dealt in fours
constexpr int kMatrices = 8; // of one launch

enum Encoding { kNvfp4, kFp8, kFp8Blocks, kHalf };
// What the items of a kernel are: bands; bands, or sixteen rows of gate and the same of up; halves of bands.
enum Form { kWhole, kPaired, kHalved };
enum Epilogue { kFloat, kHalfOut, kSwiglu };

struct Matrix {
    const unsigned char *words;        // tiles [bands, groups, 32 lanes, bytes]
    const unsigned char *group_scales; // nvfp4: E4M3 [bands, groups, 32]
    const float *block_scales;         // fp8 blocks: FP32 [ceil(bands / block_bands), block_columns]
    const float *scale;                // FP32, one number (scale_stride 0) or one a row (1)
    const float *residual;             // FP32, laid out as `out`, or null
    void *out;                         // [tokens, rows], a token every out_stride elements
    int rows;                          // of out; the last band may have fewer than 32
    int first_band;                    // of this matrix in the launch
    int scale_stride;
    int out_stride;
    int encoding;
    int block_bands; // fp8 blocks: extents in bands and turns, and blocks in a row
    int block_turns;
    int block_columns;
};

// Of a launch in slices of K (linear_slices.cuh): whole bands of every block, units of what is left over, blocks that have one more,
// and slots for the sums of a block between two barriers: sixteen rows of a band have one, and so has a unit.
struct Cut {
    int bands, units, more, round;
};

struct Task {
    const unsigned short *x; // fp16 [tokens, 16 * groups]
    unsigned *overflows;     // counts fp16 outputs cut off at +-65504, or null
    int tokens;
    int groups;
    int items; // bands, or pairs of bands for SwiGLU: gate of matrix 0, up of matrix 1; twice as many of 16 rows
    int matrices;
    int epilogue;
    int rows; // of an item: 32, or 16, half a band each, where the code can (sm_80 and newer)
    Cut cut;
    Matrix matrix[kMatrices];
};

// The matrix and its band behind an item; `part` chooses gate (0) or up (1) for SwiGLU.
__device__ __forceinline__ const Matrix &matrix_of(const Task &task, int item, int part, int &band) {
    int index = part;
    if (task.epilogue != kSwiglu) {
        while (index + 1 < task.matrices && item >= task.matrix[index + 1].first_band) {
            ++index;
        }
    }
    band = task.epilogue == kSwiglu ? item : item - task.matrix[index].first_band;
    return task.matrix[index];
}

// Items of a block: every step-th from first to end.
struct Items {
    int first, end, step;
};

// Slices of K: contiguous, of as many fours each as possible; the first ones have one more.
__device__ __forceinline__ int slice_fours(const Task &task, int slice) {
    const int fours = task.groups / kFour;
    return fours / kSlices + (slice < fours % kSlices);
}
__device__ __forceinline__ int slice_begin(const Task &task, int slice) { // its first four
    const int fours = task.groups / kFour, more = fours % kSlices;
    return fours / kSlices * slice + (slice < more ? slice : more);
}

// The turns of one warp through its block's bands, in order: kTurn tiles each. Loads walk it ahead of the products, across
// bands too. A band's sums are one chain of products a warp, of every kWarps-th turn; kSliced: one a slice, which a warp has
// two of; turns are then counted in fours, and the last of a slice may be cut short.
template <int kTurn, bool kSliced = false> struct Walk {
    static constexpr int kChains = kSliced ? kSlices : kWarps;
    const Task &task;
    const Items items;
    int item, part, turn;
    int end; // of the slice, if kSliced

    __device__ Walk(const Task &task, Items items)
        : task(task), items(items), item(items.first), part(0), turn(first_turn(static_cast<int>(threadIdx.x / 32))) {
        end = kSliced ? last_turn(static_cast<int>(threadIdx.x / 32)) : 0;
        if (turn >= (kSliced ? end : turns())) {
            item = items.end; // a warp without work
        }
    }

    __device__ int turns() const { return (task.groups + kTurn - 1) / kTurn; }
    __device__ bool done() const { return item >= items.end; }

    // Turns of a chain: every kStride-th.
    static constexpr int kStride = kSliced ? kTurn / kFour : kWarps;
    static constexpr int kUnit = kSliced ? kFour : kTurn; // tiles that a turn's number counts
    __device__ int first_turn(int chain) const { return kSliced ? slice_begin(task, chain) : chain; }
    __device__ int last_turn(int chain) const { return kSliced ? slice_begin(task, chain) + slice_fours(task, chain) : turns(); }

    // True if another band begins, which `first` is the warp's first turn of. `single`: an item has one.
    __device__ bool next(int first, bool single) {
        turn += kStride;
        if (!kSliced) {
            if (turn < turns()) {
                return false;
            }
        } else if (turn < end) {
            return false;
        } else {
            const int warp = threadIdx.x / 32, second = last_turn(warp + kWarps);
            if (end != second) {
                turn = first_turn(warp + kWarps);
                end = second;
                return false;
            }
            end = last_turn(warp);
        }
        turn = first;
        if (single || part == 1) {
            item += items.step;
            part = 0;
        } else {
            part = 1;
        }
        return true;
    }
};
