// Delta chunks, the third kernel: a lane's chunks in order, with its state in registers.
#pragma once
#include "chunks.cuh"

constexpr int kScanThreads = 256;
constexpr int kValues = 32;            // rows of a head's state that a block has
constexpr int kValueTiles = kValues / kTile;
constexpr int kValuePitch = kValues + 8;  // rows of 32 fp16
constexpr int kScratchPitch = kTile + 4;  // rows of 16 FP32

struct ScanShared {
    unsigned short state[kValues * kPitch]; // of the chunk's beginning
    unsigned short update[kChunk * kValuePitch], decayed[kChunk * kValuePitch]; // u, and u as the chunk's end sees it
    float scratch[kScanThreads / 32][kValues * kScratchPitch];                 // a warp's
    // sm_80 and newer: the chunk's operands; sm_70 takes them from where they are.
    unsigned short w[kChunk * kPitch], grown[kChunk * kPitch], keys[kChunk * kPitch], weights[kChunk * kSquarePitch];
};

// The chunks of a lane in order. halves_in, w, grown, u, weights, factors: as above. x and rows: the history moves, too.
// state: FP32 [all_lanes, value_heads, 128 (value), 128 (key)]; out: FP32 [tokens, value_heads, 128].
// Grid: (128 / kValues, value_heads). A warp has 16 rows of the chunk by 16 values, and 16 columns of the state.
extern "C" __global__ void __launch_bounds__(kScanThreads)
    chunks_scan(const float *x, int x_stride, float *rows, float *state, int all_lanes, int lane_index, const int *turns,
                const unsigned short *halves_in, const unsigned short *w, const unsigned short *grown, const float *u,
                const unsigned short *weights, const float *factors, float *out, int chunks, int lead, int tokens,
                int key_heads) {
    DYNAMIC_SHARED(memory);
    ScanShared &s = *reinterpret_cast<ScanShared *>(memory);
    const int head = blockIdx.y, value_heads = gridDim.y, padded = chunks * kChunk, block_value = blockIdx.x * kValues;
    const int channels = (2 * key_heads + value_heads) * kHead, key_head = head / (value_heads / key_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = warp % 4, own = part * kTile, side = warp / 4 * kTile, value = block_value + side, column = warp * kTile;
    const size_t first = static_cast<size_t>(head) * padded;
    const unsigned short *keys = halves_in + (key_heads + key_head) * kHead;
    float *scratch = s.scratch[warp];
    {
        const int width = row_width(channels, value_heads);
        keep_history(x, x_stride, rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width), width, channels,
                     tokens, (head * gridDim.x + blockIdx.x) * kScanThreads + threadIdx.x,
                     gridDim.x * gridDim.y * kScanThreads);
    }
    const auto stage_rows = [&](int chunk) { // what meets the state
        if (kAsync && chunk < chunks) {
            const size_t at = first + chunk * kChunk;
            stage<kHead, kScanThreads>(s.w, kPitch, w + at * kHead, kHead);
            stage<kHead, kScanThreads>(s.grown, kPitch, grown + at * kHead, kHead);
        }
        copies_end();
    };
    const auto stage_rest = [&](int chunk) { // what meets the updates
        if (kAsync && chunk < chunks) {
            const size_t at = first + chunk * kChunk;
            stage<kHead, kScanThreads>(s.keys, kPitch, keys + static_cast<size_t>(chunk) * kChunk * channels, channels);
            stage<kChunk, kScanThreads>(s.weights, kSquarePitch, weights + at * kChunk, kChunk);
        }
        copies_end();
    };
    constexpr int kOwn = kTile * kTile / 4 / 32; // float4 of u a lane: row 8 i + lane / 4, quad lane % 4
    float4 known[kOwn];
    float remaining[kOwn], growth;
    const auto load = [&](int chunk) {
        if (chunk < chunks) {
            const size_t at = first + chunk * kChunk;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const size_t row = at + own + i * 8 + lane / 4;
                known[i] = read(reinterpret_cast<const float4 *>(u + row * kHead + value) + lane % 4);
                remaining[i] = read(factors + row);
            }
            growth = read(factors + static_cast<size_t>(value_heads) * padded + at + kChunk - 1);
        }
    };
    stage_rows(0);
    load(0);

    float *place = state + ((static_cast<size_t>(lane_index) * value_heads + head) * kHead + block_value) * kHead + column;
    SumTile now[kValueTiles];
#pragma unroll
    for (int m = 0; m < kValueTiles; ++m) {
        now[m] = sum_tile(place + m * kTile * kHead, kHead);
    }
    const auto publish = [&] { // this warp's columns of the state as fp16
#pragma unroll
        for (int m = 0; m < kValueTiles; ++m) {
            store_tile<From::kShared>(scratch + m * kTile * kScratchPitch, now[m], kScratchPitch);
        }
        __syncwarp();
        const float4 *from = reinterpret_cast<const float4 *>(scratch + lane * kScratchPitch); // a lane a row
        uint4 *to = reinterpret_cast<uint4 *>(s.state + lane * kPitch + column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 a = from[2 * i], b = from[2 * i + 1];
            to[i] = uint4{halves(a.x, a.y), halves(a.z, a.w), halves(b.x, b.y), halves(b.z, b.w)};
        }
        __syncwarp();
    };
    publish();
    copies_wait();
    __syncthreads();
    stage_rest(0);

    // A chunk's operands are asked for as soon as their place is free.
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const size_t at = first + chunk * kChunk + own; // this warp's first row
        SumTile meant = {}, answer = {}; // W S^T, and the outputs
#pragma unroll
        for (int k = 0; k < kHead / kTile; ++k) {
            HalfTile a, q;
            if (kAsync) {
                a = left_tile<From::kShared, Order::kRows>(s.w + own * kPitch + k * kTile, kPitch);
                q = left_tile<From::kShared, Order::kRows>(s.grown + own * kPitch + k * kTile, kPitch);
            } else {
                a = left_tile<From::kGlobal, Order::kRows>(w + at * kHead + k * kTile, kHead);
                q = left_tile<From::kGlobal, Order::kRows>(grown + at * kHead + k * kTile, kHead);
            }
            const HalfTile b = right_tile<From::kShared, Order::kColumns>(s.state + side * kPitch + k * kTile, kPitch);
            multiply_tiles<Order::kRows, Order::kColumns>(meant, a, b);
            multiply_tiles<Order::kRows, Order::kColumns>(answer, q, b);
        }
        store_tile<From::kShared>(scratch, meant, kScratchPitch);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int row = i * 8 + lane / 4, quad = lane % 4;
            const float4 m = *reinterpret_cast<const float4 *>(scratch + row * kScratchPitch + 4 * quad);
            const float4 v = {known[i].x - m.x, known[i].y - m.y, known[i].z - m.z, known[i].w - m.w};
            const float4 d = scaled(v, remaining[i]);
            const int to = (own + row) * kValuePitch + side + 4 * quad;
            *reinterpret_cast<uint2 *>(s.update + to) = uint2{halves(v.x, v.y), halves(v.z, v.w)};
            *reinterpret_cast<uint2 *>(s.decayed + to) = uint2{halves(d.x, d.y), halves(d.z, d.w)};
        }
        const float grows = growth;
        copies_wait();
        __syncthreads();
        stage_rows(chunk + 1);
        load(chunk + 1);

#pragma unroll
        for (int m = 0; m < kValueTiles; ++m) {
            now[m].scale(grows);
        }
#pragma unroll
        for (int k = 0; k < kChunk / kTile; ++k) {
            HalfTile b;
            if (kAsync) {
                b = right_tile<From::kShared, Order::kRows>(s.keys + k * kTile * kPitch + column, kPitch);
            } else {
                const size_t key_row = static_cast<size_t>(chunk * kChunk + k * kTile);
                b = right_tile<From::kGlobal, Order::kRows>(keys + key_row * channels + column, channels);
            }
#pragma unroll
            for (int m = 0; m < kValueTiles; ++m) {
                const HalfTile a =
                    left_tile<From::kShared, Order::kColumns>(s.decayed + k * kTile * kValuePitch + m * kTile, kValuePitch);
                multiply_tiles<Order::kColumns, Order::kRows>(now[m], a, b);
            }
        }
#pragma unroll
        for (int k = 0; k < kChunk / kTile; ++k) {
            if (k <= part) {
                HalfTile a;
                if (kAsync) {
                    a = left_tile<From::kShared, Order::kRows>(s.weights + own * kSquarePitch + k * kTile, kSquarePitch);
                } else {
                    a = left_tile<From::kGlobal, Order::kRows>(weights + at * kChunk + k * kTile, kChunk);
                }
                const HalfTile b =
                    right_tile<From::kShared, Order::kRows>(s.update + k * kTile * kValuePitch + side, kValuePitch);
                multiply_tiles<Order::kRows, Order::kRows>(answer, a, b);
            }
        }
        const int token = chunk * kChunk + own - lead;
        if (token >= 0 && token + kTile <= tokens) {
            store_tile<From::kGlobal>(out + (static_cast<size_t>(token) * value_heads + head) * kHead + value, answer,
                                      value_heads * kHead);
        } else {
            store_tile<From::kShared>(scratch, answer, kScratchPitch);
            __syncwarp();
            for (int i = lane / kTile; i < kTile; i += 2) {
                if (token + i >= 0 && token + i < tokens) {
                    write(out + (static_cast<size_t>(token + i) * value_heads + head) * kHead + value + lane % kTile,
                          scratch[i * kScratchPitch + lane % kTile]);
                }
            }
            __syncwarp();
        }
        publish();
        copies_wait();
        __syncthreads();
        stage_rest(chunk + 1);
    }
#pragma unroll
    for (int m = 0; m < kValueTiles; ++m) {
        store_tile<From::kGlobal>(place + m * kTile * kHead, now[m], kHead);
    }
}
