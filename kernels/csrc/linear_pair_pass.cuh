// Gate and up of nvfp4 in one pass, for sm_80 and newer and up to eight tokens: a block a multiprocessor has two bands of gate and the
// same two of up, and most of them a unit of what is left over, a few rows of gate and the same of up. Its sixteen warps own a sixteenth
// of K each, which passes by once, four tiles of columns of all rows at a time: what is left over needs no step of its own behind the others.
//
// The bits of an output are those of linear_slices.cuh: a slice's products in the order of its columns, then the slices' sums.
#pragma once
#include "ampere.cuh"
#include "linear_task.cuh"

constexpr int kPairs = 2;           // pairs of bands of a block
constexpr int kPairBands = 2 * kPairs; // gate, up, gate, up
constexpr int kPairRows = kPairBands * kRows + 8;
constexpr int kPairPitch = kPairRows + 1; // floats of a token's sums: against lanes that would meet in one bank

// One warp's way through its slice. A ring of four places, a band's four tiles each, three of which are under way; scales come with the
// first of each four bands, those of the next four to the place of the last but one. kOutputs: of a unit, each a row of gate and of up.
template <class Weight, int kOutputs, int kAhead> struct PairPass {
    static_assert(Weight::kBytes == 8 && Weight::kGroupScales, "nvfp4");
    static_assert(kOutputs == 2 || kOutputs == 4, "whole pieces of 16 bytes, and at most eight rows");
    static_assert(kAhead == 2 || kAhead == 3, "the tiles at work have a place of their own");
    static constexpr int kTileWords = kRows * Weight::kBytes, kTile = kTileWords + 32; // apart so as to spread the banks
    static constexpr int kPlace = kFour * kTile, kScales = kPairBands * kPlace, kScalesBytes = kPairBands * kFour * kRows;
    static constexpr int kUnitTile = 96, kUnit = kScales + 2 * kScalesBytes;
    static constexpr int kShared = kUnit + kFour * kUnitTile; // of a warp
    static constexpr int kFourWords = kFour * kTileWords, kFourScales = kFour * kRows, kFourX = kFour * 2 * kColumns;

    const Task &task;
    const unsigned char *words[kPairBands]; // of this lane's copies
    const unsigned char *scales, *rest;     // of all four bands; of the unit, words or scales
    const unsigned char *x_from;            // of this lane's tile of its token
    int count;                              // fours of the slice
    SharedAddress to, scales_to, rest_to, from, scales_from, unit_from, unit_scale_from;
    int rest_step, x_wanted, flip; // flip: from the scales at work to the next ones'
    bool has_unit, copies_rest;
    float sum[kPairBands][2][4] = {}, unit[4] = {};

    __device__ PairPass(const Task &task, unsigned char *shared) : task(task) {
        const unsigned lane = threadIdx.x % 32, slice = uniform(threadIdx.x / 32), block = blockIdx.x;
        const unsigned groups = task.groups, each = groups / (kFour * kSlices), more = groups / kFour % kSlices;
        const unsigned first = (slice * each + (slice < more ? slice : more)) * kFour;
        count = each + (slice < more);
        // Not from `slice`: of an address in a uniform register ptxas 12.9 makes a copy that no card can execute.
        const SharedAddress ring = shared_address(shared + threadIdx.x / 32 * kShared);
        to = ring + lane / 16 * kTile + lane % 16 * 16;
        const unsigned long long tile = static_cast<unsigned long long>(block) * groups + first;
        const unsigned long long apart = static_cast<unsigned long long>(gridDim.x) * groups; // from one pair to the next
        words[0] = task.matrix[0].words + tile * kTileWords + lane * 16;
        ask_words<0, 0>(); // as soon as can be: what follows has its time while they come
        words[1] = task.matrix[1].words + tile * kTileWords + lane * 16;
        const unsigned band = lane / 8;
        scales = (band % 2 ? task.matrix[1] : task.matrix[0]).group_scales + (tile + (band / 2 ? apart : 0)) * kRows + lane % 8 * 16;
        scales_to = ring + kScales + lane * 16;
        ask_scales();
        commit_copies();
        ask_words<1, 0>();
        commit_copies();
        words[2] = words[0] + apart * kTileWords;
        if (kAhead > 2) {
            ask_words<2, 0>();
            commit_copies();
        }
        words[3] = words[1] + apart * kTileWords;
        const unsigned g = lane / 4, q = lane % 4;
        // A unit: of each tile 8 bytes a row of gate, then of up, and the 16 scales among which its rows' are, of both.
        has_unit = block < task.cut.more;
        constexpr unsigned kPieces = kOutputs / 2; // of 16 bytes, of a tile's gate or up
        const bool of_words = lane < kFour * 2 * kPieces;
        copies_rest = has_unit && lane < kFour * 2 * (kPieces + 1);
        const unsigned own = of_words ? lane / kPieces : lane - kFour * 2 * kPieces, piece = lane % kPieces; // tile and part
        const unsigned row = block * kOutputs, in_band = row % kRows;
        const unsigned long long unit_tile = static_cast<unsigned long long>(kPairs * gridDim.x + row / kRows) * groups + first;
        const Matrix &matrix = own % 2 ? task.matrix[1] : task.matrix[0];
        rest = copies_rest ? of_words ? matrix.words + (unit_tile + own / 2) * kTileWords + in_band * Weight::kBytes + piece * 16
                                      : matrix.group_scales + (unit_tile + own / 2 % kFour) * kRows + in_band / 16 * 16
                           : words[0];
        rest_to = ring + kUnit + own / 2 % kFour * kUnitTile + (of_words ? (own % 2 * kPieces + piece) * 16 : 64 + own % 2 * 16);
        rest_step = opaque(of_words ? kFourWords : kFourScales);
        to = opaque(to);
        scales_to = opaque(scales_to + kScalesBytes);
        flip = opaque(kScalesBytes);
        rest_to = opaque(rest_to);
        from = opaque(ring + q * kTile + g * 16);
        scales_from = opaque(ring + kScales + q * kRows + 2 * g);
        const unsigned held = g % (2 * kOutputs);
        unit_from = opaque(ring + kUnit + q * kUnitTile + held * Weight::kBytes);
        unit_scale_from = opaque(ring + kUnit + q * kUnitTile + 64 + held / kOutputs * 16 + in_band % 16 + held % kOutputs);
        x_wanted = opaque(-(g < task.tokens));
        x_from = reinterpret_cast<const unsigned char *>(task.x) + static_cast<unsigned long long>(g * groups + first + q) * 2 * kColumns;
    }

    // Asks for the four tiles of a band, `ahead` fours on.
    template <int band, int ahead> __device__ void ask_words() {
#ifndef ABLATE_LOADS
        copy_once<band * kPlace, ahead * kFourWords>(to, words[band]);
        copy_once<band * kPlace + 2 * kTile, ahead * kFourWords + 2 * kTileWords>(to, words[band]);
#endif
    }
    __device__ void ask_scales() {
#ifndef ABLATE_LOADS
        copy_once<0, 0>(scales_to, scales);
#endif
    }
    __device__ void ask_rest() {
#ifndef ABLATE_LOADS
        if (has_unit) {
            copy_once_if(copies_rest, rest_to, rest);
            rest += rest_step;
        }
#endif
    }

    __device__ void ask_x(uint4 (&x)[2], bool there) const {
#ifndef ABLATE_LOADS
        x[0] = read_fresh_if<0>(x_wanted && there, x_from);
        x[1] = read_fresh_if<16>(x_wanted && there, x_from);
#endif
    }

    __device__ void run() {
        uint4 x[2], next[2];
        ask_x(x, true);
#pragma unroll 1
        for (int left = count; left > 0; --left) {
            const bool more = left > 1;
            x_from += kFourX;
            ask_x(next, more);
            four(x, more);
            x[0] = next[0];
            x[1] = next[1];
        }
    }

    // Four tiles of columns of all rows; `more`: others follow.
    __device__ void four(const uint4 (&x)[2], bool more) {
        pass_band<0>(x, more);
        pass_band<1>(x, more);
        pass_band<2>(x, more);
        pass_band<3>(x, more);
        if (has_unit) {
            multiply_unit(x);
        }
#pragma unroll
        for (int band = 0; band < kPairBands; ++band) {
            words[band] += kFourWords;
        }
        scales_from += flip;
        scales_to -= flip;
        flip = -flip;
    }

    template <int band> __device__ void pass_band(const uint4 (&x)[2], bool more) {
        constexpr int kNext = band + kAhead; // is asked for
        wait_copies<kAhead - 1>();
        __syncwarp(); // the copies of the other lanes, too; and all have read the tiles before
        if constexpr (kNext < kPairBands) {
            ask_words<kNext, 0>();
            if (kNext == kPairBands - 1) {
                ask_rest();
            }
        } else if (more) {
            ask_words<kNext - kPairBands, 1>();
            if (kNext == kPairBands) {
                scales += kFourScales;
                ask_scales();
            }
        }
        commit_copies(); // an empty group, too: the count of groups is kept
        multiply_band<band>(x);
    }

    template <int band> __device__ void multiply_band(const uint4 (&x)[2]) {
        constexpr int kWordsAt = band * kPlace, kScalesAt = band * kFourScales;
        const uint4 upper_words = shared_16(from + kWordsAt);
        const unsigned upper_scales = shared_2(scales_from + kScalesAt);
        const uint4 lower_words = shared_16(from + (kWordsAt + kHalfRows * Weight::kBytes));
        const unsigned lower_scales = shared_2(scales_from + (kScalesAt + kHalfRows));
#ifdef ABLATE_ARITHMETIC
        sum[band][0][0] += __int_as_float(upper_words.x ^ upper_words.y ^ upper_words.z ^ upper_words.w ^ upper_scales ^ x[0].x ^ x[1].y);
        sum[band][1][0] += __int_as_float(lower_words.x ^ lower_words.y ^ lower_words.z ^ lower_words.w ^ lower_scales);
#else
        Weight rows[4];
        Weight::split(upper_words, upper_scales, rows[0], rows[1]);
        Weight::split(lower_words, lower_scales, rows[2], rows[3]);
#pragma unroll
        for (int row = 0; row < 4; ++row) {
            rows[row].prepare();
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned b0 = j % 2 ? x[j / 2].z : x[j / 2].x, b1 = j % 2 ? x[j / 2].w : x[j / 2].y;
            unsigned a0, a1, a2, a3;
            rows[0].quarter(j, a0, a2);
            rows[1].quarter(j, a1, a3);
            multiply_16x8(sum[band][0], a0, a1, a2, a3, b0, b1);
            rows[2].quarter(j, a0, a2);
            rows[3].quarter(j, a1, a3);
            multiply_16x8(sum[band][1], a0, a1, a2, a3, b0, b1);
        }
#endif
    }

    __device__ void multiply_unit(const uint4 (&x)[2]) {
        const uint2 words = shared_8(unit_from);
        const unsigned scale = shared_1(unit_scale_from);
#ifdef ABLATE_ARITHMETIC
        unit[0] += __int_as_float(words.x ^ words.y ^ scale);
#else
        Weight row;
        Weight::one(words, scale, row);
        row.prepare();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned b0 = j % 2 ? x[j / 2].z : x[j / 2].x, b1 = j % 2 ? x[j / 2].w : x[j / 2].y;
            unsigned a0, a2;
            row.quarter(j, a0, a2);
            multiply_8x8(unit, a0, a2, b0, b1);
        }
#endif
    }

    // The sums of a warp: [tokens, kPairPitch].
    __device__ void put(float *sums) const {
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = 2 * q + i % 2;
            if (token < task.tokens) {
                float *const own = sums + token * kPairPitch;
#pragma unroll
                for (int band = 0; band < kPairBands; ++band) {
                    own[band * kRows + 2 * g + i / 2] = sum[band][0][i];
                    own[band * kRows + kHalfRows + 2 * g + i / 2] = sum[band][1][i];
                }
                if (i < 2) {
                    own[kPairBands * kRows + g] = unit[i];
                }
            }
        }
    }
};

// One output of a block, and what else it is made of.
template <int kOutputs> struct PairOutput {
    static constexpr int kHeld = kPairs * kRows + kOutputs; // of a token
    int token, row, place, up_place; // place: among the sums of a token
    bool wanted;
    float scale = 0.0f, up_scale = 0.0f;

    __device__ PairOutput(const Task &task, bool has_unit, int index) {
        token = index / kHeld;
        const int held = index % kHeld, block = blockIdx.x, beyond = held - kPairs * kRows;
        const bool of_unit = beyond >= 0;
        wanted = token < task.tokens && (!of_unit || has_unit);
        row = of_unit ? kPairs * gridDim.x * kRows + block * kOutputs + beyond : (held / kRows * gridDim.x + block) * kRows + held % kRows;
        place = of_unit ? kPairBands * kRows + beyond : held / kRows * 2 * kRows + held % kRows;
        up_place = place + (of_unit ? kOutputs : kRows);
        if (wanted) {
            scale = __ldg(task.matrix[0].scale + row * task.matrix[0].scale_stride);
            up_scale = __ldg(task.matrix[1].scale + row * task.matrix[1].scale_stride);
        }
    }
};

// Dynamic shared memory: the rings of all warps, which become the sums' place.
template <class Weight, int kOutputs, int kAhead> __device__ __forceinline__ void run_pair_pass(const Task &task) {
    using Own = PairPass<Weight, kOutputs, kAhead>;
    Own way(task, dynamic_shared());
    take_over(); // weights are on their way; what else is read, the launch before may have written
    PairOutput<kOutputs> output(task, way.has_unit, threadIdx.x); // scales come while the weights do
    way.run();
    constexpr int kPart = Own::kShared / 4; // floats from a warp's sums to the next one's
    static_assert(kPart >= kTokens * kPairPitch, "a warp's sums take the place of its ring");
    float *const sums = reinterpret_cast<float *>(dynamic_shared());
    __syncwarp(); // all have read the ring
    way.put(sums + threadIdx.x / 32 * kPart);
    __syncthreads();
    for (int index = threadIdx.x; index < task.tokens * output.kHeld; index += blockDim.x) {
        if (index >= static_cast<int>(blockDim.x)) {
            output = PairOutput<kOutputs>(task, way.has_unit, index);
        }
        if (output.wanted) {
            const float *const parts = sums + output.token * kPairPitch;
            float opened = parts[output.place], raised = parts[output.up_place];
#pragma unroll
            for (int part = 1; part < kSlices; ++part) {
                opened += parts[part * kPart + output.place];
                raised += parts[part * kPart + output.up_place];
            }
            const float gate = opened * Weight::kUnit * output.scale;
            raised = raised * Weight::kUnit * output.up_scale;
            store(task, task.matrix[1], output.token, output.row, silu(gate) * raised, 0.0f);
        }
    }
}
