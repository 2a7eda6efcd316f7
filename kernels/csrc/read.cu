// A kernel that only reads: the bandwidth that others are held against.
#include "half.cuh"

constexpr int kParts = 4; // that a thread asks for at once

// Blocks of 16 bytes, `step` apart.
__device__ __forceinline__ void ask(uint4 (&part)[kParts], const uint4 *data, int step) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        part[i] = __ldcs(data + i * step);
    }
}

__device__ __forceinline__ unsigned mixed(const uint4 (&part)[kParts]) {
    unsigned mix = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        mix ^= part[i].x ^ part[i].y ^ part[i].z ^ part[i].w;
    }
    return mix;
}

// Reads `count` blocks of 16 bytes; writes a word if all bits come out as they never do, so that loads cannot be dropped.
// Where launches overlap it asks for its first parts before the launch before it has ended, as the linears do for their first weights.
extern "C" __global__ void __launch_bounds__(512) read_plain(const uint4 *data, unsigned *never, int count) {
    const int step = gridDim.x * blockDim.x;
    unsigned mix = 0;
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    uint4 first[kParts] = {};
    if (index + (kParts - 1) * step < count) {
        ask(first, data + index, step);
        index += kParts * step;
    }
    take_over();
    for (; index + (kParts - 1) * step < count; index += kParts * step) {
        uint4 part[kParts];
        ask(part, data + index, step);
        mix ^= mixed(part);
    }
    for (; index < count; index += step) {
        const uint4 part = __ldcs(data + index);
        mix ^= part.x ^ part.y ^ part.z ^ part.w;
    }
    mix ^= mixed(first);
    if (mix == 0x9E3779B9u) {
        never[0] = mix;
    }
}
