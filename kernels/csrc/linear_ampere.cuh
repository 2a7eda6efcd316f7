// The decode linear's inner part for sm_80 and newer: m16n8k16, and a ring of asynchronous copies for each warp.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"
#include "linear_task.cuh"

template <class Weight> struct AmpereTurns {
    static constexpr int kStages = Weight::kStages;
    static constexpr int kStageBytes = kTurn * Weight::kTileStride;
    static constexpr int kSharedBytes = kWarps * kStages * kStageBytes;
    static constexpr int kPieces = kRows * Weight::kBytes / 16; // 16-byte pieces of a tile

    Walk ahead;
    unsigned char *ring;
    int slot;

    __device__ AmpereTurns(const Task &task, Items items, unsigned char *shared)
        : ahead(task, items), ring(shared + threadIdx.x / 32 * kStages * kStageBytes), slot(0) {
#pragma unroll
        for (int stage = 0; stage < kStages - 1; ++stage) {
            load(ring + stage * kStageBytes);
        }
    }

    __device__ void load(unsigned char *stage) {
#ifndef ABLATE_LOADS
        if (!ahead.done()) {
            const int lane = threadIdx.x % 32;
            const int first = ahead.turn * kTurn;
            const unsigned char *tiles = ahead.words + (ahead.first_tile + first) * (kRows * Weight::kBytes);
#pragma unroll
            for (int piece = lane; piece < kTurn * kPieces; piece += 32) {
                const int tile = piece / kPieces;
                copy_async(stage + tile * Weight::kTileStride + piece % kPieces * 16, tiles + piece * 16,
                           first + tile < ahead.task.groups);
            }
            if (Weight::kGroupScales && lane < kTurn * 2) {
                const int tile = lane / 2;
                copy_async(stage + tile * Weight::kTileStride + kRows * Weight::kBytes + lane % 2 * 16,
                           ahead.group_scales + (ahead.first_tile + first) * kRows + lane * 16,
                           first + tile < ahead.task.groups);
            }
            ahead.next();
        }
#endif
        commit_copies(); // an empty group at the end of the walk keeps the count of groups
    }

    // sum[tile][i]: token `token(i)` of token tile `tile`, row `row(i)` of the band.
    __device__ static int token(int lane, int i) { return lane % 4 * 2 + i % 2; }
    __device__ static int row(int lane, int i) { return i / 4 * 16 + i / 2 % 2 * 8 + lane / 4; }

    // Adds the products of a warp's next turn, which is turn `turn` of the band. Lane (g, q) = (lane / 4, lane % 4) holds
    // tile q of the turn, for token g and for the rows g, g + 8, g + 16 and g + 24. A product takes four columns of each
    // of the four tiles: the order of columns within a product is free as long as both sides agree.
    template <int kTiles> __device__ void multiply(float (&sum)[kTiles][8], const Task &task, int turn) {
        const int lane = threadIdx.x % 32;
        const int group = turn * kTurn + lane % 4;
        uint4 x[kTiles][2] = {};
#ifndef ABLATE_LOADS
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const int token = tile * kTokens + lane / 4;
            if (token < task.tokens && group < task.groups) {
                const uint4 *row = reinterpret_cast<const uint4 *>(task.x) + (token * task.groups + group) * 2;
                x[tile][0] = __ldg(row);
                x[tile][1] = __ldg(row + 1);
            }
        }
#endif
        wait_copies<kStages - 2>();
        __syncwarp(); // the copies of the other lanes, too
        int free = slot + kStages - 1;
        load(ring + (free >= kStages ? free - kStages : free) * kStageBytes);
        const unsigned char *tile_words = ring + slot * kStageBytes + lane % 4 * Weight::kTileStride;
        slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Weight upper = Weight::take(tile_words, half * 16 + lane / 4);
            Weight lower = Weight::take(tile_words, half * 16 + 8 + lane / 4);
#ifdef ABLATE_ARITHMETIC
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                sum[tile][half] += __int_as_float(upper.mix() ^ lower.mix() ^ x[tile][0].x ^ x[tile][1].y);
            }
#else
            upper.prepare();
            lower.prepare();
#pragma unroll
            for (int quarter = 0; quarter < 4; ++quarter) {
                const unsigned a0 = upper.pair(2 * quarter), a2 = upper.pair(2 * quarter + 1);
                const unsigned a1 = lower.pair(2 * quarter), a3 = lower.pair(2 * quarter + 1);
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const uint4 &part = x[tile][quarter / 2];
                    multiply_16x8(sum[tile] + 4 * half, a0, a1, a2, a3, quarter % 2 ? part.z : part.x,
                                  quarter % 2 ? part.w : part.y);
                }
            }
#endif
        }
    }
};
