// Copies of whole pieces into shared memory that one thread orders and no register passes through (sm_90 and newer). The
// host emulation of the tests has its own of this file.
#pragma once
#if __CUDA_ARCH__ >= 900
// In shared memory: counts landings. Landing n, from 0 on, is waited for with the lowest bit of n, and only one at a time.
using Landing = unsigned long long;

__device__ __forceinline__ unsigned shared_place(const void *shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// By one thread, before it orders anything; others see it behind a barrier.
__device__ __forceinline__ void expect_landings(Landing *landing) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_place(landing))
                 : "memory");
}

// By that thread: `bytes`, a multiple of 16, both addresses too. What the copy is to overwrite must have been read before; what
// this thread may read, the copy may: it goes another way than loads and stores, hence the fence.
__device__ __forceinline__ void copy_bulk(void *shared, const void *global, unsigned bytes, Landing *landing) {
    asm volatile("fence.proxy.async.global;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_place(landing)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_place(shared)),
                 "l"(global), "r"(bytes), "r"(shared_place(landing))
                 : "memory");
}

__device__ __forceinline__ void await_landing(Landing *landing, unsigned parity) {
    unsigned landed;
    do {
        asm volatile("{.reg .pred done;\n mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     " selp.u32 %0, 1, 0, done;}"
                     : "=r"(landed)
                     : "r"(shared_place(landing)), "r"(parity)
                     : "memory");
    } while (!landed);
}
#endif
