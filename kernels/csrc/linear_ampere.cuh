// The decode linear's inner part for sm_80 and newer: m16n8k16, and a ring of asynchronous copies for each warp.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"
#include "linear_task.cuh"

// Of an item, shared memory holds kHeld rows: a band's; where `Task::rows` is 16 sixteen of gate and the same sixteen of up;
// or half a band's. kStages: turns in a warp's ring.
template <class Weight, int kTiles, Form kForm, int kStages> struct AmpereTurns {
    static constexpr int kHeld = kForm == kHalved ? kHalfRows : kRows;
    static constexpr int kTurn = Weight::kTurn;
    static constexpr int kTileBytes = kHeld * Weight::kBytes;
    static constexpr int kTileStride = kTileBytes + 32; // of tiles in shared memory: reads of four tiles meet all banks
    static constexpr int kStageBytes = kTurn * kTileStride;
    static constexpr int kTurnBytes = kTurn * kTileBytes;
    static constexpr int kBandTile = kRows * Weight::kBytes; // of a tile in memory
    static constexpr int kRowBytes = Weight::kBytes < 16 ? Weight::kBytes : 16; // of a row that lie together
    static constexpr int kRun = kHalfRows * kRowBytes;                          // sixteen rows
    static constexpr int kScaleLanes = kTurn * kHeld / 16; // lanes that copy 16 bytes of nvfp4 scales

    using Way = Walk<kTurn, Weight::kSliced>;
    static constexpr int kChains = Way::kChains;
    static constexpr int kUnit = Way::kUnit;
    static constexpr int kUnitX = kUnit * 2 * kColumns; // bytes of a token's activations

    Way ahead;
    const int full;                      // turns of a band that lack no tile
    const unsigned char *words, *scales; // of this lane, in the first turn of the item that is loaded
    const unsigned char *x;              // this lane's tile of its token of the first token tile, in the first turn
    SharedAddress stage, free, end;      // of this warp's ring: the stage to multiply next, the one to fill next
    int lane, first, to, scales_to, from, scales_from; // offsets in a stage: of this lane's copies, and of what it multiplies

    __device__ AmpereTurns(const Task &task, Items items, unsigned char *shared)
        : ahead(task, items), full(task.groups / kTurn), stage(shared_address(shared + threadIdx.x / 32 * kStages * kStageBytes)), free(stage),
          lane(kept(threadIdx.x % 32)), first(opaque(ahead.turn)), to(kept(place(lane))),
          scales_to(kept(lane / (kHeld / 16) * kTileStride + kTileBytes + lane % (kHeld / 16) * 16)) {
        find_item();
#pragma unroll 1 // a new launch finds no instructions in the caches: short code starts sooner
        for (int count = 0; count < kStages - 1; ++count) {
            load();
            free += kStageBytes;
        }
        x = opaque(reinterpret_cast<const unsigned char *>(task.x) + (lane / 4 * task.groups + lane % 4) * 2 * kColumns);
        end = opaque(stage + kStages * kStageBytes);
        from = opaque(lane % 4 * kTileStride + row(lane, 0) * kRowBytes);
        scales_from = opaque(lane % 4 * kTileStride + kTileBytes + row(lane, 0));
    }

    // Items are bands, not halves.
    __device__ static bool whole(const Task &task) { return kForm == kWhole || (kForm == kPaired && task.rows == kRows); }
    // Gate and up of SwiGLU, unless they stand side by side.
    __device__ static int parts_of(const Task &task) { return whole(task) && task.epilogue == kSwiglu ? 2 : 1; }

    // Where a lane's first 16 bytes of a turn go: chunk `lane` of the tiles, which stand kTileStride apart.
    __device__ static constexpr int place(int lane) {
        return lane * 16 / kTileBytes * kTileStride + lane * 16 % kTileBytes;
    }

    // How far chunk `lane + 32 i` lies from chunk `lane`.
    __device__ static constexpr int step(int i) { return place(32 * i); }

    // The same in memory, where halves of a band take turns.
    static constexpr int kStep = kHeld == kRows ? 512 : 1024;

    // Where this lane's copies of the item's first turn come from.
    __device__ void find_item() {
        if (ahead.done()) {
            ahead.turn = ahead.turns(); // so that no tiles are left
            return;
        }
        const Task &task = ahead.task;
        const int item = ahead.item, own = lane * 16, run = own / kRun;
        int band;
        const Matrix &matrix = matrix_of(task, whole(task) ? item : item / 2, ahead.part, band);
        const long long tile = static_cast<long long>(band) * task.groups;
        words = matrix.words + tile * kBandTile + own;
        scales = matrix.group_scales + tile * kRows + lane * 16;
        if (!whole(task)) {
            const int half = item % 2;
            if (kForm == kPaired) { // runs and scales by turns of gate and up, of one half each
                const Matrix &up = task.matrix[1];
                words = (run % 2 ? up.words : matrix.words) + tile * kBandTile + own + (half - run % 2) * kRun;
                scales = (lane % 2 ? up.group_scales : matrix.group_scales) + tile * kRows + (lane / 2 * 2 + half) * 16;
            } else {
                words += (run + half) * kRun;
                scales += (lane + half) * 16;
            }
        }
    }

    // Loads a turn into the stage `free`.
    __device__ void load() {
#ifndef ABLATE_LOADS
        const SharedAddress own = free + to, own_scales = free + scales_to;
        const unsigned char *from_words = words + static_cast<long long>(ahead.turn) * (kUnit * kBandTile);
        const unsigned char *from_scales = scales + static_cast<long long>(ahead.turn) * (kUnit * kRows);
        if (Weight::kSliced ? !ahead.done() && ahead.turn + 1 < ahead.end : ahead.turn < full) {
#pragma unroll
            for (int i = 0; i < kTurnBytes / 512; ++i) {
                copy_once(own + step(i), from_words + i * kStep);
            }
            if (Weight::kGroupScales) {
                copy_once_if(lane < kScaleLanes, own_scales, from_scales);
            }
        } else if (!ahead.done()) {
            const int tiles = tiles_from(ahead.turn); // that there are from here on
            const unsigned char *valid = words; // any address
#pragma unroll
            for (int i = 0; i < kTurnBytes / 512; ++i) {
                if ((i * 512 + lane * 16) / kTileBytes < tiles) {
                    copy_once(own + step(i), from_words + i * kStep);
                } else {
                    zero_async(own + step(i), valid);
                }
            }
            if (Weight::kGroupScales && lane < kScaleLanes) {
                if (lane / (kHeld / 16) < tiles) {
                    copy_once(own_scales, from_scales);
                } else {
                    zero_async(own_scales, valid);
                }
            }
        }
        if (ahead.next(first, parts_of(ahead.task) == 1)) {
            find_item();
        }
#endif
        commit_copies(); // an empty group at the end of the walk keeps the count of groups
    }

    // Tiles of a last turn that is not full.
    __device__ int tiles_from(int turn) const { return Weight::kSliced ? kFour : ahead.task.groups - turn * kTurn; }

    // sum[tile][i]: token `token(i)` of token tile `tile`, row `row(i)` of what is held.
    __device__ static int token(int lane, int i) { return lane % 4 * 2 + i % 2; }
    __device__ static int row(int lane, int i) {
        // Such that the lanes' reads of a half meet all banks: 16 bytes are two rows of nvfp4, and one of the others.
        const int half = i / 4, lower = i / 2 % 2, g = lane / 4;
        return half * kHalfRows + (Weight::kGroupScales ? 2 * g + lower : 8 * lower + g);
    }

    // Adds the products of a warp's next turn, which is turn `turn` of the band. Lane (g, q) = (lane / 4, lane % 4) holds
    // tile q of each four, for token g and for two rows of each sixteen. A product takes four columns of each of four tiles:
    // the order of columns within a product is free as long as both sides agree.
    // `end_of_chain`: the turn behind its chain's last one.
    __device__ void multiply(float (&sum)[kTiles][kHeld / 4], int turn, int end_of_chain) {
        const Task &task = ahead.task;
        const unsigned char *x_now = x + static_cast<long long>(turn) * kUnitX;
        const bool whole_turn = Weight::kSliced ? turn + 1 < end_of_chain : turn < full;
        uint4 own[kTurn / 4][kTiles][2];
#ifndef ABLATE_LOADS
        if (whole_turn) {
#pragma unroll
            for (int part = 0; part < kTurn / 4 * kTiles; ++part) {
                const int four = part / kTiles, tile = part % kTiles;
                const unsigned char *row = x_now + tile * kTokens * task.groups * 2 * kColumns;
                // Of a token that is not there any numbers will do: they stay in its own column of the sums.
                const bool there = tile * kTokens + lane / 4 < task.tokens;
                if (four == 0) {
                    own[four][tile][0] = read_fresh_if<0>(there, row);
                    own[four][tile][1] = read_fresh_if<16>(there, row);
                } else {
                    own[four][tile][0] = read_fresh_if<4 * 2 * kColumns>(there, row);
                    own[four][tile][1] = read_fresh_if<4 * 2 * kColumns + 16>(there, row);
                }
            }
        } else
#endif
        { // a last turn that is not full: the weights that are not there are zero, and so is x
            const int tiles = tiles_from(turn); // that there are from here on
#pragma unroll
            for (int part = 0; part < kTurn / 4 * kTiles; ++part) {
                const int four = part / kTiles, tile = part % kTiles;
                own[four][tile][0] = own[four][tile][1] = {};
#ifndef ABLATE_LOADS
                const unsigned char *row = x_now + (tile * kTokens * task.groups + four * 4) * 2 * kColumns;
                if (tile * kTokens + lane / 4 < task.tokens && lane % 4 + four * 4 < tiles) {
                    own[four][tile][0] = read_fresh(row);
                    own[four][tile][1] = read_fresh(row + 16);
                }
#endif
            }
        }
        wait_copies<kStages - 2>();
        __syncwarp(); // the copies of the other lanes, too
        load();       // into the stage that the last turn left
        const SharedAddress words_now = stage + from, scales_now = stage + scales_from;
        free = stage;
        stage += kStageBytes;
        if (stage == end) {
            stage -= kStages * kStageBytes;
        }
#pragma unroll
        for (int four = 0; four < kTurn / 4; ++four) {
            if (Weight::kSliced && four > 0 && !whole_turn) {
                break;
            }
            multiply_four(sum, words_now + four * 4 * kTileStride, scales_now + four * 4 * kTileStride, own[four]);
        }
    }

    // Adds the products with four tiles.
    __device__ void multiply_four(float (&sum)[kTiles][kHeld / 4], SharedAddress words_now, SharedAddress scales_now,
                                  const uint4 (&own)[kTiles][2]) {
        uint4 x_now[kTiles][2];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            x_now[tile][0] = Weight::arrange(own[tile][0]);
            x_now[tile][1] = Weight::arrange(own[tile][1]);
        }
#pragma unroll
        for (int half = 0; half < kHeld / kHalfRows; ++half) {
            Weight upper, lower;
            const SharedAddress rows_now = words_now + half * kRun;
            if constexpr (Weight::kGroupScales) {
                Weight::take_two(rows_now, scales_now + half * kHalfRows, upper, lower);
            } else {
                upper = Weight::template take<kHeld>(rows_now);
                lower = Weight::template take<kHeld>(rows_now + 8 * kRowBytes);
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
