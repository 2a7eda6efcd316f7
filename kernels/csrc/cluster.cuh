// Blocks of a launch that run at once and reach each other's shared memory (clusters; sm_90 and newer, elsewhere a block is one
// by itself). The host emulation of the tests has its own of this file.
#pragma once

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ int cluster_blocks() {
    int blocks;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
    return blocks;
}
__device__ __forceinline__ int cluster_rank() {
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Of every thread, once, in this order: it has begun; all have, so that their blocks may be written to; all have written, and see
// what was written.
__device__ __forceinline__ void begin_in_cluster() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_beginnings() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void meet_in_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Into the same place of block `rank`.
__device__ __forceinline__ void tell(float *shared, float value, int rank) {
    const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("{.reg .u32 place;\n mapa.shared::cluster.u32 place, %0, %1;\n st.shared::cluster.f32 [place], %2;}" ::"r"(own),
                 "r"(rank), "f"(value)
                 : "memory");
}
#else
__device__ __forceinline__ int cluster_blocks() { return 1; }
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ void begin_in_cluster() {}
__device__ __forceinline__ void await_beginnings() {}
__device__ __forceinline__ void meet_in_cluster() { __syncthreads(); }
__device__ __forceinline__ void tell(float *shared, float value, int) { *shared = value; }
#endif
