// fp16 as bit patterns, and every access to global memory. The host emulation of the tests has its own of this file:
// it checks each address.
#pragma once

// Shared memory whose size is chosen at the launch.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

template <class T> __device__ __forceinline__ T read(const T *address) { return *address; }
// Read where it stands: the compiler moves it behind no branch and behind no other such read. A word or four.
template <class T> __device__ __forceinline__ T read_here(const T *address) {
    union {
        unsigned words[sizeof(T) / 4];
        T value;
    } found;
    static_assert(sizeof(T) == 4 || sizeof(T) == 16, "a word or four");
    if constexpr (sizeof(T) == 4) {
        asm volatile("ld.global.u32 %0, [%1];" : "=r"(found.words[0]) : "l"(address));
    } else {
        asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(found.words[0]), "=r"(found.words[1]), "=r"(found.words[2]), "=r"(found.words[3])
                     : "l"(address));
    }
    return found.value;
}
template <class T> __device__ __forceinline__ void write(T *address, T value) { *address = value; }

// Barrier `id`, 1 to 15, of `threads` threads in whole warps.
template <int id> __device__ __forceinline__ void meet(int threads) {
    asm volatile("bar.sync %0, %1;" ::"n"(id), "r"(threads) : "memory");
}

// Of integers alone: sums of floats would depend on the order of the threads.
__device__ __forceinline__ void add(int *address, int value) { atomicAdd(address, value); }

// Reads that pass once and should not push other data out of the caches.
template <class T> __device__ __forceinline__ T stream(const T *address) { return __ldcs(address); }

// Where launches overlap (sm_90 and newer, `overlap` of a launch): `await_previous` returns when all launches before have
// ended and what they wrote can be read; `admit_next` lets the next one begin. Until a kernel has waited it may only read
// weights, tables and what it alone keeps, and only write the latter; behind a `take_over`, which admits after it has waited,
// also read what is older than that launch. Elsewhere nothing happens.
__device__ __forceinline__ void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void admit_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void take_over() {
    await_previous();
    admit_next();
}

__device__ __forceinline__ float half_value(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return value;
}

// Nearest fp16, ties to even; above 65504 an infinity.
__device__ __forceinline__ unsigned half_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ unsigned subtract_pairs(unsigned a, unsigned b) {
    unsigned difference;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
    return difference;
}

// Two fp16 nearest to two values, the first in the lower half.
__device__ __forceinline__ unsigned half_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return half_bits(low) | half_bits(high) << 16;
#endif
}

// To a relative error of about 1e-7, in one instruction.
__device__ __forceinline__ float fast_inverse(float value) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
__device__ __forceinline__ float fast_inverse_root(float value) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
__device__ __forceinline__ float fast_exp2(float value) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
    return result;
}
