// Reductions in a fixed order, staging to fp16, and the pointwise functions of the model.
#pragma once
#include "half.cuh"

constexpr float kLargestHalf = 65504.0f;
// A norm's factor comes last, after what is linear: its sum is under way meanwhile. What is weighted before it is made small, so
// that no finite element overflows; a power of two, which changes no bits.
constexpr float kSmall = 0x1p-16f;
constexpr unsigned kAll = 0xFFFFFFFFu;
#if __CUDA_ARCH__ >= 900
constexpr bool kOverlaps = true; // whether a launch may begin before the one before it has ended
#else
constexpr bool kOverlaps = false;
#endif

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        value += __shfl_xor_sync(kAll, value, step);
    }
    return value;
}

// Zero in blocks of one dimension, of which the compiler does not know so: what counts with it stays behind what the warp has done.
__device__ __forceinline__ int zero_behind() { return __shfl_sync(kAll, threadIdx.y, threadIdx.x % 32); }

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        value = fmaxf(value, __shfl_xor_sync(kAll, value, step));
    }
    return value;
}

// The sum over a block, known to all its threads: warps in the order of their numbers. `scratch` holds a float a warp.
__device__ __forceinline__ float block_sum(float value, float *scratch) {
    value = warp_sum(value);
    __syncthreads(); // the scratch may still be read from the sum before
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float total = scratch[0];
    for (int warp = 1; warp < blockDim.x / 32; ++warp) {
        total += scratch[warp];
    }
    return total;
}

// A value that fits fp16: what overflows becomes the largest finite one and is counted; NaN stays NaN.
__device__ __forceinline__ float staged(float value, int &overflows) {
    const float size = fabsf(value);
    overflows += size > kLargestHalf;
    return size > kLargestHalf ? copysignf(kLargestHalf, value) : value;
}

__device__ __forceinline__ unsigned staged_pair(float low, float high, int &overflows) {
    return half_pair(staged(low, overflows), staged(high, overflows));
}

__device__ __forceinline__ float4 staged(float4 v, int &overflows) {
    return {staged(v.x, overflows), staged(v.y, overflows), staged(v.z, overflows), staged(v.w, overflows)};
}

__device__ __forceinline__ float largest_of(float4 v) { // passes over NaN
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// Four of them to fp16: looked at one by one only if one overflows.
__device__ __forceinline__ uint2 staged_four(float4 v, int &overflows) {
    if (largest_of(v) > kLargestHalf) {
        v = staged(v, overflows);
    }
    return {half_pair(v.x, v.y), half_pair(v.z, v.w)};
}

// Adds a thread's overflows to its row's count: seldom any.
__device__ __forceinline__ void count_overflows(int overflows, int *count) {
    if (count && overflows > 0) {
        add(count, overflows);
    }
}

// Divisions and roots to a relative error of 1e-7, without the branches of the exact ones: several go side by side.
__device__ __forceinline__ float sigmoid(float x) { return fast_inverse(1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float softplus(float x) { return log1pf(expf(-fabsf(x))) + fmaxf(x, 0.0f); }

// Times (1 + weight) kSmall. Rounded: whether it is fused with a sum must not be the compiler's choice.
__device__ __forceinline__ float weighted(float v, float weight, float small = kSmall) { return __fmul_rn(v, fmaf(weight, small, small)); }

__device__ __forceinline__ float4 scaled(float4 v, float factor) {
    return {v.x * factor, v.y * factor, v.z * factor, v.w * factor};
}
__device__ __forceinline__ float dot(float4 a, float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
