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
    // A warp's part of a sum to where all of them find it; then they meet. `meanwhile(zero)`: what each does before it waits.
    template <class Meanwhile> __device__ __forceinline__ void share(float *scratch, float part, Meanwhile meanwhile) const {
        if (threadIdx.x % 32 == 0) {
            scratch[threadIdx.x / 32] = part;
        }
        meanwhile(0);
        __syncthreads();
    }
};

// Those of a cluster's blocks, in the order of one block that were as long: same sums, same bits. `told` in shared memory. kThreads:
// of all of them, 0 if the compiler does not know.
template <int kThreads> struct Cluster {
    int rank, blocks;
    Told *told;
    __device__ __forceinline__ Cluster(Told *place) : rank(cluster_rank()), blocks(cluster_blocks()), told(place) {}
    __device__ __forceinline__ int thread() const { return rank * blockDim.x + threadIdx.x; }
    __device__ __forceinline__ int threads() const { return kThreads ? kThreads : blocks * blockDim.x; }
    // Both once, by all threads, in this order, before `share`: best while something else is under way.
    __device__ __forceinline__ void begin() const {
        if (blocks > 1) {
            // Not of kThreads: what is known to the compiler it does without a branch, and one thread's making of the barrier by an
            // instruction of its whole warp, which racecheck takes for a race with the arrival behind it.
            begin_in_cluster(told, blocks * blockDim.x / 32 * sizeof(float));
        }
    }
    __device__ __forceinline__ void meet() const {
        if (blocks > 1) {
            await_beginnings();
        }
    }
    template <class Meanwhile> __device__ __forceinline__ void share(float *scratch, float part, Meanwhile meanwhile) const {
        if (blocks == 1) {
            OneBlock().share(scratch, part, meanwhile);
            return;
        }
        if (threadIdx.x % 32 < blocks) {
            tell(scratch + thread() / 32, part, threadIdx.x % 32, told);
        }
        meanwhile(zero_behind());
        await_told(told);
    }
};

// y = x / sqrt(mean(x^2) + eps) * (1 + weight), quad k * threads + thread of both in values[k] and weights[k], zero beyond the
// row. y goes to fp16 `half_out` and FP32 `wide_out`; what overflows is added to `overflows` (each may be null). scratch: kRowWarps
// floats from a multiple of 16 bytes on, that nobody else has read or written since the last barrier. `meanwhile(zero)`: what else there
// is to do with the row. kWhole: each thread has all its quads.
template <bool kWhole, class Threads, class Meanwhile>
__device__ __forceinline__ void normalise_row(const Threads &own, const float4 (&values)[kRowQuads],
                                              const float4 (&weights)[kRowQuads], int quads, float eps, unsigned short *half_out,
                                              float *wide_out, int *overflows, float *scratch, Meanwhile meanwhile) {
    float squares = 0;
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        squares += dot(values[k], values[k]);
    }
    float4 y[kRowQuads];
    float largest = 0; // passes over NaN
    own.share(scratch, warp_sum(squares), [&](int zero) {
        meanwhile(zero);
        const float small = __uint_as_float(__float_as_uint(kSmall) + zero);
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            const float4 v = values[k], w = weights[k];
            y[k] = {weighted(v.x, w.x, small), weighted(v.y, w.y, small), weighted(v.z, w.z, small), weighted(v.w, w.w, small)};
            largest = fmaxf(largest, largest_of(y[k]));
        }
    });
    const int warps = own.threads() / 32;
    float parts[kRowWarps]; // read at once, zero where there is no warp
#pragma unroll
    for (int i = 0; i < kRowWarps / 4; ++i) {
        const float4 four = reinterpret_cast<const float4 *>(scratch)[i];
        parts[4 * i] = 4 * i < warps ? four.x : 0;
        parts[4 * i + 1] = 4 * i + 1 < warps ? four.y : 0;
        parts[4 * i + 2] = 4 * i + 2 < warps ? four.z : 0;
        parts[4 * i + 3] = 4 * i + 3 < warps ? four.w : 0;
    }
#pragma unroll
    for (int step = 1; step < kRowWarps; step *= 2) { // neighbours first
#pragma unroll
        for (int i = 0; i < kRowWarps; i += 2 * step) {
            parts[i] += parts[i + step];
        }
    }
    const float factor = fast_inverse_root(parts[0] * fast_inverse(4 * quads) + eps) / kSmall;
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        y[k] = scaled(y[k], factor);
    }
    if (wide_out) {
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            const int quad = k * own.threads() + own.thread();
            if (kWhole || quad < quads) {
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
            if (kWhole || quad < quads) {
                write(reinterpret_cast<uint2 *>(half_out) + quad, uint2{half_pair(y[k].x, y[k].y), half_pair(y[k].z, y[k].w)});
            }
        }
    };
    store(); // on its way while it is looked at
    if (largest * factor > kLargestHalf) { // seldom: once more. Rounding keeps the order, so this is the largest of all y.
        int overflowed = 0;
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            y[k] = staged(y[k], overflowed);
        }
        count_overflows(overflowed, overflows);
        store();
    }
}
