// The wide linear's steps for sm_80 and newer: m16n8k16, weights and tokens by asynchronous copies, a few steps ahead.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"
#include "wide.cuh"

namespace wide {

// Steps of a group under way and at work: as many as a multiprocessor has memory for.
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
template <class Weight> constexpr int kStages = 2;
#else
template <class Weight> constexpr int kStages = Weight::kBytes == 8 ? 4 : Weight::kBytes == 16 ? 3 : 2;
#endif

template <class Weight, int kTiles> struct AmpereSteps {
    static constexpr int kTileBytes = kRows * Weight::kBytes;
    static constexpr int kRowBytes = Weight::kBytes < 16 ? Weight::kBytes : 16; // a row of fp16 is in two places
    static constexpr int kTileStride = kTileBytes + 32; // the reads of four tiles meet all banks; nvfp4's scales are there
    static constexpr int kBandBytes = kStepTiles * kTileStride; // of a step in shared memory
    static constexpr int kWarpBytes = kBands * kBandBytes;
    static constexpr int kTokensAt = kGroupWarps * kWarpBytes;
    static constexpr int kStageBytes = kTokensAt + kTiles * kTokens * kStepBytes;
    static constexpr int kCopies = kStepTiles * kTileBytes / 512; // of a lane, for a band
    static constexpr int kTokensAtOnce = kGroupThreads / kChunks; // whose steps a group's threads copy

    const Task &task;
    const Matrix *matrix[kBands];
    int band[kBands];
    const unsigned char *words[kBands], *scales[kBands], *x; // of this lane or thread, in the next step to load
    SharedAddress stages, tokens_to;                         // of this group; its thread's own place among the tokens
    int lane, warp, own_token, step, loaded, multiplied;     // the next step to load; stages: numbers modulo kStages
    int steps;                                               // left to load

    // Turns first .. end of the bands from `number` on; beyond the last band, that band again: its sums go nowhere.
    __device__ AmpereSteps(const Task &task, int number, int first_token, int first, int end, unsigned char *memory)
        : task(task), lane(threadIdx.x % 32), warp(threadIdx.x / 32 % kGroupWarps), loaded(0), multiplied(0),
          steps(end - first) {
        const int group = threadIdx.x / kGroupThreads, thread = threadIdx.x % kGroupThreads;
        step = kGroups * first + group;
        stages = shared_address(memory + group * kStages<Weight> * kStageBytes);
#pragma unroll
        for (int half = 0; half < kBands; ++half) {
            matrix[half] = &matrix_at(task, min(number + half, bands_of(task) - 1), band[half]);
            const size_t tile = static_cast<size_t>(band[half]) * task.groups + step * kStepTiles;
            words[half] = matrix[half]->words + tile * kTileBytes + lane * 16;
            scales[half] = matrix[half]->group_scales + tile * kRows + lane * 16;
        }
        const int row = thread / kChunks, chunk = thread % kChunks;
        own_token = first_token + row;
        x = reinterpret_cast<const unsigned char *>(task.x) +
            (static_cast<size_t>(own_token) * task.groups + step * kStepTiles) * 2 * kColumns + chunk * 16;
        tokens_to = stages + kTokensAt + chunk_place(row, chunk);
#pragma unroll
        for (int count = 0; count < kStages<Weight> - 1; ++count) {
            load();
        }
    }

    __device__ static int token(int lane, int i) { return lane % 4 * 2 + i % 2; }
    __device__ static int row(int lane, int i) {
        const int half = i / 4, lower = i / 2 % 2, g = lane / 4;
        return half * 16 + (Weight::kGroupScales ? 2 * g + lower : 8 * lower + g);
    }

    // Begins the copies of a step; none beyond the last, but a group of copies, which keeps their count.
    __device__ void load() {
        if (steps > 0) {
            const int stage = loaded * kStageBytes;
            const int tiles = task.groups - step * kStepTiles; // that there are from here on
#pragma unroll
            for (int half = 0; half < kBands; ++half) {
                const SharedAddress own = stages + stage + warp * kWarpBytes + half * kBandBytes;
#pragma unroll
                for (int i = 0; i < kCopies; ++i) {
                    const int byte = (i * 32 + lane) * 16;
                    const SharedAddress to = own + byte / kTileBytes * kTileStride + byte % kTileBytes;
                    if (byte / kTileBytes < tiles) {
                        copy_async(to, words[half] + i * 512);
                    } else {
                        zero_async(to, reinterpret_cast<const unsigned char *>(task.x));
                    }
                }
                if (Weight::kGroupScales && lane < 2 * kStepTiles) {
                    const SharedAddress to = own + lane / 2 * kTileStride + kTileBytes + lane % 2 * 16;
                    if (lane / 2 < tiles) {
                        copy_async(to, scales[half]);
                    } else {
                        zero_async(to, reinterpret_cast<const unsigned char *>(task.x));
                    }
                    scales[half] += kGroups * kStepTiles * kRows;
                }
                words[half] += kGroups * kStepTiles * kTileBytes;
            }
#pragma unroll
            for (int i = 0; i < kTiles * kTokens / kTokensAtOnce; ++i) { // tokens' places repeat every eight of them
                const SharedAddress to = tokens_to + stage + i * kTokensAtOnce * kStepBytes;
                if (own_token + i * kTokensAtOnce < task.tokens && static_cast<int>(threadIdx.x) % kChunks / 2 < tiles) {
                    copy_async(to, x + static_cast<size_t>(i * kTokensAtOnce * 2 * kColumns) * task.groups);
                } else {
                    zero_async(to, reinterpret_cast<const unsigned char *>(task.x));
                }
            }
            x += kGroups * kStepBytes;
        }
        --steps;
        step += kGroups;
        loaded = loaded + 1 == kStages<Weight> ? 0 : loaded + 1;
        commit_copies();
    }

    // Adds the products of the next step. Lane (g, q) = (lane / 4, lane % 4) holds tile q, for token g and rows of its own; a
    // product takes four columns of each of four tiles.
    __device__ void multiply(float (&sum)[kBands][kTiles][8]) {
        wait_copies<kStages<Weight> - 2>();
        meet_group(); // the others' copies, and all left what is filled next
        load();
        const SharedAddress stage = stages + multiplied * kStageBytes;
        multiplied = multiplied + 1 == kStages<Weight> ? 0 : multiplied + 1;
        const SharedAddress words = stage + warp * kWarpBytes + lane % 4 * kTileStride;
        const int g = lane / 4, q = lane % 4;
        Weight upper[kBands][2], lower[kBands][2];
#pragma unroll
        for (int index = 0; index < 2 * kBands; ++index) {
            Weight &high = upper[index / 2][index % 2], &low = lower[index / 2][index % 2];
            const SharedAddress tile_now = words + index / 2 * kBandBytes;
            const int first = row(lane, index % 2 * 4);
            if constexpr (Weight::kGroupScales) {
                Weight::take_two(tile_now + first * kRowBytes, tile_now + kTileBytes + first, high, low);
            } else {
                high = Weight::template take<kRows>(tile_now + first * kRowBytes);
                low = Weight::template take<kRows>(tile_now + row(lane, index % 2 * 4 + 2) * kRowBytes);
            }
            high.prepare();
            low.prepare();
        }
#pragma unroll
        for (int eight = 0; eight < 2; ++eight) { // columns of each tile
            unsigned a[2][2 * kBands][4];
#pragma unroll
            for (int index = 0; index < 4 * kBands; ++index) {
                const int j = index % 2, half = index / 2;
                unsigned *own = a[j][half];
                upper[half / 2][half % 2].quarter(2 * eight + j, own[0], own[2]);
                lower[half / 2][half % 2].quarter(2 * eight + j, own[1], own[3]);
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const uint4 x =
                    Weight::arrange(shared_16(stage + kTokensAt + chunk_place(tile * kTokens + g, 2 * q + eight)));
#pragma unroll
                for (int index = 0; index < 4 * kBands; ++index) {
                    const int j = index % 2, half = index / 2;
                    const unsigned *own = a[j][half];
                    multiply_16x8(sum[half / 2][tile] + 4 * (half % 2), own[0], own[1], own[2], own[3], j ? x.z : x.x,
                                  j ? x.w : x.y);
                }
            }
        }
    }
};

} // namespace wide
