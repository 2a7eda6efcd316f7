// The outputs of the decode linear.
#pragma once
#include "linear_task.cuh"

constexpr float kLargestHalf = 65504.0f;

// The fp16 nearest to a value, +-65504 for what lies beyond; those are counted.
__device__ __forceinline__ unsigned short saturated(float value, unsigned *overflows) {
    if (fabsf(value) > kLargestHalf) {
        value = copysignf(kLargestHalf, value);
        if (overflows != nullptr) {
            atomicAdd(overflows, 1u);
        }
    }
    return static_cast<unsigned short>(half_bits(value));
}

__device__ __forceinline__ void store(const Task &task, const Matrix &matrix, size_t place, float value) {
    if (task.epilogue == kFloat) {
        static_cast<float *>(matrix.out)[place] = value;
    } else {
        static_cast<unsigned short *>(matrix.out)[place] = saturated(value, task.overflows);
    }
}
