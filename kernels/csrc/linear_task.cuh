// What a launch of the decode linear is asked to do (kernels/linear.py holds the same structures), and a warp's way
// through it.
#pragma once

constexpr int kRows = 32;    // rows of a band: the lanes of a warp
constexpr int kHalfRows = 16; // rows of half a band: of one tensor-core product on sm_80 and newer
constexpr int kColumns = 16; // columns of a tile: one nvfp4 group
constexpr int kTokens = 8;   // tokens of one tensor-core product
constexpr int kWarps = 8;    // of an item, parts of K: they fix the order of additions, and so the bits
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

struct Task {
    const unsigned short *x; // fp16 [tokens, 16 * groups]
    unsigned *overflows;     // counts fp16 outputs cut off at +-65504, or null
    int tokens;
    int groups;
    int items; // bands, or pairs of bands for SwiGLU: gate of matrix 0, up of matrix 1; twice as many of 16 rows
    int matrices;
    int epilogue;
    int rows; // of an item: 32, or 16, half a band each, where the code can (sm_80 and newer)
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

// The turns of one warp through its block's bands, in order: kTurn tiles each. Loads walk it ahead of the products, across
// bands too.
template <int kTurn> struct Walk {
    const Task &task;
    const Items items;
    int item, part, turn;

    __device__ Walk(const Task &task, Items items)
        : task(task), items(items), item(items.first), part(0), turn(static_cast<int>(threadIdx.x / 32)) {
        if (turn >= turns()) {
            item = items.end; // a warp without work
        }
    }

    __device__ int turns() const { return (task.groups + kTurn - 1) / kTurn; }
    __device__ bool done() const { return item >= items.end; }

    // True if another band begins, which `first` is the warp's first turn of. `single`: an item has one.
    __device__ bool next(int first, bool single) {
        turn += kWarps;
        if (turn < turns()) {
            return false;
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
