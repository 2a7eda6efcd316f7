// Blocks that share one item's warps: a cluster on sm_90 and newer, the block alone before.
#pragma once
#include "shared.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_size() {
    int size;
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    return size;
}

__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all blocks of the cluster in two halves: what was written before the first is seen after the second.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The place in the first block's shared memory that corresponds to one in this block's.
__device__ __forceinline__ SharedAddress in_first_block(SharedAddress address) {
    SharedAddress there;
    asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(address));
    return there;
}

__device__ __forceinline__ void write_shared(SharedAddress address, float value) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
#else
__device__ __forceinline__ constexpr int cluster_size() { return 1; }
__device__ __forceinline__ constexpr int cluster_rank() { return 0; }
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void cluster_wait() { __syncthreads(); }
__device__ __forceinline__ SharedAddress in_first_block(SharedAddress address) { return address; }

__device__ __forceinline__ void write_shared(SharedAddress address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
#endif
