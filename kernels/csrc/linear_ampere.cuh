// The decode linear's inner part for sm_80 and newer: m16n8k16, and a ring of asynchronous copies for each warp.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"
#include "linear_task.cuh"

template <class Weight, int kTiles> struct AmpereTurns {
    static constexpr int kTurn = Weight::kTurn;
    static constexpr int kStages = Weight::kStages;
    static constexpr int kStageBytes = kTurn * Weight::kTileStride;
    static constexpr int kTileBytes = kRows * Weight::kBytes;
    static constexpr int kTurnBytes = kTurn * kTileBytes;

    Walk<kTurn> ahead;
    const unsigned char *words, *scales; // of this lane, in the turn to load next
    const unsigned char *x;              // this lane's tile of its token of the first token tile, in the band's next turn
    int x_tiles;                         // from that tile on; none for a lane without a token
    SharedAddress ring, stage, free;     // of this warp: the stage to multiply next, and the one to fill next
    int lane, to, scales_to, from;       // offsets in a stage: of this lane's copies, and of what it multiplies

    __device__ AmpereTurns(const Task &task, Items items, unsigned char *shared)
        : ahead(task, items), ring(shared_address(shared + threadIdx.x / 32 * kStages * kStageBytes)), stage(ring),
          free(ring), lane(kept(threadIdx.x % 32)), to(kept(place(lane))),
          // Scales: 16 bytes for each of the first lanes, two lanes a tile.
          scales_to(kept(lane / 2 * Weight::kTileStride + kTileBytes + lane % 2 * 16)),
          from(kept(lane % 4 * Weight::kTileStride)) {
        find_band();
#pragma unroll 1 // a new launch finds no instructions in the caches: short code starts sooner
        for (int count = 0; count < kStages - 1; ++count) {
            load();
            free += kStageBytes;
        }
        rewind_x();
    }

    // Back to the warp's first turn: every band has the same.
    __device__ void rewind_x() {
        const int first = static_cast<int>(threadIdx.x / 32) * kTurn + lane % 4, token = lane / 4;
        x = reinterpret_cast<const unsigned char *>(ahead.task.x) + (token * ahead.task.groups + first) * 2 * kColumns;
        x_tiles = ahead.task.groups - first;
    }

    // Where a lane's first 16 bytes of a turn go: chunk `lane` of the tiles, which stand kTileStride apart.
    __device__ static int place(int lane) {
        return lane * 16 / kTileBytes * Weight::kTileStride + lane * 16 % kTileBytes;
    }

    __device__ void find_band() {
        if (!ahead.done()) {
            const long long tile = ahead.first_tile + ahead.turn * kTurn;
            words = ahead.words + tile * kTileBytes + lane * 16;
            scales = ahead.group_scales + tile * kRows + lane * 16;
        }
    }

    // Loads a turn into the stage `free`.
    __device__ void load() {
#ifndef ABLATE_LOADS
        if (!ahead.done()) {
            const SharedAddress own = free + to, own_scales = free + scales_to;
            const int tiles = ahead.task.groups - ahead.turn * kTurn; // that there are from here on
            if (tiles >= kTurn) {
#pragma unroll
                for (int i = 0; i < kTurnBytes / 512; ++i) {
                    copy_once(own + step(i), words + i * 512);
                }
                if (Weight::kGroupScales && lane < 2 * kTurn) {
                    copy_once(own_scales, scales);
                }
            } else {
#pragma unroll
                for (int i = 0; i < kTurnBytes / 512; ++i) {
                    if ((i * 512 + lane * 16) / kTileBytes < tiles) {
                        copy_once(own + step(i), words + i * 512);
                    } else {
                        zero_async(own + step(i), ahead.words);
                    }
                }
                if (Weight::kGroupScales && lane < 2 * kTurn) {
                    if (lane / 2 < tiles) {
                        copy_once(own_scales, scales);
                    } else {
                        zero_async(own_scales, ahead.words);
                    }
                }
            }
            words += kWarps * kTurnBytes;
            scales += kWarps * kTurn * kRows;
            if (ahead.next()) {
                find_band();
            }
        }
#endif
        commit_copies(); // an empty group at the end of the walk keeps the count of groups
    }

    // How far chunk `lane + 32 i` lies from chunk `lane`.
    __device__ static constexpr int step(int i) {
        return kTileBytes < 512 ? i * (512 / kTileBytes) * Weight::kTileStride
                                : i * 512 / kTileBytes * Weight::kTileStride + i * 512 % kTileBytes;
    }

    // sum[tile][i]: token `token(i)` of token tile `tile`, row `row(i)` of the band.
    __device__ static int token(int lane, int i) { return lane % 4 * 2 + i % 2; }
    __device__ static int row(int lane, int i) {
        // Such that the lanes' reads of a half meet all banks: 16 bytes are two rows of nvfp4, and one of the others.
        const int half = i / 4, lower = i / 2 % 2, g = lane / 4;
        return half * 16 + (Weight::kGroupScales ? 2 * g + lower : 8 * lower + g);
    }

    // Adds the products of a warp's next turn, which is turn `turn` of the band. Lane (g, q) = (lane / 4, lane % 4) holds
    // tile q of each four, for token g and for four rows. A product takes four columns of each of four tiles: the order of
    // columns within a product is free as long as both sides agree.
    __device__ void multiply(float (&sum)[kTiles][8], int turn) {
        uint4 own[kTurn / 4][kTiles][2];
#pragma unroll
        for (int four = 0; four < kTurn / 4; ++four) {
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                own[four][tile][0] = own[four][tile][1] = {};
#ifndef ABLATE_LOADS
                if (x_tiles > four * 4 && tile * kTokens + lane / 4 < ahead.task.tokens) {
                    const unsigned char *row =
                        x + tile * kTokens * 2 * kColumns * ahead.task.groups + four * 4 * 2 * kColumns;
                    own[four][tile][0] = read_fresh(row);
                    own[four][tile][1] = read_fresh(row + 16);
                }
#endif
            }
        }
        wait_copies<kStages - 2>();
        __syncwarp(); // the copies of the other lanes, too
        load();       // into the stage that the last turn left
        const SharedAddress words_now = stage + from;
        free = stage;
        stage = stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
        x += kWarps * kTurn * 2 * kColumns;
        x_tiles -= kWarps * kTurn;
        if (turn + kWarps >= ahead.turns()) {
            rewind_x();
        }
#pragma unroll
        for (int four = 0; four < kTurn / 4; ++four) {
            multiply_four(sum, words_now + four * 4 * Weight::kTileStride, own[four]);
        }
    }

    // Adds the products with four tiles.
    __device__ void multiply_four(float (&sum)[kTiles][8], SharedAddress words_now, const uint4 (&own)[kTiles][2]) {
        uint4 x_now[kTiles][2];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            x_now[tile][0] = Weight::arrange(own[tile][0]);
            x_now[tile][1] = Weight::arrange(own[tile][1]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Weight upper, lower;
            if constexpr (Weight::kGroupScales) {
                Weight::take_two(words_now, row(lane, 4 * half), upper, lower);
            } else {
                upper = Weight::take(words_now, row(lane, 4 * half));
                lower = Weight::take(words_now, row(lane, 4 * half + 2));
            }
#ifdef ABLATE_ARITHMETIC
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                sum[tile][half] += __int_as_float(upper.mix() ^ lower.mix() ^ x_now[tile][0].x ^ x_now[tile][1].y);
            }
#else
            upper.prepare();
            lower.prepare();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                unsigned a0, a1, a2, a3;
                upper.quarter(j, a0, a2);
                lower.quarter(j, a1, a3);
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const uint4 &part = x_now[tile][j / 2];
                    multiply_16x8(sum[tile] + 4 * half, a0, a1, a2, a3, j % 2 ? part.z : part.x,
                                  j % 2 ? part.w : part.y);
                }
            }
#endif
        }
    }
};
