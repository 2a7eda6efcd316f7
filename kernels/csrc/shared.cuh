// Shared memory by addresses of its own, and loads that stay where they stand.
#pragma once

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

__device__ __forceinline__ unsigned shared_2(SharedAddress address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ unsigned shared_1(SharedAddress address) {
    unsigned value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ unsigned shared_4(SharedAddress address) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
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

// The same of what the launch before may have written while this one was already under way: the read-only cache is for what
// nobody writes as long as a kernel lives.
__device__ __forceinline__ uint4 read_fresh(const void *address) {
    uint4 value;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

// The same kOffset bytes on, where `wanted` is true, without a branch; elsewhere any numbers.
template <int kOffset> __device__ __forceinline__ uint4 read_fresh_if(bool wanted, const void *address) {
    uint4 value;
    asm volatile("{.reg .pred wanted;\n setp.ne.b32 wanted, %5, 0;\n"
                 " @wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4 + %6];}"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address), "r"(static_cast<int>(wanted)), "n"(kOffset));
    return value;
}

// Brings the line of an address into the second-level cache.
__device__ __forceinline__ void prefetch(const void *address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// The same value, that the compiler keeps in a register instead of computing it again.
__device__ __forceinline__ int kept(int value) {
    int same;
    asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(value));
    return same;
}

// Another lane's value; all lanes of a warp ask.
__device__ __forceinline__ float from_lane(float value, int lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }

// A value that all lanes of a warp have, which the compiler knows afterwards.
__device__ __forceinline__ unsigned uniform(unsigned value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

// The same value, of which the compiler knows nothing: what it is made of is not computed anew where it is used.
__device__ __forceinline__ int opaque(int value) { return __shfl_sync(0xFFFFFFFFu, value, threadIdx.x % 32); }
__device__ __forceinline__ unsigned opaque(unsigned value) { return opaque(static_cast<int>(value)); }
__device__ __forceinline__ const unsigned char *opaque(const unsigned char *address) {
    const unsigned long long bits = reinterpret_cast<unsigned long long>(address);
    const unsigned long long low = opaque(static_cast<unsigned>(bits)), high = opaque(static_cast<unsigned>(bits >> 32));
    return reinterpret_cast<const unsigned char *>(high << 32 | low);
}
