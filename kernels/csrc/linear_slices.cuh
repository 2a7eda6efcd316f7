// The decode linear of nvfp4 for sm_80 and newer, up to eight tokens, whose warps own slices of K: a block a multiprocessor,
// sixteen warps, each with one sixteenth of the columns of every row of the block. Rows stream past the warps, sixteen at a step.
//
// A warp's way through a step is straight: offsets are immediates, and its activations stay in registers for the whole launch.
// It meets the other warps where sums are added alone, once a round of steps. Every block has an equal share: whole bands first,
// then a run of units of what is left over, 8 rows each, or 4 of gate and the same 4 of up.
//
// The bits of an output: a warp's products in the order of its columns, then the warps' sums in their order, for every grid and
// round; `Sliced` of linear.cuh makes the same chains for more tokens.
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

// Where a lane's copies of four tiles of a step come from and go to: 16 bytes of words, which are two rows of a tile, and, of
// sixteen lanes, the scales of four rows.
template <class Weight> struct SliceCopies {
    static constexpr int kTileHeld = kHalfRows * Weight::kBytes; // of a tile in shared memory
    static constexpr int kWordsHeld = kFour * kTileHeld;
    static constexpr int kFourHeld = kWordsHeld + kFour * kHalfRows;
    static constexpr int kTileBytes = kRows * Weight::kBytes; // of a tile in memory
    static_assert(Weight::kBytes == 8 && Weight::kGroupScales, "nvfp4");

    const Task &task;
    const Share &share;
    int lane, own_words, own_scales;    // of a lane's copies in a band
    int to, scales_to;                  // and in the ring
    const unsigned char *words, *scales; // in the step that was found
    int wanted, scales_wanted;          // whether there are such: -1, or 0

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
        } else if (!share.paired) {
            words += kTileHeld;
            scales += kHalfRows;
        } else if (sub == 2) { // gate, up, and the same of the other half
            words += task.matrix[0].words + kTileHeld - task.matrix[1].words;
            scales += task.matrix[0].group_scales + kHalfRows - task.matrix[1].group_scales;
        } else {
            words += task.matrix[1].words - task.matrix[0].words;
            scales += task.matrix[1].group_scales - task.matrix[0].group_scales;
        }
    }

    __device__ void find_band(int step) {
        int band;
        const Matrix &matrix = matrix_of(task, share.band_of(step), 0, band);
        const long long tile = static_cast<long long>(band) * task.groups;
        words = matrix.words + tile * kTileBytes + own_words;
        scales = matrix.group_scales + tile * kRows + own_scales;
        wanted = -1;
        scales_wanted = -(lane < 4 * kFour);
    }

    // A step of what is left over, or none.
    __device__ void find_left(int step) {
        wanted = scales_wanted = 0;
        if (step >= share.steps) {
            return;
        }
        const int rows = share.halved(step) ? kHalfRows / 2 : kHalfRows;
        int part, band, held = lane % 8 * 2;
        if (held < rows) {
            const int row = share.left_row_of(step, held, part);
            const Matrix &matrix = matrix_of(task, row / kRows, part, band);
            words = matrix.words + static_cast<long long>(band) * task.groups * kTileBytes +
                    (own_words + (row % kRows - held) * Weight::kBytes);
            wanted = -1;
        }
        held = lane % 4 * 4;
        if (lane < 4 * kFour && held < rows) {
            const int row = share.left_row_of(step, held, part);
            const Matrix &matrix = matrix_of(task, row / kRows, part, band);
            scales = matrix.group_scales + static_cast<long long>(band) * task.groups * kRows + (own_scales + row % kRows - held);
            scales_wanted = -1;
        }
    }

    // Asks for four tiles, number kNumber of the slice; `there`: -1, or 0 for none.
    template <int kNumber> __device__ void load(SharedAddress filled, int there) const {
#ifndef ABLATE_LOADS
        copy_once_if<0, kNumber * kFour * kTileBytes>(wanted & there, filled + to, words);
        copy_few_if<0, kNumber * kFour * kRows>(scales_wanted & there, filled + scales_to, scales);
#endif
        commit_copies(); // an empty group, too: the count of groups is kept
    }
};

// The products with four tiles of a ring. A product takes four columns of each: lane (g, q) = (lane / 4, lane % 4) holds tile q
// for token g and for rows 2g and 2g + 1, or row g of eight (kHalved).
template <class Weight> struct SliceProducts {
    using Copies = SliceCopies<Weight>;
    int from, scales_from, single, single_scale; // of two rows; of one

    __device__ void settle(int lane) {
        const int g = lane / 4, q = lane % 4;
        from = opaque(q * Copies::kTileHeld + (g ^ 2 * q) * 16);
        scales_from = opaque(Copies::kWordsHeld + q * kHalfRows + 2 * g);
        single = q * Copies::kTileHeld + (g / 2 ^ 2 * q) * 16 + g % 2 * 8;
        single_scale = Copies::kWordsHeld + q * kHalfRows + g;
    }

    template <bool kHalved> __device__ void multiply(float (&sum)[4], SharedAddress tiles, const uint4 (&x)[2]) const {
        Weight upper, lower;
        if constexpr (kHalved) {
            Weight::take_one(tiles + single, tiles + single_scale, upper);
        } else {
            Weight::take_two(tiles + from, tiles + scales_from, upper, lower);
        }
#ifdef ABLATE_ARITHMETIC
        sum[0] += __int_as_float(upper.mix() ^ (kHalved ? 0 : lower.mix()) ^ x[0].x ^ x[1].y);
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
            const uint4 &part = x[j / 2];
            multiply_16x8(sum, a0, a1, a2, a3, j % 2 ? part.z : part.x, j % 2 ? part.w : part.y);
        }
#endif
    }

    // Row of sum[i] in a step.
    template <bool kHalved> __device__ static int row(int lane, int i) { return kHalved ? lane / 4 : lane / 4 * 2 + i / 2; }
};

// One warp's way. kFours: of the longest slice; others have one less. The ring of a warp holds a step; kAhead fours of it, one less at
// the most, are under way: more would have to wait for room on their way, and the first products behind them.
template <class Weight, int kFours, int kAhead> struct SliceTurns {
    using Copies = SliceCopies<Weight>;
    using Products = SliceProducts<Weight>;
    static constexpr int kRing = kFours * Copies::kFourHeld;
    static constexpr int kFourX = kFour * 2 * kColumns; // bytes of a token's activations in four tiles
    static_assert(kAhead < kFours, "the four tiles at work have a place of their own");

    Copies copies;
    Products products;
    const SharedAddress ring;
    const int last;     // -1 if this warp's slice has kFours
    uint4 x[kFours][2]; // lane (g, q): token g's columns of tile q of each four

    __device__ SliceTurns(const Task &task, const Share &share, unsigned char *shared)
        : copies(task, share, slice_begin(task, threadIdx.x / 32) * kFour), ring(shared_address(shared + threadIdx.x / 32 * kRing)),
          last(-(slice_fours(task, threadIdx.x / 32) == kFours)) {
        copies.find(0);
        load_first<0>();
        copies.settle();
        products.settle(copies.lane);
    }

    template <int four> __device__ void load_first() {
        if constexpr (four < kAhead) {
            load<four>();
            load_first<four + 1>();
        }
    }

    template <int four> __device__ void load() {
        copies.template load<four>(ring + four * Copies::kFourHeld, four < kFours - 1 ? -1 : last);
    }

    // Reads the activations, once what was before has ended.
    __device__ void begin() {
#ifndef ABLATE_LOADS
        const Task &task = copies.task;
        const int column_tile = slice_begin(task, threadIdx.x / 32) * kFour + copies.lane % 4;
        read_from<0>(reinterpret_cast<const unsigned char *>(task.x) +
                     static_cast<long long>(copies.lane / 4 * task.groups + column_tile) * 2 * kColumns);
#endif
    }

    template <int four> __device__ void read_from(const unsigned char *own) {
        if constexpr (four < kFours) {
            // Of a token that is not there any numbers will do: they stay in its own column of the sums.
            const bool there = copies.lane / 4 < copies.task.tokens && (four < kFours - 1 || last);
            x[four][0] = read_fresh_if<four * kFourX>(there, own);
            x[four][1] = read_fresh_if<four * kFourX + 16>(there, own);
            read_from<four + 1>(own);
        }
    }

    // Adds the products of the warp's slice with the rows of a step, from four tiles number `four` on.
    template <bool kHalved, int four = 0> __device__ void multiply(float (&sum)[4], int step) {
        if constexpr (four < kFours) {
            wait_copies<kAhead - 1>();
            __syncwarp(); // the copies of the other lanes, too; and all have read the four tiles before
            if (four + kAhead == kFours) {
                copies.find(step + 1);
            }
            load<(four + kAhead) % kFours>();
            if (four < kFours - 1 || last) {
                products.template multiply<kHalved>(sum, ring + four * Copies::kFourHeld, x[four]);
            }
            multiply<kHalved, four + 1>(sum, step);
        }
    }
};
