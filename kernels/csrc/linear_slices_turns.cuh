// A warp's way through its slice, up to eight tokens: their activations stay in registers.
#pragma once
#include "linear_slices.cuh"

template <class Weight, int kTiles> __device__ __forceinline__ void arrange(uint4 (&now)[kTiles][2], const uint4 (&read)[kTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        now[tile][0] = Weight::arrange(read[tile][0]);
        now[tile][1] = Weight::arrange(read[tile][1]);
    }
}

// This lane's columns of the first four tiles of a slice, token lane / 4.
__device__ __forceinline__ const unsigned char *slice_x(const Task &task, int lane) {
    return reinterpret_cast<const unsigned char *>(task.x) +
           static_cast<long long>(lane / 4 * task.groups + slice_begin(task, threadIdx.x / 32) * kFour + lane % 4) * 2 * kColumns;
}
constexpr int kFourX = kFour * 2 * kColumns; // bytes of a token's activations in four tiles

// kFours: of the longest slice; others have one less. The ring of a warp holds a step; kAhead fours of it, at most kFours - 1, are
// under way: more would have to wait for room on their way, and the first products behind them.
template <class Weight, int kFours, int kAhead> struct SlicesKept {
    static constexpr int kTiles = 1;
    using Copies = SliceCopies<Weight>;
    using Products = SliceProducts<Weight, kTiles>;
    static constexpr int kRing = kFours * Copies::kFourHeld;

    Copies copies;
    Products products;
    const SharedAddress ring;
    const int last; // -1 if this warp's slice has kFours
    uint4 x[kFours][kTiles][2];

    __device__ SlicesKept(const Task &task, const Share &share, unsigned char *shared)
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

    // Once what was before has ended.
    __device__ void begin() {
#ifndef ABLATE_LOADS
        uint4 read[kFours][kTiles][2];
        read_from<0>(read, slice_x(copies.task, copies.lane));
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
            arrange<Weight, kTiles>(x[four], read[four]);
        }
#endif
    }

    template <int four> __device__ void read_from(uint4 (&read)[kFours][kTiles][2], const unsigned char *own) const {
        if constexpr (four < kFours) {
            // Of a token that is not there any numbers will do: they stay in its own column of the sums.
            const bool there = copies.lane / 4 < copies.task.tokens && (four < kFours - 1 || last);
            read[four][0][0] = read_fresh_if<four * kFourX>(there, own);
            read[four][0][1] = read_fresh_if<four * kFourX + 16>(there, own);
            read_from<four + 1>(read, own);
        }
    }

    // sum[tile][i]: the products of the warp's slice with the rows of a step.
    template <bool kHalved> __device__ void multiply(float (&sum)[kTiles][4], int step) { multiply_from<kHalved, 0>(sum, step); }

    template <bool kHalved, int four> __device__ void multiply_from(float (&sum)[kTiles][4], int step) {
        if constexpr (four < kFours) {
            wait_copies<kAhead - 1>();
            __syncwarp(); // the copies of the other lanes, too; and all have read the four tiles before
            if (four == kFours - kAhead) {
                copies.find(step + 1);
            }
            load<(four + kAhead) % kFours>();
            if (four < kFours - 1 || last) {
                products.template multiply<kHalved>(sum, ring + four * Copies::kFourHeld, x[four]);
            }
            multiply_from<kHalved, four + 1>(sum, step);
        }
    }
};
