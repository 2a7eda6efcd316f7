// What stands between a prompt's matrix products: fp16 results to FP32 columns of a wider buffer, and the gated MLP.
#include "common.cuh"

constexpr int kThreads = 256;

// The value of fp16 bits, an infinity (a product that overflowed) as the largest finite one, counted.
__device__ __forceinline__ float finite(unsigned bits, int &overflows) { return staged(half_value(bits), overflows); }

// part: fp16 [T, columns] to out: FP32 [T, columns], rows out_stride apart. Grid: (T).
extern "C" __global__ void __launch_bounds__(kThreads)
    staging_widen(const uint4 *part, float *out, int out_stride, int *overflows, int columns) {
    const uint4 *from = part + static_cast<size_t>(blockIdx.x) * (columns / 8);
    float *to = out + static_cast<size_t>(blockIdx.x) * out_stride;
    int overflowed = 0;
    for (int eight = threadIdx.x; eight < columns / 8; eight += kThreads) {
        const uint4 v = stream(from + eight);
        const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const unsigned a = pairs[2 * i], b = pairs[2 * i + 1];
            const float4 wide = {finite(a & 0xFFFF, overflowed), finite(a >> 16, overflowed), finite(b & 0xFFFF, overflowed),
                                 finite(b >> 16, overflowed)};
            write(reinterpret_cast<float4 *>(to + 8 * eight) + i, wide);
        }
    }
    count_overflows(overflowed, overflows ? overflows + blockIdx.x : nullptr);
}

// out = silu(gate) * up: fp16 [T, columns] each; out may be either of them. Grid: (T).
extern "C" __global__ void __launch_bounds__(kThreads)
    staging_swiglu(const uint4 *gate, const uint4 *up, uint4 *out, int *overflows, int columns) {
    const size_t row = static_cast<size_t>(blockIdx.x) * (columns / 8);
    int overflowed = 0;
    for (int eight = threadIdx.x; eight < columns / 8; eight += kThreads) {
        const uint4 g = read(gate + row + eight), u = read(up + row + eight);
        const unsigned gates[4] = {g.x, g.y, g.z, g.w}, ups[4] = {u.x, u.y, u.z, u.w};
        unsigned results[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = silu(finite(gates[i] & 0xFFFF, overflowed)) * finite(ups[i] & 0xFFFF, overflowed);
            const float high = silu(finite(gates[i] >> 16, overflowed)) * finite(ups[i] >> 16, overflowed);
            results[i] = staged_pair(low, high, overflowed);
        }
        write(out + row + eight, uint4{results[0], results[1], results[2], results[3]});
    }
    count_overflows(overflowed, overflows ? overflows + blockIdx.x : nullptr);
}
