// The RMSNorm of a row that a block holds in registers: the same bits in every kernel that ends in it.
#pragma once
#include "cluster.cuh"
#include "common.cuh"

constexpr int kRowThreads = 512; // at most: as many as take a row of `columns` four float4 at a time (`row_threads` in norm.py)
constexpr int kRowWarps = kRowThreads / 32;
constexpr int kRowQuads = 4;     // float4 a thread: rows of up to 8192 columns stay in registers

// The threads that hold a row: those of one block.
struct OneBlock {
    __device__ __forceinline__ OneBlock() {}
    __device__ __forceinline__ int thread() const { return threadIdx.x; }
    __device__ __forceinline__ int threads() const { return blockDim.x; }
    // A warp's part of a sum to where all of them find it; then they meet.
    __device__ __forceinline__ void share(float *scratch, float part) const {
        if (threadIdx.x % 32 == 0) {
            scratch[threadIdx.x / 32] = part;
        }
        __syncthreads();
    }
};

// Those of a cluster's blocks, in the order of one block that were as long: same sums, same bits. `told` in shared memory.
struct Cluster {
    int rank, blocks;
    Told *told;
    __device__ __forceinline__ Cluster(Told *place) : rank(cluster_rank()), blocks(cluster_blocks()), told(place) {}
    __device__ __forceinline__ int thread() const { return rank * blockDim.x + threadIdx.x; }
    __device__ __forceinline__ int threads() const { return blocks * blockDim.x; }
    // Both once, by all threads, in this order, before `share`: best while something else is under way.
    __device__ __forceinline__ void begin() const {
        if (blocks > 1) {
            begin_in_cluster(told, threads() / 32 * sizeof(float));
        }
    }
    __device__ __forceinline__ void meet() const {
        if (blocks > 1) {
            await_beginnings();
        }
    }
    __device__ __forceinline__ void share(float *scratch, float part) const {
        if (blocks == 1) {
            OneBlock().share(scratch, part);
            return;
        }
        if (threadIdx.x % 32 < blocks) {
            tell(scratch + thread() / 32, part, threadIdx.x % 32, told);
        }
        await_told(told);
    }
};

// y = x / sqrt(mean(x^2) + eps) * (1 + weight), quad k * threads + thread of both in values[k] and weights[k], zero beyond the
// row. y goes to fp16 `half_out` and FP32 `wide_out`; what overflows is added to `overflows` (each may be null). scratch: kRowWarps
// floats from a multiple of 16 bytes on, that nobody else has read or written since the last barrier.
template <class Threads>
__device__ __forceinline__ void normalise_row(const Threads &own, const float4 (&values)[kRowQuads],
                                              const float4 (&weights)[kRowQuads], int quads, float eps,
                                              unsigned short *half_out, float *wide_out, int *overflows, float *scratch) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        squares += dot(values[k], values[k]);
    }
    own.share(scratch, warp_sum(squares));
    const int warps = own.threads() / 32;
    float4 parts[kRowWarps / 4]; // read at once, added in their order
#pragma unroll
    for (int i = 0; i < kRowWarps / 4; ++i) {
        parts[i] = reinterpret_cast<const float4 *>(scratch)[i];
    }
    float total = parts[0].x;
#pragma unroll
    for (int warp = 1; warp < kRowWarps; ++warp) {
        const float4 &four = parts[warp / 4];
        const float part = warp % 4 == 0 ? four.x : warp % 4 == 1 ? four.y : warp % 4 == 2 ? four.z : four.w;
        total = warp < warps ? total + part : total;
    }
    const float inverse = fast_inverse_root(total * fast_inverse(4 * quads) + eps);
    float4 y[kRowQuads];
    float largest = 0; // passes over NaN
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        const float4 v = values[k], w = weights[k];
        y[k] = {v.x * inverse * (1.0f + w.x), v.y * inverse * (1.0f + w.y), v.z * inverse * (1.0f + w.z),
                v.w * inverse * (1.0f + w.w)};
        largest = fmaxf(largest, largest_of(y[k]));
    }
    if (wide_out) {
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            const int quad = k * own.threads() + own.thread();
            if (quad < quads) {
                write(reinterpret_cast<float4 *>(wide_out) + quad, y[k]);
            }
        }
    }
    if (!half_out) {
        return;
    }
    const auto store = [&]() {
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            const int quad = k * own.threads() + own.thread();
            if (quad < quads) {
                write(reinterpret_cast<uint2 *>(half_out) + quad, uint2{half_pair(y[k].x, y[k].y), half_pair(y[k].z, y[k].w)});
            }
        }
    };
    store(); // on its way while it is looked at
    if (largest > kLargestHalf) { // seldom: once more
        int overflowed = 0;
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            y[k] = staged(y[k], overflowed);
        }
        count_overflows(overflowed, overflows);
        store();
    }
}
