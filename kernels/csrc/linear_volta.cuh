// The decode linear's inner part for sm_70: m8n8k4, a lane a row of the band, weights from memory to registers.
#pragma once
#include "encodings.cuh"
#include "linear_task.cuh"
#include "volta.cuh"

// kAhead: the next turn is loaded before this one is multiplied, for twice the registers.
template <class Weight, int kTiles, bool kAhead> struct VoltaTurns {
    static constexpr int kTurn = 4;
    static constexpr int kHeld = kRows;
    static constexpr int kChains = kWarps;

    Walk<kTurn> ahead;
    const unsigned char *words, *group_scales;
    long long first_tile; // of the band
    Weight next[kTurn];
    int lane;

    __device__ VoltaTurns(const Task &task, Items items, unsigned char *) : ahead(task, items) {
        find_band();
        lane = kept(threadIdx.x % 32);
        if (kAhead) {
            load();
        }
    }

    // Every item is a band, or gate and up of one.
    __device__ static bool whole(const Task &) { return true; }
    __device__ static int parts_of(const Task &task) { return task.epilogue == kSwiglu ? 2 : 1; }

    __device__ void find_band() {
        if (!ahead.done()) {
            int band;
            const Matrix &matrix = matrix_of(ahead.task, ahead.item, ahead.part, band);
            words = matrix.words;
            group_scales = matrix.group_scales;
            first_tile = static_cast<long long>(band) * ahead.task.groups;
        }
    }

    __device__ void load() {
        if (ahead.done()) {
            return;
        }
#pragma unroll
        for (int step = 0; step < kTurn; ++step) {
            const int group = ahead.turn * kTurn + step;
            const size_t own = static_cast<size_t>(first_tile + group) * kRows + lane;
#ifdef ABLATE_LOADS
            next[step] = Weight{};
#else
            next[step] = group < ahead.task.groups ? Weight::load(words, group_scales, own) : Weight{};
#endif
        }
        if (ahead.next(static_cast<int>(threadIdx.x / 32), ahead.task.epilogue != kSwiglu)) {
            find_band();
        }
    }

    // sum[tile][i]: token `token(i)` of token tile `tile`, row `row(i)` of the band.
    __device__ static int token(int lane, int i) { return (lane & 1) + (i & 2) + lane / 16 * 4; }
    __device__ static int row(int lane, int i) {
        const int column = (i & 4) + (lane & 2) + (i & 1); // of the quad-pair's eight weight rows
        return lane / 4 % 4 * 4 + column % 4 + column / 4 * 16;
    }

    // Adds the products of a warp's next turn, which is turn `turn` of the band.
    __device__ void multiply(float (&sum)[kTiles][8], int turn, int) {
        const Task &task = ahead.task;
        const int own_token = lane % 4 + lane / 16 * 4;
        Weight now[kTurn];
        if (!kAhead) {
            load();
        }
#pragma unroll
        for (int step = 0; step < kTurn; ++step) {
            now[step] = next[step];
        }
        if (kAhead) {
            load();
        }
        // A fence for the compiler: without it ptxas moves each load down to its use, and one is in flight at a time.
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kTurn; ++step) {
            const int group = turn * kTurn + step;
#ifndef ABLATE_ARITHMETIC
            now[step].prepare();
#endif
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const int token = tile * kTokens + own_token;
                uint4 low = {}, high = {};
#ifndef ABLATE_LOADS
                if (token < task.tokens && group < task.groups) {
                    const uint4 *row = reinterpret_cast<const uint4 *>(task.x) + (token * task.groups + group) * 2;
                    low = kTiles == 3 ? read_now(row) : __ldg(row); // three tiles' loads at once would not fit
                    high = kTiles == 3 ? read_now(row + 1) : __ldg(row + 1);
                }
#endif
#ifdef ABLATE_ARITHMETIC
                sum[tile][0] += __int_as_float(now[step].mix() ^ low.x ^ high.y);
#else
                multiply_accumulate(sum[tile], low.x, low.y, now[step].pair(0), now[step].pair(1));
                multiply_accumulate(sum[tile], low.z, low.w, now[step].pair(2), now[step].pair(3));
                multiply_accumulate(sum[tile], high.x, high.y, now[step].pair(4), now[step].pair(5));
                multiply_accumulate(sum[tile], high.z, high.w, now[step].pair(6), now[step].pair(7));
#endif
            }
        }
    }
};
