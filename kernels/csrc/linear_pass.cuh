// The decode linear of nvfp4 in one pass, for sm_80 and newer and up to eight tokens: a block a multiprocessor has one band of a
// matrix, and some of them a unit of eight rows of what is left over. Its sixteen warps own a sixteenth of K each, which passes by once:
// activations are read once, code is short, and all rows of a block share what a step costs beside its products.
//
// The bits of an output are those of linear_slices.cuh: a slice's products in the order of its columns, then the slices' sums.
#pragma once
#include "ampere.cuh"
#include "linear_task.cuh"

constexpr int kUnitRows = 8;
constexpr int kPassRows = kRows + kUnitRows; // of a block
constexpr int kPassPitch = kPassRows + 1;    // floats of a token's sums: against lanes that would meet in one bank

// One warp's way through its slice: a ring of kRing fours of tiles in shared memory, all but one of them
// under way.
template <class Weight, int kRing> struct Pass {
    static_assert(Weight::kBytes == 8 && Weight::kGroupScales, "nvfp4");
    static constexpr int kTileWords = kRows * Weight::kBytes, kTile = kTileWords + kRows; // the scales stand where they spread the banks
    static constexpr int kUnitTile = 96;                                                  // of which 80 are filled
    static constexpr int kUnit = kFour * kTile, kStage = kUnit + kFour * kUnitTile;
    static constexpr int kShared = kRing * kStage; // of a warp
    static constexpr int kFourX = kFour * 2 * kColumns; // bytes of a token's activations

    const Task &task;
    const unsigned char *words, *rest; // of this lane's copies: the band's words; its scales, the unit's words or its scales
    const unsigned char *x_from;       // of this lane's tile of its token
    int count;                         // fours of the slice
    SharedAddress to, rest_to;         // of this lane's copies in the ring
    int rest_step, x_wanted;
    SharedAddress from, scales_from, unit_from, unit_scale_from; // of what this lane multiplies
    bool has_unit;
    uint4 x[kRing][2];
    float upper[4] = {}, lower[4] = {}, unit[4] = {};

    __device__ Pass(const Task &task, unsigned char *shared) : task(task) {
        const unsigned lane = threadIdx.x % 32, slice = uniform(threadIdx.x / 32), block = blockIdx.x;
        const unsigned groups = task.groups, each = groups / (kFour * kSlices), more = groups / kFour % kSlices;
        const unsigned first = (slice * each + (slice < more ? slice : more)) * kFour;
        const Matrix &matrix = task.matrix[0];
        count = each + (slice < more);
        // Not from `slice`: of an address in a uniform register ptxas 12.9 makes a copy that no card can execute.
        const SharedAddress ring = shared_address(shared + threadIdx.x / 32 * kShared);
        const unsigned long long tile = static_cast<unsigned long long>(block) * groups + first;
        words = matrix.words + tile * kTileWords + lane * 16;
        to = ring + lane / 16 * kTile + lane % 16 * 16;
        ask_words<0>(); // as soon as can be: what follows has its time while they come
        has_unit = block < task.cut.more;
        // A block without a unit copies rows of its band in its place: a copy costs less than to ask whether it is wanted.
        const unsigned unit_place = block % 4 * kUnitRows; // in its band
        const unsigned long long unit_tile = static_cast<unsigned long long>(has_unit ? gridDim.x + block / 4 : block) * groups + first;
        const bool in_words = lane >= 8 && lane < 24;
        const unsigned own = lane % 8, piece = lane - 8; // the last four lanes copy what nobody reads
        rest_to = ring + (in_words   ? kUnit + piece / 4 * kUnitTile + piece % 4 * 16
                          : lane < 8 ? own / 2 * kTile + kTileWords + own % 2 * 16
                                     : kUnit + own % 4 * kUnitTile + 64 + own / 4 * 16);
        rest = in_words ? matrix.words + unit_tile * kTileWords + (piece / 4 * kTileWords + unit_place * Weight::kBytes + piece % 4 * 16)
                        : matrix.group_scales + (lane < 8 ? tile : unit_tile) * kRows +
                              (lane < 8 ? own * 16 : own % 4 * kRows + unit_place / 16 * 16);
        rest_step = in_words ? kFour * kTileWords : kFour * kRows;
        ask_rest<0>();
        commit_copies();
        ask_first<1>();
        to = opaque(to);
        rest_to = opaque(rest_to);
        rest_step = opaque(rest_step);
        const int g = lane / 4, q = lane % 4;
        from = opaque(ring + q * kTile + g * 16);
        scales_from = opaque(ring + q * kTile + kTileWords + 2 * g);
        unit_from = opaque(ring + kUnit + q * kUnitTile + g * Weight::kBytes);
        unit_scale_from = opaque(ring + kUnit + q * kUnitTile + 64 + unit_place % 16 + g);
        x_wanted = opaque(-(g < task.tokens));
        x_from = reinterpret_cast<const unsigned char *>(task.x) + static_cast<unsigned long long>(g * groups + first + q) * 2 * kColumns;
    }

    // A slice has kRing fours at least, or one less.
    template <int i> __device__ void ask_first() {
        if constexpr (i < kRing - 1) {
            ask<i>();
            commit_copies();
            ask_first<i + 1>();
        }
    }

    // Asks for four number i behind the one that `words` points to.
    template <int i> __device__ void ask() {
        ask_words<i>();
        ask_rest<i>();
    }
    template <int i> __device__ void ask_words() {
#ifndef ABLATE_LOADS
        constexpr int kSlot = i % kRing * kStage;
        copy_once<kSlot, i * kFour * kTileWords>(to, words);
        copy_once<kSlot + 2 * kTile, (i * kFour + 2) * kTileWords>(to, words);
#endif
    }
    template <int i> __device__ void ask_rest() {
#ifndef ABLATE_LOADS
        copy_once<i % kRing * kStage, 0>(rest_to, rest);
        rest += rest_step;
#endif
    }

    template <int i> __device__ void ask_x() {
#ifndef ABLATE_LOADS
        x[i % kRing][0] = read_fresh_if<i * kFourX>(x_wanted, x_from);
        x[i % kRing][1] = read_fresh_if<i * kFourX + 16>(x_wanted, x_from);
#endif
    }

    // Reads the first activations, once what was before has ended.
    template <int i = 0> __device__ void begin() {
        if constexpr (i < kRing) {
            if (i < kRing - 1 || i < count) {
                ask_x<i>();
            }
            begin<i + 1>();
        }
    }

    __device__ void run() {
#pragma unroll 1
        for (int base = 0; base < count; base += kRing) {
            some<0>(base);
            words += kRing * kFour * kTileWords;
            x_from += kRing * kFourX;
        }
    }

    template <int i> __device__ void some(int base) {
        if constexpr (i < kRing) {
            if (base + i < count) {
                constexpr int kSlot = i * kStage;
                wait_copies<kRing - 2>();
                __syncwarp(); // the copies of the other lanes, too; and all have read the four tiles before
                if (base + i + kRing - 1 < count) {
                    ask<kRing - 1 + i>();
                }
                commit_copies(); // an empty group, too: the count of groups is kept
                const uint4 upper_words = shared_16(from + kSlot);
                const unsigned upper_scales = shared_2(scales_from + kSlot);
                const uint4 lower_words = shared_16(from + (kSlot + kHalfRows * Weight::kBytes));
                const unsigned lower_scales = shared_2(scales_from + (kSlot + kHalfRows));
                const uint2 unit_words = shared_8(unit_from + kSlot);
                const unsigned unit_scale = shared_1(unit_scale_from + kSlot);
                multiply(upper_words, upper_scales, lower_words, lower_scales, unit_words, unit_scale, x[i]);
                if (base + i + kRing < count) {
                    ask_x<kRing + i>();
                }
                some<i + 1>(base);
            }
        }
    }

    __device__ void multiply(const uint4 &upper_words, unsigned upper_scales, const uint4 &lower_words, unsigned lower_scales,
                             const uint2 &unit_words, unsigned unit_scale, const uint4 (&own)[2]) {
#ifdef ABLATE_ARITHMETIC
        upper[0] += __int_as_float(upper_words.x ^ upper_words.y ^ upper_words.z ^ upper_words.w ^ upper_scales ^ own[0].x ^ own[1].y);
        lower[0] += __int_as_float(lower_words.x ^ lower_words.y ^ lower_words.z ^ lower_words.w ^ lower_scales);
        unit[0] += __int_as_float(unit_words.x ^ unit_words.y ^ unit_scale);
#else
        Weight rows[5];
        Weight::split(upper_words, upper_scales, rows[0], rows[1]);
        Weight::split(lower_words, lower_scales, rows[2], rows[3]);
        Weight::one(unit_words, unit_scale, rows[4]);
#pragma unroll
        for (int row = 0; row < 5; ++row) {
            rows[row].prepare();
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint4 &part = own[j / 2];
            const unsigned b0 = j % 2 ? part.z : part.x, b1 = j % 2 ? part.w : part.y;
            unsigned a0, a1, a2, a3;
            rows[0].quarter(j, a0, a2);
            rows[1].quarter(j, a1, a3);
            multiply_16x8(upper, a0, a1, a2, a3, b0, b1);
            rows[2].quarter(j, a0, a2);
            rows[3].quarter(j, a1, a3);
            multiply_16x8(lower, a0, a1, a2, a3, b0, b1);
            rows[4].quarter(j, a0, a2);
            multiply_8x8(unit, a0, a2, b0, b1);
        }
#endif
    }

    // The sums of a warp: [tokens, kPassPitch].
    __device__ void put(float *sums) const {
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 2 * q + i % 2;
            if (token < task.tokens) {
                float *const own = sums + token * kPassPitch;
                own[2 * g + i / 2] = upper[i];
                own[kHalfRows + 2 * g + i / 2] = lower[i];
                if (i < 2) {
                    own[kRows + g] = unit[i];
                }
            }
        }
    }
};

// Dynamic shared memory: the rings of all warps, which become the sums' place.
template <class Weight, int kRing> __device__ __forceinline__ void run_pass(const Task &task) {
    using Own = Pass<Weight, kRing>;
    Own way(task, dynamic_shared());
    take_over(); // weights are on their way; what else is read, the launch before may have written
    way.begin();
    const Matrix &matrix = task.matrix[0];
    const int token = threadIdx.x / kPassRows, held = threadIdx.x % kPassRows;
    const bool wanted = token < task.tokens && (held < kRows || way.has_unit);
    const int row = held < kRows ? blockIdx.x * kRows + held : gridDim.x * kRows + blockIdx.x * kUnitRows + held - kRows;
    float scale = 0.0f, residual = 0.0f; // asked for early: they come while the weights do
    if (wanted) {
        scale = __ldg(matrix.scale + row * matrix.scale_stride);
        if (matrix.residual != nullptr) {
            residual = matrix.residual[place_of(matrix, token, row)];
        }
    }
    way.run();
    constexpr int kPart = Own::kShared / 4; // floats from a warp's sums to the next one's
    static_assert(kPart >= kTokens * kPassPitch, "a warp's sums take the place of its ring");
    float *const sums = reinterpret_cast<float *>(dynamic_shared());
    __syncwarp(); // all have read the ring
    way.put(sums + threadIdx.x / 32 * kPart);
    __syncthreads();
    if (wanted) {
        const float *const parts = sums + token * kPassPitch + held;
        float sum = parts[0];
#pragma unroll
        for (int part = 1; part < kSlices; ++part) {
            sum += parts[part * kPart];
        }
        store(task, matrix, token, row, sum * Weight::kUnit * scale, residual);
    }
}
