// The decode linear for sm_80 and newer whose warps own slices of K: a block a multiprocessor, sixteen warps, each with one
// sixteenth of the columns of every row of the block. Rows stream past the warps, sixteen at a step.
//
// A warp's way through a step is straight: offsets are immediates, and its activations stay in registers for the whole launch
// (SlicesKept), or are read again for every sixteen rows (SlicesRead). It meets the other warps where sums are added alone, once
// a round of steps. Every block has an equal share: whole bands first, then a run of units of what is left over, 8 rows each,
// or 4 of gate and the same 4 of up.
//
// The bits of an output: a warp's products in the order of its columns, then the warps' sums in their order, for every T, grid,
// ring and round.
#pragma once
#include "ampere.cuh"
#include "linear_task.cuh"

constexpr int kSumPitch = kHalfRows + 1; // floats of a token's sums in a step: against lanes that would meet in one bank

// A block's rows of a launch, in steps of sixteen.
struct Share {
    int first_unit, units, left_row; // left_row: of the launch, where what is left over of whole bands begins
    int whole_steps, steps;
    int shift;                       // steps of a band: two, or four with those of gate and up in turn, as a power of two
    bool paired;

    __device__ explicit Share(const Task &task) {
        const int block = blockIdx.x;
        paired = task.epilogue == kSwiglu;
        shift = paired ? 2 : 1;
        units = task.cut.units + (block < task.cut.more);
        first_unit = block * task.cut.units + (block < task.cut.more ? block : task.cut.more);
        left_row = task.cut.bands * gridDim.x * kRows;
        whole_steps = task.cut.bands << shift;
        steps = whole_steps + (units + 1) / 2;
    }

    __device__ bool halved(int step) const { return step == steps - 1 && units % 2; } // one unit, in the upper eight rows

    // A step of a whole band.
    __device__ int band_of(int step) const { return blockIdx.x + (step >> shift) * gridDim.x; }

    // Row `held` of a later step: the row of the launch, and gate or up.
    __device__ int left_row_of(int step, int held, int &part) const {
        const int unit = first_unit + (step - whole_steps) * 2;
        if (paired) {
            const int rows = halved(step) ? 4 : 8;
            part = held / rows;
            return left_row + unit * 4 + held % rows;
        }
        part = 0;
        return left_row + unit * 8 + held;
    }
};

// Where a lane's copies of four tiles of a step come from and go to.
template <class Weight> struct SliceCopies {
    static constexpr int kRuns = Weight::kBytes / 8;              // copies of 16 bytes a lane
    static constexpr int kTileHeld = kHalfRows * Weight::kBytes;  // of a tile in shared memory
    static constexpr int kWordsHeld = kFour * kTileHeld;
    static constexpr int kFourHeld = kWordsHeld + (Weight::kGroupScales ? kFour * kHalfRows : 0);
    static constexpr int kTileBytes = kRows * Weight::kBytes;     // of a tile in memory
    static constexpr int kChunkRows = 16 / Weight::kBytes;        // rows in 16 bytes

    const Task &task;
    const Share &share;
    int lane, own_words, own_scales;            // of a lane's copies in a band
    int to, scales_to;                          // and in the ring
    const unsigned char *words[kRuns], *scales; // in the step that was found
    int wanted[kRuns], scales_wanted;           // whether there are such: -1, or 0

    __device__ SliceCopies(const Task &task, const Share &share, int first_tile)
        : task(task), share(share), lane(kept(threadIdx.x % 32)) {
        // Sixteen bytes of a tile stand where lanes that read four tiles at once meet all banks.
        const int tile = lane / 8;
        own_words = (first_tile + tile) * kTileBytes + lane % 8 * 16;
        own_scales = (first_tile + lane / 4) * kRows + lane % 4 * 4;
        to = tile * kTileHeld + (lane % 8 ^ 2 * tile) * 16;
        scales_to = kWordsHeld + lane * 4;
    }

    // Keeps the offsets in registers, once the first copies are on their way.
    __device__ void settle() {
        own_words = opaque(own_words);
        own_scales = opaque(own_scales);
        to = opaque(to);
        scales_to = opaque(scales_to);
    }

    // Goes to a step, which follows the one before, or is the first.
    __device__ void find(int step) {
        if (step >= share.whole_steps) {
            find_left(step);
            return;
        }
        const int sub = step & ((1 << share.shift) - 1);
        if (sub == 0) {
            find_band(step);
            return;
        }
#ifdef PAIR_APART
        if (share.paired && sub == 2) { // gate, up, and the same of the other half
            words[0] += task.matrix[0].words + kTileHeld - task.matrix[1].words;
            scales += task.matrix[0].group_scales + kHalfRows - task.matrix[1].group_scales;
        } else if (share.paired) {
            words[0] += task.matrix[1].words - task.matrix[0].words;
            scales += task.matrix[1].group_scales - task.matrix[0].group_scales;
        } else {
            words[0] += kTileHeld;
            scales += kHalfRows;
        }
#pragma unroll
        for (int run = 1; run < kRuns; ++run) {
            words[run] = words[0] + run * 128;
        }
#else
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            words[run] += share.paired ? kTileHeld / 2 : kTileHeld;
        }
        scales += share.paired ? kHalfRows / 2 : kHalfRows;
#endif
    }

    __device__ void find_band(int step) {
        const int launched = share.band_of(step);
        int band;
        const Matrix &matrix = matrix_of(task, launched, 0, band);
        const long long tile = static_cast<long long>(band) * task.groups;
#ifdef PAIR_APART
        const Matrix &up = matrix;
        const int words_up = 0, scales_up = 0;
#else
        const Matrix &up = share.paired ? task.matrix[1] : matrix; // eight rows of gate, and the same of up
        const int words_up = share.paired ? 8 * Weight::kBytes : 0, scales_up = share.paired ? 8 : 0;
#endif
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            const bool lower = lane % 8 * kChunkRows + run * 8 >= 8;
            words[run] = (lower ? up : matrix).words + tile * kTileBytes + (own_words + run * 128 - (lower ? words_up : 0));
            wanted[run] = -1;
        }
        const bool lower = lane % 4 >= 2;
        scales = (lower ? up : matrix).group_scales + tile * kRows + (own_scales - (lower ? scales_up : 0));
        scales_wanted = -(lane < 4 * kFour);
    }

    // A step of what is left over, or none.
    __device__ void find_left(int step) {
        const bool none = step >= share.steps;
#pragma unroll
        for (int run = 0; none && run < kRuns; ++run) {
            wanted[run] = 0;
        }
        if (none) {
            scales_wanted = 0;
            return;
        }
        const int rows = share.halved(step) ? kHalfRows / 2 : kHalfRows;
        int part, band;
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            const int held = lane % 8 * kChunkRows + run * 8;
            wanted[run] = -(held < rows);
            if (wanted[run]) {
                const int row = share.left_row_of(step, held, part);
                const Matrix &matrix = matrix_of(task, row / kRows, part, band);
                words[run] = matrix.words + static_cast<long long>(band) * task.groups * kTileBytes +
                             (own_words + (row % kRows - lane % 8 * kChunkRows) * Weight::kBytes);
            }
        }
        const int held = lane % 4 * 4;
        scales_wanted = -(Weight::kGroupScales && lane < 4 * kFour && held < rows);
        if (scales_wanted) {
            const int row = share.left_row_of(step, held, part);
            const Matrix &matrix = matrix_of(task, row / kRows, part, band);
            scales = matrix.group_scales + static_cast<long long>(band) * task.groups * kRows + (own_scales + row % kRows - held);
        }
    }

    // Asks for four tiles, number kNumber of the slice; `there`: -1, or 0 for none.
    template <int kNumber> __device__ void load(SharedAddress filled, int there) const {
#ifndef ABLATE_LOADS
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            copy_once_if<0, kNumber * kFour * kTileBytes>(wanted[run] & there, filled + (to + run * 128), words[run]);
        }
        if (Weight::kGroupScales) {
            copy_few_if<0, kNumber * kFour * kRows>(scales_wanted & there, filled + scales_to, scales);
        }
#endif
        commit_copies(); // an empty group, too: the count of groups is kept
    }

    // `count` times four tiles on, where a loop counts them; back again before the next step is looked for.
    __device__ void go_on(int count) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) {
            words[run] += count * (kFour * kTileBytes);
        }
        scales += count * (kFour * kRows);
    }
};

// The products with four tiles of a ring. A product takes four columns of each: lane (g, q) = (lane / 4, lane % 4) holds tile q
// for token g and for two rows. kHalved: eight rows.
template <class Weight, int kTiles> struct SliceProducts {
    using Copies = SliceCopies<Weight>;
    int from, scales_from, single, single_scale; // of this lane's rows; of its row of eight

    __device__ void settle(int lane) {
        const int g = lane / 4, q = lane % 4;
        from = opaque(q * Copies::kTileHeld + (g ^ 2 * q) * 16);
        scales_from = opaque(Copies::kWordsHeld + q * kHalfRows + 2 * g);
        single = q * Copies::kTileHeld + (g / 2 ^ 2 * q) * 16 + g % 2 * 8;
        single_scale = Copies::kWordsHeld + q * kHalfRows + g;
    }

    template <bool kHalved>
    __device__ void multiply(float (&sum)[kTiles][4], SharedAddress tiles, const uint4 (&x)[kTiles][2]) const {
        Weight upper, lower;
        if constexpr (Weight::kGroupScales && kHalved) {
            Weight::take_one(tiles + single, tiles + single_scale, upper);
        } else if constexpr (Weight::kGroupScales) {
            Weight::take_two(tiles + from, tiles + scales_from, upper, lower);
        } else {
            upper = Weight::template take<kHalfRows>(tiles + from);
            if (!kHalved) {
                lower = Weight::template take<kHalfRows>(tiles + from + 128);
            }
        }
#ifdef ABLATE_ARITHMETIC
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            sum[tile][0] += __int_as_float(upper.mix() ^ (kHalved ? 0 : lower.mix()) ^ x[tile][0].x ^ x[tile][1].y);
        }
#else
        upper.prepare();
        if (!kHalved) {
            lower.prepare();
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            unsigned a0, a1 = 0, a2, a3 = 0;
            upper.quarter(j, a0, a2);
            if (!kHalved) {
                lower.quarter(j, a1, a3);
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const uint4 &part = x[tile][j / 2];
                multiply_16x8(sum[tile], a0, a1, a2, a3, j % 2 ? part.z : part.x, j % 2 ? part.w : part.y);
            }
        }
#endif
    }

    // Row of sum[.][i] in a step.
    template <bool kHalved> __device__ static int row(int lane, int i) {
        const int g = lane / 4, lower = i / 2;
        return kHalved ? g : Weight::kGroupScales ? 2 * g + lower : 8 * lower + g;
    }
};
