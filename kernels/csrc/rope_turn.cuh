// Rotary embedding and the Hadamard turn of heads that lie in a warp: what the forms for few and for many tokens share.
#pragma once
#include "rope_store.cuh"

constexpr int kHalfTurned = 32; // pairs (j, j + 32) of the first 64 dimensions turn

// Multiplied by the 256 x 256 Hadamard matrix (Sylvester's order). Over 16 it is orthonormal: products of a turned query
// and a turned key are those of the unturned ones, and outliers of a key are spread over all dimensions.
constexpr float kTurnScale = 0.0625f;

__device__ __forceinline__ void butterfly(float &a, float &b) {
    const float low = a;
    a = low + b;
    b = low - b;
}

// The steps between kLanes lanes that stand side by side.
template <int kLanes, int kCount> __device__ __forceinline__ void butterflies_between(float (&v)[kCount], int lane) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float other = __shfl_xor_sync(kAll, v[i], step);
            v[i] = fmaf(v[i], sign, other);
        }
    }
}

// Half of a head's results, those of dimensions 128 half + 4 lane .. + 3, of eight values a lane.
__device__ __forceinline__ void hadamard_half(float (&v)[kOwn], int half, int lane, float (&out)[kHalfOwn]) {
#pragma unroll
    for (int step = 1; step < kHalfOwn; step *= 2) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (!(i & step)) {
                butterfly(v[i], v[i + step]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kHalfOwn; ++i) {
        out[i] = v[i] + (half ? -v[i + kHalfOwn] : v[i + kHalfOwn]);
    }
    butterflies_between<32>(out, lane);
}

// The same steps in the same order on two heads side by side, lanes 0 .. 15 and 16 .. 31: what was a step between lanes 16 apart
// is one in a lane.
__device__ __forceinline__ void hadamard_pair(float (&v)[kPairOwn], int part) {
#pragma unroll
    for (int step = 1; step < kPairOwn; step *= step == 2 ? 4 : 2) {
#pragma unroll
        for (int i = 0; i < kPairOwn; ++i) {
            if (!(i & step)) {
                butterfly(v[i], v[i + step]);
            }
        }
    }
    butterflies_between<16>(v, part);
#pragma unroll
    for (int i = 0; i < kPairOwn; ++i) {
        if (!(i & 4)) {
            butterfly(v[i], v[i + 4]);
        }
    }
}

// What fits fp16, in place; how many did not.
template <int kCount> __device__ __forceinline__ int staged_all(float (&v)[kCount]) {
    float largest = 0; // a NaN is passed over, and stays
    int overflowed = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        largest = fmaxf(largest, fabsf(v[i]));
    }
    if (largest > kLargestHalf) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            v[i] = staged(v[i], overflowed);
        }
    }
    return overflowed;
}

// Where a token stands: lane i has read its position on axis i, and the axis of pair i. Where launches overlap, that is older than
// the projection, which the launch before writes.
struct Place {
    int axis, position;
    __device__ __forceinline__ Place(int token, int tokens, const int *positions, const int *axes)
        : axis(read_here(axes + threadIdx.x % 32)),
          position(read_here(positions + min(static_cast<int>(threadIdx.x % 32), 2) * tokens + token)) {}
};

// The angle of pair `lane`, as the tables have it: NaN where they do not.
struct Angle {
    float cosine, sine;
    __device__ __forceinline__ Angle(const Place &place, const float *cosines, const float *sines, int table_rows) {
        const int position = __shfl_sync(kAll, place.position, place.axis == 1 ? 1 : place.axis == 2 ? 2 : 0);
        const bool known = position >= 0 && position < table_rows;
        const size_t at = static_cast<size_t>(known ? position : 0) * kHalfTurned + threadIdx.x % 32;
        const float missing = __uint_as_float(0x7FC00000u);
        cosine = known ? read(cosines + at) : missing;
        sine = known ? read(sines + at) : missing;
    }
    // Of the four dimensions from `first` on, the sine with its sign.
    __device__ __forceinline__ void spread(int first, bool lower, float (&cosines)[4], float (&sines)[4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pair = (first + i) % kHalfTurned;
            cosines[i] = __shfl_sync(kAll, cosine, pair);
            const float turn = __shfl_sync(kAll, sine, pair);
            sines[i] = lower ? -turn : turn;
        }
    }
};

// A dimension with its partner's value and the sine's sign. Which product is fused must not be the compiler's choice.
__device__ __forceinline__ float turn(float v, float other, float cosine, float sine) {
    return fmaf(v, cosine, __fmul_rn(other, sine));
}

// What turned heads are multiplied by in the end, as `weighted` made them small.
template <class Store> __device__ __forceinline__ float norm_factor(float squares, float eps) {
    return fast_inverse_root(squares / kDim + eps) * ((Store::kTurned ? kTurnScale : 1.0f) / kSmall);
}

template <int kCount> __device__ __forceinline__ void scale_all(float (&v)[kCount], float factor) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        v[i] = __fmul_rn(v[i], factor);
    }
}
