// The parts of a token that warps of their own may prepare: key and value, query, gates. Each asks for all it takes before it
// computes.
#pragma once
#include "delta_step.cuh"

// Arguments of the kernel, as of `delta_decode`.
struct Layer {
    const float *x, *x_a, *x_b;
    int x_stride;
    const float *weight, *a_log, *dt_bias;
    float *rows, *state;
    int all_lanes;
    float *out, eps;
};

// Four rows next to one another that a convolution takes.
struct Window {
    const float *rows[4];

    // Of replayed token `step`.
    __device__ __forceinline__ Window(const float *old_rows, int width, int step) {
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
            rows[tap] = old_rows + (step + tap) * width;
        }
    }

    // Of token `token` of this round, behind `before` that are kept.
    __device__ __forceinline__ Window(const Layer &layer, const float *old_rows, int width, const Called &called, int token) {
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
            const int row = token + tap - kKept;
            rows[tap] = row < 0 ? old_rows + (called.before + token + tap) * width : layer.x + (called.first + row) * layer.x_stride;
        }
    }
};

// Four channels a lane, to be convolved.
struct Channels {
    float4 in[4], taps[4];

    __device__ __forceinline__ void ask(const Window &from, const float *weight, int channel) {
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
            in[tap] = read(reinterpret_cast<const float4 *>(from.rows[tap] + channel));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            taps[i] = read(reinterpret_cast<const float4 *>(weight) + channel + i);
        }
    }

    // Of length `length`.
    __device__ __forceinline__ float4 prepared(float eps, float length) const {
        const float4 y = convolved_four(in, taps);
        return scaled(y, length * fast_inverse_root(warp_sum(dot(y, y)) + eps));
    }
};

// A key and a value.
struct Pair {
    Channels key;
    float in[4];
    float4 taps;

    __device__ __forceinline__ void ask(const Layer &layer, const Head &own, const Window &from) {
        key.ask(from, layer.weight, own.key);
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
            in[tap] = read(from.rows[tap] + own.value);
        }
        taps = read(reinterpret_cast<const float4 *>(layer.weight) + own.value);
    }

    __device__ __forceinline__ void put(Prepared &tokens, int step, float eps, int lane) const {
        tokens.keys[step][lane] = key.prepared(eps, 1.0f);
        tokens.values[step][lane] = convolved(in[0], in[1], in[2], in[3], taps);
    }
};

// A token's gates.
struct Gates {
    float a, b, log_rate, bias;

    __device__ __forceinline__ void ask(const Layer &layer, const Head &own, const float *from_a, const float *from_b) {
        a = read(from_a);
        b = read(from_b);
        log_rate = read(layer.a_log + own.head);
        bias = read(layer.dt_bias + own.head);
    }

    __device__ __forceinline__ void put(Prepared &tokens, int step, int lane) const {
        const float growth = expf(-expf(log_rate) * softplus(a + bias)), beta = sigmoid(b);
        if (lane == 0) {
            tokens.decay[step] = growth;
            tokens.strength[step] = beta;
        }
    }
};
