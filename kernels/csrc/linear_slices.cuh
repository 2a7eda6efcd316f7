// The decode linear of nvfp4 for sm_80 and newer, up to eight tokens, whose warps own slices of K: a block a multiprocessor,
// sixteen warps, each with one sixteenth of the columns of every row of the block. Rows stream past the warps, a band at a step.
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

constexpr int kSumPitch = kHalfRows + 1; // floats of a token's sums of sixteen rows: against lanes that would meet in one bank

// A block's items: whole bands, or gate and up of one, then units.
struct Share {
    int whole, units, first_unit, left_row; // left_row: of the launch, where what is left over of whole bands begins
    bool paired;

    __device__ Share() {}
    __device__ explicit Share(const Task &task) {
        const int block = blockIdx.x;
        paired = task.epilogue == kSwiglu;
        whole = task.cut.bands;
        units = task.cut.units + (block < task.cut.more);
        first_unit = block * task.cut.units + (block < task.cut.more ? block : task.cut.more);
        left_row = task.cut.bands * gridDim.x * kRows;
    }

    __device__ int steps() const { return paired ? 2 : 1; }      // of a whole item
    __device__ int unit_rows() const { return paired ? 4 : 8; } // outputs of a unit
    __device__ int band_of(int item) const { return blockIdx.x + item * gridDim.x; }

    // Row `held` of a unit's eight: the row of the launch, and gate or up.
    __device__ int unit_row(int unit, int held, int &part) const {
        part = paired ? held / 4 : 0;
        return left_row + (first_unit + unit) * unit_rows() + (paired ? held % 4 : held);
    }
};

enum Wanted { kNothing, kBand, kUnitOfRows };

// One warp's way. kFours: of the longest slice; others have one less. The ring of a warp holds a step; kAhead fours of it are under way:
// more would have to wait for room on their way, and the products behind them. A band's tiles stand in it as in memory, with their scales
// where they spread the banks: lane (g, q) = (lane / 4, lane % 4) multiplies tile q of each four, for token g and for rows 2g, 2g + 1, 2g + 16
// and 2g + 17. Of a unit a lane copies and multiplies one row of its tile.
template <class Weight, int kFours, int kAhead> struct SliceTurns {
    static_assert(Weight::kBytes == 8 && Weight::kGroupScales, "nvfp4");
    static_assert(kAhead < kFours, "the four tiles at work have a place of their own");
    static constexpr int kTileWords = kRows * Weight::kBytes, kTile = kTileWords + kRows;
    static constexpr int kStage = kFour * kTile, kShared = kFours * kStage; // of a warp
    static constexpr int kFourWords = kFour * kTileWords, kFourScales = kFour * kRows, kFourX = kFour * 2 * kColumns;
    static_assert(kStage >= 32 * 12, "a unit's four tiles");

    const Task &task;
    Share share;
    const unsigned char *words, *scales; // of this lane's copies, of what is asked for next
    Wanted kind;    // of it
    int item, part; // that comes after it
    int first;      // tile of the slice
    bool all;       // the slice has kFours
    SharedAddress to, scales_to, unit_to, unit_scales_to, from, scales_from;
    unsigned unit_byte, next_byte; // of a unit's scale in its word: of the step at work, and of what is asked for next
    uint4 x[kFours][2];

    __device__ SliceTurns(const Task &task, unsigned char *shared) : task(task), item(0), part(0) {
        const unsigned lane = threadIdx.x % 32, slice = uniform(threadIdx.x / 32), g = lane / 4, q = lane % 4;
        const unsigned groups = task.groups, each = groups / (kFour * kSlices), more = groups / kFour % kSlices;
        first = (slice * each + (slice < more ? slice : more)) * kFour;
        all = each + (slice < more) == kFours;
        // Not from `slice`: of an address in a uniform register ptxas 12.9 makes a copy that no card can execute.
        const SharedAddress ring = shared_address(shared + threadIdx.x / 32 * kShared);
        to = ring + lane / 16 * kTile + lane % 16 * 16;
        scales_to = ring + lane / 8 * kTile + kTileWords + lane % 8 * 4;
        unit_to = ring + lane * 8;
        unit_scales_to = ring + 32 * 8 + lane * 4;
        // What comes first is mostly known without a search: the sooner it is asked for, the better.
        const bool paired = task.epilogue == kSwiglu, known = task.cut.bands > 0 && (paired || task.matrices == 1);
        if (known) {
            const Matrix &matrix = task.matrix[0];
            const unsigned long long tile = static_cast<unsigned long long>(blockIdx.x) * groups + static_cast<unsigned>(first);
            words = matrix.words + tile * kTileWords + lane * 16;
            scales = matrix.group_scales + tile * kRows + lane * 4;
            kind = kBand;
            ask_first<0, true>();
            part = paired;
            item = !paired;
        }
        share = Share(task);
        if (!known) {
            find();
            ask_first<0, false>();
        }
        to = opaque(to);
        scales_to = opaque(scales_to);
        unit_to = opaque(unit_to);
        unit_scales_to = opaque(unit_scales_to);
        from = opaque(ring + q * kTile + g * 16);
        scales_from = opaque(ring + q * kTile + kTileWords + 2 * g);
    }
    template <int four, bool kBandOnly> __device__ void ask_first() {
        if constexpr (four < kAhead) {
            ask<four, kBandOnly>();
            ask_first<four + 1, kBandOnly>();
        }
    }
    // Goes to the next step, which may be none.
    __device__ void find() {
        const unsigned lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
        int band;
        kind = item < share.whole ? kBand : item < share.whole + share.units ? kUnitOfRows : kNothing;
        if (kind == kBand) {
            const Matrix &matrix = matrix_of(task, share.band_of(item), part, band);
            const long long tile = static_cast<long long>(band) * task.groups + first;
            words = matrix.words + tile * kTileWords + lane * 16;
            scales = matrix.group_scales + tile * kRows + lane * 4;
        } else if (kind == kUnitOfRows) {
            int own;
            const int row = share.unit_row(item - share.whole, g, own);
            const Matrix &matrix = matrix_of(task, row / kRows, own, band);
            const long long tile = static_cast<long long>(band) * task.groups + first;
            words = matrix.words + tile * kTileWords + (q * kTileWords + row % kRows * 8);
            scales = matrix.group_scales + tile * kRows + (q * kRows + row % kRows / 4 * 4);
            next_byte = row % 4 * 8;
        }
        if (share.paired && part == 0 && kind == kBand) {
            part = 1;
        } else {
            part = 0;
            ++item;
        }
    }
    // Asks for four tiles, number `four` of the slice; kBandOnly: of a band, without a look at `kind`.
    template <int four, bool kBandOnly = false> __device__ void ask() {
#ifndef ABLATE_LOADS
        constexpr int kSlot = four * kStage;
        if (four < kFours - 1 || all) {
            if (kBandOnly || kind == kBand) {
                copy_once<kSlot, four * kFourWords>(to, words);
                copy_once<kSlot + 2 * kTile, four * kFourWords + 2 * kTileWords>(to, words);
                copy_few<4, kSlot, four * kFourScales>(scales_to, scales);
            } else if (kind == kUnitOfRows) {
                copy_few<8, kSlot, four * kFourWords>(unit_to, words);
                copy_few<4, kSlot, four * kFourScales>(unit_scales_to, scales);
            }
        }
#endif
        commit_copies(); // an empty group, too: the count of groups is kept
    }
    // Reads the activations, once what was before has ended.
    __device__ void begin() {
#ifndef ABLATE_LOADS
        const int lane = threadIdx.x % 32;
        read_x<0>(-(lane / 4 < task.tokens), reinterpret_cast<const unsigned char *>(task.x) +
                                                 static_cast<long long>(lane / 4 * task.groups + first + lane % 4) * 2 * kColumns);
#endif
    }
    template <int four> __device__ void read_x(int wanted, const unsigned char *own) {
        if constexpr (four < kFours) { // of a token that is not there any numbers will do: they stay in its own column of the sums
            if (four < kFours - 1 || all) {
                x[four][0] = read_fresh_if<four * kFourX>(wanted, own);
                x[four][1] = read_fresh_if<four * kFourX + 16>(wanted, own);
            }
            read_x<four + 1>(wanted, own);
        }
    }
    // Adds the products of the warp's slice with the upper and the lower sixteen rows of a band, or with the eight of a unit.
    template <bool kUnit, int four = 0> __device__ void multiply(float (&upper)[4], float (&lower)[4]) {
        if constexpr (four < kFours) {
            constexpr int kSlot = four * kStage;
            if (four == 0) {
                unit_byte = next_byte;
            }
            wait_copies<kAhead - 1>();
            __syncwarp(); // the copies of the other lanes, too; and all have read the four tiles before
            if (four == (kFours - kAhead)) {
                find();
            }
            ask<(four + kAhead) % kFours>();
            Weight rows[4];
            if (four < kFours - 1 || all) {
                if (kUnit) {
                    const unsigned scale = shared_4(unit_scales_to + kSlot) >> unit_byte & 0xFF;
                    Weight::one(shared_8(unit_to + kSlot), scale, rows[0]);
                } else {
                    const uint4 upper_words = shared_16(from + kSlot), lower_words = shared_16(from + (kSlot + kHalfRows * 8));
                    const unsigned upper_scales = shared_2(scales_from + kSlot), lower_scales = shared_2(scales_from + (kSlot + kHalfRows));
                    Weight::split(upper_words, upper_scales, rows[0], rows[1]);
                    Weight::split(lower_words, lower_scales, rows[2], rows[3]);
                }
            }
            if (four < kFours - 1 || all) {
#pragma unroll
                for (int row = 0; row < (kUnit ? 1 : 4); ++row) {
                    rows[row].prepare();
                }
#ifdef ABLATE_ARITHMETIC
                upper[0] += __int_as_float(rows[0].mix() ^ x[four][0].x ^ x[four][1].y);
                lower[0] += __int_as_float(kUnit ? 0 : rows[1].mix() ^ rows[2].mix() ^ rows[3].mix());
#else
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint4 &own = x[four][j / 2];
                    const unsigned b0 = j % 2 ? own.z : own.x, b1 = j % 2 ? own.w : own.y;
                    unsigned a0, a1, a2, a3;
                    rows[0].quarter(j, a0, a2);
                    if (kUnit) {
                        multiply_8x8(upper, a0, a2, b0, b1);
                    } else {
                        rows[1].quarter(j, a1, a3);
                        multiply_16x8(upper, a0, a1, a2, a3, b0, b1);
                        rows[2].quarter(j, a0, a2);
                        rows[3].quarter(j, a1, a3);
                        multiply_16x8(lower, a0, a1, a2, a3, b0, b1);
                    }
                }
#endif
            }
            multiply<kUnit, four + 1>(upper, lower);
        }
    }
};
