// The wide linear's steps for sm_70: m8n8k4, a lane a row of each band, weights from memory to registers a step ahead; the
// tokens' values pass through registers to shared memory.
#pragma once
#include "encodings.cuh"
#include "volta.cuh"
#include "wide.cuh"

namespace wide {

template <class Weight, int kTiles> struct VoltaSteps {
    static constexpr int kBufferBytes = kTiles * kTokens * kStepBytes;
    static constexpr int kCopies = kBufferBytes / 16 / kGroupThreads; // of a thread: at most one a tile
    static_assert(kCopies <= kStepTiles, "");

    const Task &task;
    const Matrix *matrix[kBands];
    int band[kBands];
    unsigned char *now, *other; // the tokens' step at work, and the one to come
    Weight next[kStepTiles][kBands];
    int lane, first_token, step, steps; // of this group: at work, and left with it

    // Turns first .. end of the bands from `number` on; beyond the last band, that band again: its sums go nowhere.
    __device__ VoltaSteps(const Task &task, int number, int first_token, int first, int end, unsigned char *memory)
        : task(task), lane(threadIdx.x % 32), first_token(first_token), steps(end - first) {
        const int group = threadIdx.x / kGroupThreads;
        step = kGroups * first + group;
        now = memory + 2 * group * kBufferBytes;
        other = now + kBufferBytes;
#pragma unroll
        for (int half = 0; half < kBands; ++half) {
            matrix[half] = &matrix_at(task, min(number + half, bands_of(task) - 1), band[half]);
        }
#pragma unroll
        for (int tile = 0; tile < kStepTiles; ++tile) {
            load_weights(step, tile);
        }
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            store_tokens(now, i, token_bytes(step, i));
        }
        meet_group();
    }

    __device__ static int token(int lane, int i) { return (lane & 1) + (i & 2) + lane / 16 * 4; }
    __device__ static int row(int lane, int i) {
        const int column = (i & 4) + (lane & 2) + (i & 1); // of the quad-pair's eight weight rows
        return lane / 4 % 4 * 4 + column % 4 + column / 4 * 16;
    }

    __device__ void load_weights(int step, int tile) {
        const int group = step * kStepTiles + tile;
#pragma unroll
        for (int half = 0; half < kBands; ++half) {
            const size_t own = (static_cast<size_t>(band[half]) * task.groups + group) * kRows + lane;
            next[tile][half] = group < task.groups
                                   ? Weight::load(matrix[half]->words, matrix[half]->group_scales, own)
                                   : Weight{};
        }
    }

    // The tokens' 16 bytes number i of this thread in a step.
    __device__ uint4 token_bytes(int step, int i) const {
        const int index = i * kGroupThreads + threadIdx.x % kGroupThreads, token = first_token + index / kChunks;
        const int chunk = step * kChunks + index % kChunks;
        uint4 bytes = {};
        if (token < task.tokens && chunk < 2 * task.groups) {
            bytes = __ldg(reinterpret_cast<const uint4 *>(task.x) + static_cast<size_t>(token) * 2 * task.groups + chunk);
        }
        return bytes;
    }

    __device__ static void store_tokens(unsigned char *buffer, int i, uint4 bytes) {
        const int index = i * kGroupThreads + threadIdx.x % kGroupThreads;
        *reinterpret_cast<uint4 *>(buffer + chunk_place(index / kChunks, index % kChunks)) = bytes;
    }

    // Adds the products of the next step.
    __device__ void multiply(float (&sum)[kBands][kTiles][8]) {
        const bool more = steps > 1;
        const int own_token = lane % 4 + lane / 16 * 4;
#pragma unroll
        for (int tile = 0; tile < kStepTiles; ++tile) {
            unsigned pairs[kBands][8];
#pragma unroll
            for (int half = 0; half < kBands; ++half) {
                Weight weight = next[tile][half];
                weight.prepare();
#pragma unroll
                for (int pair = 0; pair < 8; ++pair) {
                    pairs[half][pair] = weight.pair(pair);
                }
            }
            if (more) {
                load_weights(step + kGroups, tile);
            }
            uint4 bytes = {}; // of the next step: on their way during this tile's products
            if (more && tile < kCopies) {
                bytes = token_bytes(step + kGroups, tile);
            }
#pragma unroll
            for (int tokens = 0; tokens < kTiles; ++tokens) {
#pragma unroll
                for (int eight = 0; eight < 2; ++eight) {
                    const uint4 x = *reinterpret_cast<const uint4 *>(
                        now + chunk_place(tokens * kTokens + own_token, 2 * tile + eight));
#pragma unroll
                    for (int half = 0; half < kBands; ++half) {
                        const unsigned *own = pairs[half] + 4 * eight;
                        multiply_accumulate(sum[half][tokens], x.x, x.y, own[0], own[1]);
                        multiply_accumulate(sum[half][tokens], x.z, x.w, own[2], own[3]);
                    }
                }
            }
            if (more && tile < kCopies) {
                store_tokens(other, tile, bytes);
            }
        }
        meet_group(); // the next step is there, this one's place is free
        step += kGroups;
        --steps;
        unsigned char *left = now;
        now = other;
        other = left;
    }
};

} // namespace wide
