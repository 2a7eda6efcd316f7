// Delta chunks: sizes of a chunk and of its rows in shared memory, and how its operands come there.
#pragma once
#include "ampere.cuh"
#include "delta.cuh"
#include "volta.cuh"
#include "warp_product.cuh"

constexpr int kChunk = 64;
constexpr int kTile = 16;
constexpr int kPitch = kHead + 8;          // rows of 128 fp16 in shared memory: 8 of them meet all banks
constexpr int kSquarePitch = kChunk + 8;   // rows of 64 fp16
constexpr int kWidePitch = kChunk + 4;     // rows of 64 FP32
constexpr bool kAsync = __CUDA_ARCH__ >= 800;
constexpr float kLog2e = 1.4426950408889634f;

// A chunk's rows of `columns` fp16 to shared memory; on sm_80 and newer they are there once the thread's copies were waited
// for and the block has met.
template <int columns, int threads>
__device__ __forceinline__ void stage(unsigned short *to, int to_pitch, const unsigned short *from, int from_pitch) {
    constexpr int kAcross = columns / 8, kEvery = threads / kAcross; // rows at a time
    const int row = threadIdx.x / kAcross, part = threadIdx.x % kAcross * 8;
    from += static_cast<size_t>(row) * from_pitch + part;
    to += row * to_pitch + part;
#pragma unroll
    for (int i = 0; i < kChunk / kEvery; ++i) {
#if __CUDA_ARCH__ >= 800
        copy_async(shared_address(to), reinterpret_cast<const unsigned char *>(from));
#else
        *reinterpret_cast<uint4 *>(to) = read(reinterpret_cast<const uint4 *>(from));
#endif
        to += kEvery * to_pitch;
        from += static_cast<size_t>(kEvery) * from_pitch;
    }
}

__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800
    commit_copies();
#endif
}
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
    wait_copies<0>();
#endif
}

__device__ __forceinline__ unsigned halves(float low, float high) {
    int none = 0;
    return staged_pair(low, high, none);
}
