// What stands between a prompt's matrix products: fp16 results to FP32 columns of a wider buffer, and the gated MLP.
#include "common.cuh"

constexpr int kThreads = 256;

// The value of fp16 bits times `rest`; what fp16 cannot hold (a product that overflowed) as the largest finite one, counted.
__device__ __forceinline__ float finite(unsigned bits, int &overflows, float rest = 1.0f) {
    return staged(half_value(bits) * rest, overflows);
}

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

// out = silu(gate * gate_rest) * (up * up_rest): fp16 [T, columns] each, rows of gate and of up `stride` apart; out may be either of
// them where it has the same rows. Grid: (T).
extern "C" __global__ void __launch_bounds__(kThreads)
    staging_swiglu(const uint4 *gate, const uint4 *up, int stride, float gate_rest, float up_rest, uint4 *out, int *overflows,
                   int columns) {
    const size_t row = static_cast<size_t>(blockIdx.x) * (stride / 8), to = static_cast<size_t>(blockIdx.x) * (columns / 8);
    int overflowed = 0;
    for (int eight = threadIdx.x; eight < columns / 8; eight += kThreads) {
        const uint4 g = read(gate + row + eight), u = read(up + row + eight);
        const unsigned gates[4] = {g.x, g.y, g.z, g.w}, ups[4] = {u.x, u.y, u.z, u.w};
        unsigned results[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float low = silu(finite(gates[i] & 0xFFFF, overflowed, gate_rest)) * finite(ups[i] & 0xFFFF, overflowed, up_rest);
            const float high = silu(finite(gates[i] >> 16, overflowed, gate_rest)) * finite(ups[i] >> 16, overflowed, up_rest);
            results[i] = staged_pair(low, high, overflowed);
        }
        write(out + to + eight, uint4{results[0], results[1], results[2], results[3]});
    }
    count_overflows(overflowed, overflows ? overflows + blockIdx.x : nullptr);
}
