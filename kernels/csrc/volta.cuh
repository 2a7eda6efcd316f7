// The sm_70 instructions that C++ cannot name. fp16 pairs travel as unsigned bit patterns.
#pragma once

// Product of fp16 pairs, subnormals kept.
__device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Four 8 x 8 x 4 products at once, one a quad-pair (lanes 4q..4q+3 and 16+4q..16+4q+3): sum += a b, fp16 in, FP32 out.
// a: lane l holds row (l & 3) + (l < 16 ? 0 : 4), its four columns in two pairs.
// b: lane l holds column (l & 3) + (l < 16 ? 0 : 4), its four rows in two pairs.
// sum[i]: row (l & 1) + (i & 2) + (l < 16 ? 0 : 4), column (i & 4) + (l & 2) + (i & 1).
// (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type")
__device__ __forceinline__ void multiply_accumulate(float (&sum)[8], unsigned a0, unsigned a1, unsigned b0,
                                                    unsigned b1) {
    asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}

// The nearest fp16, ties to even.
__device__ __forceinline__ unsigned short half_bits(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float half_value(unsigned bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits))); // the lower half
    return value;
}

// Two fp16 nearest to two values, the first in the lower half.
__device__ __forceinline__ unsigned half_pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return half_bits(low) | static_cast<unsigned>(half_bits(high)) << 16;
#endif
}

// The shared memory whose size the launch gives.
__device__ __forceinline__ unsigned char *dynamic_shared() {
    extern __shared__ __align__(16) unsigned char bytes[];
    return bytes;
}

// Shared memory by its own 32-bit addresses: reads keep their order with the waits for copies.
using SharedAddress = unsigned;

__device__ __forceinline__ SharedAddress shared_address(void *shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ unsigned shared_1(SharedAddress address) {
    unsigned value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ uint2 shared_8(SharedAddress address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
    return value;
}

__device__ __forceinline__ uint4 shared_16(SharedAddress address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address));
    return value;
}

// 16 bytes through the read-only cache, issued where it stands.
__device__ __forceinline__ uint4 read_now(const void *address) {
    uint4 value;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}
