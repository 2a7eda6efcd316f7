// Blocks of a launch that run at once and reach each other's shared memory (clusters; sm_90 and newer, elsewhere a block is one
// by itself). The host emulation of the tests has its own of this file.
#pragma once

// In shared memory: counts the bytes that a block has been told. Barriers of a whole cluster would do as well, but what they
// release waits for all that was written to global memory before.
using Told = unsigned long long;

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
// Which of the launch's clusters: each is a row of the grid. A division tells it, too, but takes as long as a sum over a warp.
__device__ __forceinline__ unsigned cluster_index() { return cluster_blocks() > 1 ? blockIdx.y : blockIdx.x; }

__device__ __forceinline__ unsigned shared_address(const void *shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Of every thread of a cluster, once, in this order: it has begun, to be told `bytes` in all; all have begun, so that they may be
// told; all that its block is told has come, and can be read.
__device__ __forceinline__ void begin_in_cluster(Told *told, unsigned bytes) {
    if (threadIdx.x == 0) {
        const unsigned own = shared_address(told);
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(own) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(own), "r"(bytes) : "memory");
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
__device__ __forceinline__ void await_beginnings() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void await_told(Told *told) {
    unsigned come;
    do {
        asm volatile("{.reg .pred done;\n mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n selp.u32 %0, 1, 0, done;}"
                     : "=r"(come)
                     : "r"(shared_address(told))
                     : "memory");
    } while (!come);
}

// Into the same place of block `rank`, four bytes.
__device__ __forceinline__ void tell(float *shared, float value, int rank, Told *told) {
    asm volatile("{.reg .u32 place, count;\n mapa.shared::cluster.u32 place, %0, %2;\n mapa.shared::cluster.u32 count, %1, %2;\n"
                 " st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], %3, [count];}" ::"r"(
                     shared_address(shared)),
                 "r"(shared_address(told)), "r"(rank), "r"(__float_as_uint(value))
                 : "memory");
}
#else
__device__ __forceinline__ int cluster_blocks() { return 1; }
__device__ __forceinline__ int cluster_rank() { return 0; }
__device__ __forceinline__ unsigned cluster_index() { return blockIdx.x; }
__device__ __forceinline__ void begin_in_cluster(Told *, unsigned) {}
__device__ __forceinline__ void await_beginnings() {}
__device__ __forceinline__ void await_told(Told *) {}
__device__ __forceinline__ void tell(float *, float, int, Told *) {}
#endif
