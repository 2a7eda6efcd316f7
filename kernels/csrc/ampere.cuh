// What sm_80 and newer have in place of sm_70's: a larger product, copies to shared memory that need no registers, and
// (sm_89) the conversion of E4M3.
#pragma once
#include "shared.cuh"

// sum += a b for a 16 x 16, b 16 x 8, fp16 in, FP32 out. With g = lane / 4 and q = lane % 4:
// a: (g, 2q..), (g + 8, 2q..), (g, 2q + 8..), (g + 8, 2q + 8..), two columns each; b: (2q.., g), (2q + 8.., g);
// sum: (g, 2q), (g, 2q + 1), (g + 8, 2q), (g + 8, 2q + 1).
// (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type")
__device__ __forceinline__ void multiply_16x8(float *sum, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                              unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for eight rows, a0 and a2; sum[2] and sum[3] are any numbers.
__device__ __forceinline__ void multiply_8x8(float *sum, unsigned a0, unsigned a2, unsigned b0, unsigned b1) {
    asm("{.reg .b32 any;\n mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, any, %5, any}, {%6, %7}, "
        "{%0, %1, %2, %3};}"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a2), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, past the first-level cache.
__device__ __forceinline__ void copy_async(SharedAddress shared, const unsigned char *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// 16 bytes to global memory, every other of which is among the last to leave the second-level cache: were all of them, they would push
// one another out.
__device__ __forceinline__ void store_to_stay(uint4 *global, uint4 words) {
    unsigned long long half_to_stay;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 0.5;" : "=l"(half_to_stay));
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(global), "r"(words.x), "r"(words.y),
                 "r"(words.z), "r"(words.w), "l"(half_to_stay)
                 : "memory");
}

// The same of what passes once: the first to leave the second-level cache, where the activations should stay.
__device__ __forceinline__ void copy_once(SharedAddress shared, const unsigned char *global) {
    unsigned long long first_to_leave;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_leave));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "l"(first_to_leave)
                 : "memory");
}

// The same by lanes that `wanted` is true for, without a branch.
__device__ __forceinline__ void copy_once_if(bool wanted, SharedAddress shared, const unsigned char *global) {
    unsigned long long first_to_leave;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_leave));
    asm volatile("{.reg .pred wanted;\n setp.ne.b32 wanted, %3, 0;\n"
                 " @wanted cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;}" ::"r"(shared),
                 "l"(global), "l"(first_to_leave), "r"(static_cast<int>(wanted))
                 : "memory");
}

// The same kShared and kGlobal bytes on, by all lanes; one instruction where the offsets are known to the compiler.
template <int kShared, int kGlobal> __device__ __forceinline__ void copy_once(SharedAddress shared, const unsigned char *global) {
    unsigned long long first_to_leave;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first_to_leave));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0 + %3], [%1 + %4], 16, %2;" ::"r"(shared), "l"(global),
                 "l"(first_to_leave), "n"(kShared), "n"(kGlobal)
                 : "memory");
}

// Four or eight bytes likewise, through the first-level cache, which copies of fewer than 16 need.
template <int kBytes, int kShared, int kGlobal>
__device__ __forceinline__ void copy_few(SharedAddress shared, const unsigned char *global) {
    asm volatile("cp.async.ca.shared.global [%0 + %2], [%1 + %3], %4;" ::"r"(shared), "l"(global), "n"(kShared),
                 "n"(kGlobal), "n"(kBytes)
                 : "memory");
}

// 16 zeros in place of what is not there; `global` is any valid address.
__device__ __forceinline__ void zero_async(SharedAddress shared, const unsigned char *global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, 0;" ::"r"(shared), "l"(global) : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's groups are under way.
template <int pending> __device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Two E4M3 bytes, the lower one to the lower half; exact.
__device__ __forceinline__ unsigned e4m3_pair(unsigned short bytes) {
#if __CUDA_ARCH__ >= 890
    unsigned pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(bytes));
    return pair;
#else
    return 0; // not called
#endif
}

// Bytes of a and b by the nibbles of `selector`.
__device__ __forceinline__ unsigned permute(unsigned a, unsigned b, unsigned selector) {
    return __byte_perm(a, b, selector);
}

// Bits of `a` where `mask` has ones, of `b` elsewhere, by one instruction: the compiler's own way takes two.
__device__ __forceinline__ unsigned chosen(unsigned mask, unsigned a, unsigned b) {
    unsigned bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(bits) : "r"(mask), "r"(a), "r"(b));
    return bits;
}

// One half of a pair in both halves.
__device__ __forceinline__ unsigned both_lower(unsigned pair) {
    unsigned both;
    asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {low, low};}" : "=r"(both) : "r"(pair));
    return both;
}
__device__ __forceinline__ unsigned both_upper(unsigned pair) {
    unsigned both;
    asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %1;\n mov.b32 %0, {high, high};}" : "=r"(both) : "r"(pair));
    return both;
}
