// Normalisations, the embedding gather and the output gate: one block a token or more, float32 in, fp16 out for the next product.
#include "norm_row.cuh"

constexpr int kThreads = 256;

// x: FP32 [T, columns], one row every x_stride; delta (may be null): FP32 likewise, added to x in place first.
// y = x / sqrt(mean(x^2) + eps) * (1 + weight), to fp16 `half_out` and FP32 `wide_out` (either may be null).
// A row a cluster, whose threads together hold it. kColumns: of a row, 0 if the compiler does not know.
template <int kColumns>
__device__ __forceinline__ void norm_rows(float *x, int x_stride, const float *delta, int delta_stride, const float *weight,
                                          unsigned short *half_out, int half_stride, float *wide_out, int wide_stride,
                                          int *overflows, int columns, float eps) {
    __shared__ __align__(16) float scratch[kRowWarps];
    __shared__ Told told;
    constexpr int kThreads = (kColumns + kRowQuads * 4 * 32 - 1) / (kRowQuads * 4 * 32) * 32; // `row_threads` in norm.py
    constexpr bool kWhole = kColumns > 0 && kColumns == kThreads * kRowQuads * 4;              // each thread has all its quads
    const Cluster<kThreads> team(&told);
    const size_t row = cluster_index();
    const int quads = (kColumns ? kColumns : columns) / 4;
    float4 *own = reinterpret_cast<float4 *>(x + row * x_stride);
    const float4 *added = reinterpret_cast<const float4 *>(delta + row * delta_stride);
    float4 values[kRowQuads], weights[kRowQuads], more[kRowQuads] = {}; // all asked for at once, where they stand: one wait
    admit_next();
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        const int quad = k * team.threads() + team.thread();
        const float4 *from = reinterpret_cast<const float4 *>(weight) + quad;
        weights[k] = kWhole || quad < quads ? kOverlaps ? read_here(from) : read(from) : float4{};
    }
    await_previous();
    if (delta) {
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            const int quad = k * team.threads() + team.thread();
            if (kWhole || quad < quads) {
                more[k] = read_here(added + quad);
            }
        }
    }
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        const int quad = k * team.threads() + team.thread();
        values[k] = kWhole || quad < quads ? read_here(own + quad) : float4{};
    }
    unsigned short *half_row = half_out ? half_out + row * half_stride : nullptr;
    float *wide_row = wide_out ? wide_out + row * wide_stride : nullptr;
    team.begin(); // while they come
    team.meet();
    if (delta) {
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            values[k] = {values[k].x + more[k].x, values[k].y + more[k].y, values[k].z + more[k].z,
                         values[k].w + more[k].w};
        }
    }
    const auto keep_sum = [&](int zero) {
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            const int quad = k * team.threads() + team.thread();
            if (delta && (kWhole || quad < quads)) {
                write(own + quad + zero, values[k]);
            }
        }
    };
    normalise_row<kWhole>(team, values, weights, quads, eps, half_row, wide_row, overflows ? overflows + row : nullptr, scratch,
                          keep_sum);
}

#define RMS_NORM(name, kColumns)                                                                                       \
    extern "C" __global__ void __launch_bounds__(kRowThreads)                                                          \
        name(float *x, int x_stride, const float *delta, int delta_stride, const float *weight,                        \
             unsigned short *half_out, int half_stride, float *wide_out, int wide_stride, int *overflows, int columns, \
             float eps) {                                                                                              \
        norm_rows<kColumns>(x, x_stride, delta, delta_stride, weight, half_out, half_stride, wide_out, wide_stride,    \
                            overflows, columns, eps);                                                                  \
    }

RMS_NORM(rms_norm, 0)
RMS_NORM(rms_norm_5120, 5120) // the 27B's

// x: FP32 [T, heads, 128]; gate: FP32 [T, heads * 128], one row every gate_stride.
// y = x / sqrt(mean(x^2) + eps) * weight * silu(gate), fp16 [T, heads * 128]. A warp takes kEach heads, which it asks for
// at once. Grid: (T, heads / (warps * kEach) rounded up).
template <int kEach>
__device__ __forceinline__ void gated(const float *x, const float *gate, int gate_stride, const float *weight,
                                      unsigned short *out, int *overflows, int heads, float eps) {
    const size_t row = blockIdx.x;
    const int lane = threadIdx.x % 32, first = (blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32) * kEach;
    admit_next();
    const float4 w = read(reinterpret_cast<const float4 *>(weight) + lane);
    await_previous();
    float4 v[kEach], z[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int head = first + i;
        v[i] = z[i] = {};
        if (head < heads) {
            v[i] = stream(reinterpret_cast<const float4 *>(x) + (row * heads + head) * 32 + lane);
            z[i] = stream(reinterpret_cast<const float4 *>(gate + row * gate_stride) + head * 32 + lane);
        }
    }
    int overflowed = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int head = first + i;
        const float inverse = fast_inverse_root(warp_sum(dot(v[i], v[i])) / 128 + eps);
        const float4 y = {v[i].x * inverse * w.x * silu(z[i].x), v[i].y * inverse * w.y * silu(z[i].y),
                          v[i].z * inverse * w.z * silu(z[i].z), v[i].w * inverse * w.w * silu(z[i].w)};
        if (head < heads) {
            write(reinterpret_cast<uint2 *>(out) + (row * heads + head) * 32 + lane, staged_four(y, overflowed));
        }
    }
    count_overflows(overflowed, overflows ? overflows + row : nullptr);
}

extern "C" __global__ void gated_rms_norm(const float *x, const float *gate, int gate_stride, const float *weight,
                                          unsigned short *out, int *overflows, int heads, float eps) {
    gated<1>(x, gate, gate_stride, weight, out, overflows, heads, eps);
}
extern "C" __global__ void gated_rms_norm_many(const float *x, const float *gate, int gate_stride, const float *weight,
                                               unsigned short *out, int *overflows, int heads, float eps) {
    gated<3>(x, gate, gate_stride, weight, out, overflows, heads, eps);
}

// x: FP32 [T, heads, dim]; gate: element d of head h at gate + t * gate_stride + h * head_stride + d.
// y = x * sigmoid(gate), fp16 [T, heads * dim].
extern "C" __global__ void __launch_bounds__(kThreads)
    output_gate(const float *x, const float *gate, int gate_stride, int head_stride, unsigned short *out,
                int *overflows, int heads, int dim) {
    const size_t row = blockIdx.x;
    const int quads = heads * dim / 4;
    int overflowed = 0;
    for (int quad = threadIdx.x; quad < quads; quad += kThreads) {
        const int head = quad * 4 / dim, d = quad * 4 % dim;
        const float4 v = read(reinterpret_cast<const float4 *>(x) + row * quads + quad);
        const float4 g = read(reinterpret_cast<const float4 *>(gate + row * gate_stride + head * head_stride + d));
        const float4 y = {v.x * sigmoid(g.x), v.y * sigmoid(g.y), v.z * sigmoid(g.z), v.w * sigmoid(g.w)};
        write(reinterpret_cast<uint2 *>(out) + row * quads + quad, staged_four(y, overflowed));
    }
    count_overflows(overflowed, overflows ? overflows + row : nullptr);
}

struct Bfloat {
    __device__ static float4 quad(const void *table, size_t index) {
        const uint2 bits = read(static_cast<const uint2 *>(table) + index);
        return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xFFFF0000u), __uint_as_float(bits.y << 16),
                __uint_as_float(bits.y & 0xFFFF0000u)};
    }
};
struct Half {
    __device__ static float4 quad(const void *table, size_t index) {
        const uint2 bits = read(static_cast<const uint2 *>(table) + index);
        return {half_value(bits.x & 0xFFFF), half_value(bits.x >> 16), half_value(bits.y & 0xFFFF),
                half_value(bits.y >> 16)};
    }
};
struct Float {
    __device__ static float4 quad(const void *table, size_t index) {
        return read(static_cast<const float4 *>(table) + index);
    }
};

// Row tokens[t] of table [rows, columns] as FP32; an id outside of the table gives a row of NaN. A thread asks for kEach float4 at
// once. Grid: (T, parts).
template <class Stored, int kEach>
__device__ __forceinline__ void embed(const int *tokens, const void *table, float *out, int rows, int columns) {
    take_over();
    const int token = read(tokens + blockIdx.x), quads = columns / 4;
    const float missing = __uint_as_float(0x7FC00000u);
    float4 *to = reinterpret_cast<float4 *>(out) + static_cast<size_t>(blockIdx.x) * quads;
    for (int first = blockIdx.y * blockDim.x + threadIdx.x; first < quads; first += gridDim.y * blockDim.x * kEach) {
        float4 values[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int quad = first + i * gridDim.y * blockDim.x;
            values[i] = {missing, missing, missing, missing};
            if (token >= 0 && token < rows && quad < quads) {
                values[i] = Stored::quad(table, static_cast<size_t>(token) * quads + quad);
            }
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int quad = first + i * gridDim.y * blockDim.x;
            if (quad < quads) {
                write(to + quad, values[i]);
            }
        }
    }
}

#define EMBED(name, Stored, kEach)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        name(const int *tokens, const void *table, float *out, int rows, int columns) {                                \
        embed<Stored, kEach>(tokens, table, out, rows, columns);                                                       \
    }

EMBED(embed_bf16, Bfloat, 1)
EMBED(embed_fp16, Half, 1)
EMBED(embed_fp32, Float, 1)
EMBED(embed_many_bf16, Bfloat, 5)
EMBED(embed_many_fp16, Half, 5)
EMBED(embed_many_fp32, Float, 5)
