// Kernels of sm_90 and newer that start before the one ahead of them in the stream has ended (programmatic dependent
// launch; module.py asks for it). Such a kernel calls `wait_for_previous` before it reads what others write or writes
// anything; then everything before it in the stream has been done. Elsewhere both do nothing.
#pragma once

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start, as far as it asked for it: it waits by itself.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDACC_RTC__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
