// Gate and up of nvfp4 in one pass, for sm_80 and newer and up to eight tokens: a block a multiprocessor has two bands of gate and the
// same two of up, and most of them a unit of what is left over, two rows of gate and the same of up. Its sixteen warps own a sixteenth of
// K each, which passes by once, four tiles of columns of all rows at a time: what is left over needs no step of its own behind the others.
//
// The bits of an output are those of linear_slices.cuh: a slice's products in the order of its columns, then the slices' sums.
#pragma once
#include "ampere.cuh"
#include "linear_task.cuh"

constexpr int kPairs = 2;               // pairs of bands of a block
constexpr int kPairBands = 2 * kPairs;  // gate, up, gate, up
constexpr int kUnitOutputs = 2;         // of a unit, each a row of gate and of up
constexpr int kPairUnit = 2 * kUnitOutputs; // its rows
constexpr int kPairOutputs = kPairs * kRows + kUnitOutputs; // of a block and token
constexpr int kPairPitch = kPairBands * kRows + kPairUnit + 1; // floats of a token's sums: against lanes that would meet in one bank

// One warp's way through its slice. A ring of four places, a band's four tiles each, two of which are under way; scales come with the first
// of each four bands, those of the next four to the other of two places, and a unit's tiles with the second.
template <class Weight> struct PairPass {
    static_assert(Weight::kBytes == 8 && Weight::kGroupScales, "nvfp4");
    static constexpr int kTileWords = kRows * Weight::kBytes, kTile = kTileWords + 32; // apart so as to spread the banks
    static constexpr int kPlace = kFour * kTile, kScales = kPairBands * kPlace, kScalesBytes = kPairBands * kFour * kRows;
    static constexpr int kUnitTile = 64, kUnit = kScales + 2 * kScalesBytes; // 16 bytes of gate, 16 of up, scales of both likewise
    static constexpr int kShared = kUnit + kFour * kUnitTile;                // of a warp
    static constexpr int kPart = kShared / 4; // floats from a warp's sums to the next one's
    static_assert(kPart >= kTokens * kPairPitch, "a warp's sums take the place of its ring");
    static constexpr int kFourWords = kFour * kTileWords, kFourScales = kFour * kRows, kFourX = kFour * 2 * kColumns;

    const Task &task;
    const unsigned char *words[kPairBands]; // of this lane's copies
    const unsigned char *scales;            // of all four bands
    const unsigned char *rest = nullptr;    // of the unit, words or scales
    const unsigned char *x_from;            // of this lane's tile of its token
    int count;                              // fours of the slice
    SharedAddress to, scales_to, rest_to = 0, from, scales_from, unit_from, unit_scale_from;
    int rest_step = 0, x_wanted, flip; // flip: from the scales at work to the next ones'
    bool has_unit, copies_rest = false;
    uint4 x[2];
    float sum[kPairBands][2][4] = {}, unit[4] = {};

    __device__ PairPass(const Task &task, unsigned char *shared) : task(task) {
        const unsigned lane = threadIdx.x % 32, slice = threadIdx.x / 32, block = blockIdx.x;
        const unsigned groups = task.groups, each = groups / (kFour * kSlices), more = groups / kFour % kSlices;
        const unsigned first = (slice * each + (slice < more ? slice : more)) * kFour;
        const SharedAddress ring = shared_address(shared + slice * kShared);
        to = ring + lane / 16 * kTile + lane % 16 * 16;
        // What comes first is asked for as soon as can be: what follows has its time while it comes. A matrix has less than 4 GB.
        const unsigned tile = block * groups + first, apart = gridDim.x * groups; // from one pair to the next
        words[0] = task.matrix[0].words + (tile * kTileWords + lane * 16);
        ask_words<0, 0>();
        const unsigned band = lane / 8, scale_at = (tile + (band >= 2 ? apart : 0)) * kRows + lane % 8 * 16;
        scales = (band % 2 ? task.matrix[1] : task.matrix[0]).group_scales + scale_at;
        scales_to = ring + kScales + lane * 16;
        ask_scales();
        commit_copies();
        words[1] = task.matrix[1].words + (tile * kTileWords + lane * 16);
        ask_words<1, 0>();
        has_unit = block < task.cut.more;
        const unsigned row = block * kUnitOutputs, in_band = row % kRows; // the unit's first, of what is left over
        if (has_unit) { // a branch: the compiler would put what follows before the copies
            const bool of_words = lane < 2 * kFour;
            const unsigned tile_of = lane / 2 % kFour, part = lane % 2; // part: gate or up
            const unsigned at = (kPairs * gridDim.x + row / kRows) * groups + first + tile_of;
            const Matrix &matrix = part ? task.matrix[1] : task.matrix[0];
            rest = of_words ? matrix.words + (at * kTileWords + in_band * Weight::kBytes)
                            : matrix.group_scales + (at * kRows + in_band / 16 * 16);
            rest_to = ring + kUnit + tile_of * kUnitTile + (of_words ? 0 : 32) + part * 16;
            rest_step = of_words ? kFourWords : kFourScales;
            copies_rest = lane < 4 * kFour;
        }
        ask_rest();
        commit_copies();
        words[2] = words[0] + apart * kTileWords;
        words[3] = words[1] + apart * kTileWords;
        const unsigned g = lane / 4, q = lane % 4;
        x_wanted = opaque(-(g < task.tokens));
        x_from = reinterpret_cast<const unsigned char *>(task.x) + (g * groups + first + q) * 2 * kColumns;
        count = each + (slice < more);
        to = opaque(to);
        scales_to = opaque(scales_to + kScalesBytes);
        flip = opaque(kScalesBytes);
        from = opaque(ring + q * kTile + g * 16);
        scales_from = opaque(ring + kScales + q * kRows + 2 * g);
        const unsigned held = g % kPairUnit; // the other lanes multiply the same rows
        unit_from = opaque(ring + kUnit + q * kUnitTile + held * Weight::kBytes);
        unit_scale_from = opaque(ring + kUnit + q * kUnitTile + 32 + held / kUnitOutputs * 16 + in_band % 16 + held % kUnitOutputs);
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

    __device__ void ask_x(uint4 (&part)[2], bool there) const {
#ifndef ABLATE_LOADS
        part[0] = read_fresh_if<0>(x_wanted && there, x_from);
        part[1] = read_fresh_if<16>(x_wanted && there, x_from);
#endif
    }

    // Reads the first activations, once what was before has ended.
    __device__ void begin() { ask_x(x, true); }

    __device__ void run() {
        uint4 next[2];
#pragma unroll 1
        for (int left = count; left > 0; --left) {
            const bool more = left > 1;
            x_from += kFourX;
            ask_x(next, more);
            four(more);
            x[0] = next[0];
            x[1] = next[1];
        }
    }

    // Four tiles of columns of all rows; `more`: others follow.
    __device__ void four(bool more) {
        pass_band<0>(more);
        pass_band<1>(more);
        pass_band<2>(more);
        pass_band<3>(more);
#pragma unroll
        for (int band = 0; band < kPairBands; ++band) {
            words[band] += kFourWords;
        }
        scales_from += flip;
        scales_to -= flip;
        flip = -flip;
    }

    template <int band> __device__ void pass_band(bool more) {
        constexpr int kNext = band + 2; // is asked for
        wait_copies<1>();
        __syncwarp(); // the copies of the other lanes, too; and all have read the tiles before
        if constexpr (kNext < kPairBands) {
            ask_words<kNext, 0>();
        } else if (more) {
            ask_words<kNext - kPairBands, 1>();
            if (kNext == kPairBands) {
                scales += kFourScales;
                ask_scales();
            } else {
                ask_rest();
            }
        }
        commit_copies(); // an empty group, too: the count of groups is kept
        multiply_band<band>();
        if (band == 1 && has_unit) { // not last: what follows the last bytes is what a launch waits for
            multiply_unit();
        }
    }

    template <int band> __device__ void multiply_band() {
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

    __device__ void multiply_unit() {
        const uint2 codes = shared_8(unit_from);
        const unsigned scale = shared_1(unit_scale_from);
#ifdef ABLATE_ARITHMETIC
        unit[0] += __int_as_float(codes.x ^ codes.y ^ scale);
#else
        Weight row;
        Weight::one(codes, scale, row);
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
                if (i < 2 && g < kPairUnit) {
                    own[kPairBands * kRows + g] = unit[i];
                }
            }
        }
    }
};

// One output of a block, and what else it is made of; asked for before the products are there.
struct PairOutput {
    const float *parts, *up_parts; // sums of the first slice
    unsigned short *out;
    bool wanted;
    float scale = 0.0f, up_scale = 0.0f;

    __device__ PairOutput(const Task &task, bool has_unit, const float *sums, int index) {
        const int token = index / kPairOutputs, held = index % kPairOutputs, block = blockIdx.x, in_unit = held - kPairs * kRows;
        const int pair = held / kRows, in_band = held % kRows;
        const bool of_unit = in_unit >= 0;
        wanted = token < task.tokens && (!of_unit || has_unit);
        const int row = of_unit ? kPairs * gridDim.x * kRows + block * kUnitOutputs + in_unit : (pair * gridDim.x + block) * kRows + in_band;
        parts = sums + token * kPairPitch + (of_unit ? kPairBands * kRows + in_unit : pair * 2 * kRows + in_band);
        up_parts = parts + (of_unit ? kUnitOutputs : kRows);
        const Matrix &gate = task.matrix[0], &up = task.matrix[1];
        out = static_cast<unsigned short *>(up.out) + place_of(up, token, row);
        if (wanted) {
            scale = __ldg(gate.scale + row * gate.scale_stride);
            up_scale = __ldg(up.scale + row * up.scale_stride);
        }
    }

    // kPart: floats from a slice's sums to the next one's.
    template <class Weight, int kPart> __device__ __forceinline__ void finish(const Task &task) const {
        if (wanted) {
            float opened = parts[0], raised = up_parts[0];
#pragma unroll
            for (int part = 1; part < kSlices; ++part) {
                opened += parts[part * kPart];
                raised += up_parts[part * kPart];
            }
            const float gate = opened * Weight::kUnit * scale;
            *out = saturated(silu(gate) * (raised * Weight::kUnit * up_scale), task.overflows);
        }
    }
};

// Dynamic shared memory: the rings of all warps, which become the sums' place.
template <class Weight> __device__ __forceinline__ void run_pair_pass(const Task &task) {
    using Own = PairPass<Weight>;
    Own way(task, dynamic_shared());
    take_over(); // weights are on their way; what else is read, the launch before may have written
    way.begin();
    float *const sums = reinterpret_cast<float *>(dynamic_shared());
    const PairOutput output(task, way.has_unit, sums, threadIdx.x);
    way.run();
    __syncwarp(); // all have read the ring
    way.put(sums + threadIdx.x / 32 * Own::kPart);
    __syncthreads();
    output.finish<Weight, Own::kPart>(task);
    if (task.tokens * kPairOutputs > kSlices * 32) { // eight tokens: more outputs than threads
        PairOutput(task, way.has_unit, sums, kSlices * 32 + threadIdx.x).finish<Weight, Own::kPart>(task);
    }
}
