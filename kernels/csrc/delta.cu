// Gated delta rule for decoding: causal convolution, gates and recurrence in one kernel, with exact replay.
//
// What a lane keeps is the state before the last round, and the projection's rows of that round. How many of its tokens
// stand is known when the next round begins: the kernel passes those again, with the same arithmetic and so the same
// bits, stores the state there, and passes the new tokens without storing. A rejected draft leaves no trace, and the
// state is read and written once a round. Rows are kept twice and written to the half that is not read, because several
// blocks read the same ones. docs/kernels/delta.md.
#include "common.cuh"

constexpr int kHead = 128;       // dimensions of a key and of a value head
constexpr int kQuads = kHead / 4;
constexpr int kKept = 3;         // rows of history: the convolution is four wide
constexpr int kMaxTokens = 8;    // tokens a round
constexpr int kRowsKept = kKept + kMaxTokens;
constexpr int kSteps = 2 * kMaxTokens; // accepted tokens of the last round, then those of this one
constexpr int kLanesRow = 8;     // lanes that share a row of the state
constexpr int kRowQuads = kQuads / kLanesRow; // float4 of a row that a lane holds
constexpr int kRowsLane = 2;     // rows that a lane holds parts of
constexpr int kWarps = 2;        // the first convolves the query, the second the key
constexpr int kThreads = 32 * kWarps;
constexpr int kBlockRows = kThreads / kLanesRow * kRowsLane;

__device__ __forceinline__ float row_sum(float4 v) {
    float value = (v.x + v.y) + (v.z + v.w);
#pragma unroll
    for (int step = 1; step < kLanesRow; step *= 2) {
        value += __shfl_xor_sync(kAll, value, step);
    }
    return value;
}

__device__ __forceinline__ void add_product(float4 &sum, float4 a, float4 b) {
    sum = {sum.x + a.x * b.x, sum.y + a.y * b.y, sum.z + a.z * b.z, sum.w + a.w * b.w};
}

__device__ __forceinline__ float convolved(float a, float b, float c, float d, float4 taps) {
    return silu(a * taps.x + b * taps.y + c * taps.z + d * taps.w);
}

// x: FP32 [T, ...], rows x_stride apart: channels (q, k, v) at x, the gates' a at x_a and b at x_b. weight: FP32
// [channels, 4]. rows: FP32 [2, all_lanes, kRowsKept, channels + 2 value_heads]: history, then the last round's inputs,
// a and b; half turns[lane] is read, the other written. state: FP32 [all_lanes, value_heads, 128 (value), 128 (key)].
// lanes: [sequences], -1: none; counts, firsts: [sequences]; accepted, turns: [all_lanes]. A count of 0 only moves a
// lane. out: FP32 [T, value_heads, 128]. Grid: (128 / kBlockRows, value_heads, sequences).
extern "C" __global__ void __launch_bounds__(kThreads)
    delta_decode(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                 const float *a_log, const float *dt_bias, float *rows, float *state, int all_lanes, const int *lanes,
                 const int *accepted, const int *turns, const int *counts, const int *firsts, float *out,
                 int key_heads, float eps) {
    __shared__ float4 queries[kSteps][kQuads], keys[kSteps][kQuads];
    __shared__ float values[kSteps][kBlockRows], decay[kSteps], strength[kSteps];
    const int head = blockIdx.y, value_heads = gridDim.y, sequence = blockIdx.z;
    const int lane_index = read(lanes + sequence);
    const int tokens = min(max(read(counts + sequence), 0), kMaxTokens);
    const int first = read(firsts + sequence);
    if (lane_index < 0) {
        return;
    }
    const int before = min(max(read(accepted + lane_index), 0), kMaxTokens), steps = before + tokens;
    const int turn = read(turns + lane_index) & 1;
    const int channels = (2 * key_heads + value_heads) * kHead, width = channels + 2 * value_heads;
    const int ratio = value_heads / key_heads, key_head = head / ratio;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanesRow;
    const int own_row = threadIdx.x / kLanesRow * kRowsLane, block_row = blockIdx.x * kBlockRows;
    const size_t half = static_cast<size_t>(kRowsKept) * width;
    const float *old_rows = rows + (static_cast<size_t>(turn) * all_lanes + lane_index) * half;
    float *new_rows = rows + (static_cast<size_t>(1 - turn) * all_lanes + lane_index) * half;

    float4 *place = reinterpret_cast<float4 *>(state) +
                    ((static_cast<size_t>(lane_index) * value_heads + head) * kHead + block_row + own_row) * kQuads + part;
    float4 s[kRowsLane][kRowQuads];
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            s[r][i] = stream(place + r * kQuads + i * kLanesRow);
        }
    }

    // Row i of the convolution's input: history, accepted tokens, new tokens.
    const auto input = [&](int i) -> const float * {
        return i < kKept + before ? old_rows + static_cast<size_t>(i) * width
                                  : x + static_cast<size_t>(first + i - kKept - before) * x_stride;
    };
    { // queries and keys, normalised
        const int channel = (warp * key_heads + key_head) * kHead + lane; // and those 32, 64, 96 further on
        const bool keeps = blockIdx.x == 0 && head % ratio == 0; // one of the blocks that read these channels
        float4 in[kKept + kSteps], taps[4];
#pragma unroll
        for (int i = 0; i < kKept + kSteps; ++i) {
            if (i < kKept + steps) {
                const float *from = input(i) + channel;
                in[i] = {read(from), read(from + 32), read(from + 64), read(from + 96)};
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            taps[i] = read(reinterpret_cast<const float4 *>(weight) + channel + 32 * i);
        }
#pragma unroll
        for (int i = 0; i < kKept + kSteps; ++i) {
            if (keeps && i >= before && i < kKept + steps) {
                float *to = new_rows + static_cast<size_t>(i - before) * width + channel;
                write(to, in[i].x);
                write(to + 32, in[i].y);
                write(to + 64, in[i].z);
                write(to + 96, in[i].w);
            }
        }
        const float factor = warp == 0 ? 0.08838834764831845f : 1.0f; // queries carry 1 / sqrt(128)
        float *to = reinterpret_cast<float *>(warp == 0 ? queries : keys) + lane;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step < steps) {
                const float4 y = {convolved(in[step].x, in[step + 1].x, in[step + 2].x, in[step + 3].x, taps[0]),
                                  convolved(in[step].y, in[step + 1].y, in[step + 2].y, in[step + 3].y, taps[1]),
                                  convolved(in[step].z, in[step + 1].z, in[step + 2].z, in[step + 3].z, taps[2]),
                                  convolved(in[step].w, in[step + 1].w, in[step + 2].w, in[step + 3].w, taps[3])};
                const float4 unit = scaled(y, factor / sqrtf(warp_sum(dot(y, y)) + eps));
                to[step * kHead] = unit.x;
                to[step * kHead + 32] = unit.y;
                to[step * kHead + 64] = unit.z;
                to[step * kHead + 96] = unit.w;
            }
        }
    }
    for (int index = threadIdx.x; index < (kKept + steps) * kBlockRows; index += kThreads) {
        const int i = index / kBlockRows, row = index % kBlockRows;
        const int channel = (2 * key_heads + head) * kHead + block_row + row;
        const float newest = read(input(i) + channel);
        if (i >= kKept) {
            const float4 taps = read(reinterpret_cast<const float4 *>(weight) + channel);
            values[i - kKept][row] = convolved(read(input(i - 3) + channel), read(input(i - 2) + channel),
                                               read(input(i - 1) + channel), newest, taps);
        }
        if (i >= before) {
            write(new_rows + static_cast<size_t>(i - before) * width + channel, newest);
        }
    }
    if (threadIdx.x < steps) {
        const int step = threadIdx.x, token = step - before;
        const float *kept = old_rows + static_cast<size_t>(kKept + step) * width + channels + head;
        const size_t row = static_cast<size_t>(first + token) * x_stride + head;
        const float a = token < 0 ? read(kept) : read(x_a + row);
        const float b = token < 0 ? read(kept + value_heads) : read(x_b + row);
        decay[step] = expf(-expf(read(a_log + head)) * softplus(a + read(dt_bias + head)));
        strength[step] = sigmoid(b);
        if (token >= 0 && blockIdx.x == 0) {
            float *to = new_rows + static_cast<size_t>(kKept + token) * width + channels + head;
            write(to, a);
            write(to + value_heads, b);
        }
    }
    __syncthreads();

    const auto keep = [&] {
#pragma unroll
        for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
            for (int i = 0; i < kRowQuads; ++i) {
                write(place + r * kQuads + i * kLanesRow, s[r][i]);
            }
        }
    };
    for (int step = 0; step < steps; ++step) {
        if (step == before && before > 0) {
            keep(); // the state after the last accepted token; with none it is there already
        }
        const float growth = decay[step], beta = strength[step];
        float4 k[kRowQuads], q[kRowQuads];
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            k[i] = keys[step][i * kLanesRow + part];
            q[i] = queries[step][i * kLanesRow + part];
        }
#pragma unroll
        for (int r = 0; r < kRowsLane; ++r) {
            float4 known = {}, answer = {};
#pragma unroll
            for (int i = 0; i < kRowQuads; ++i) {
                s[r][i] = scaled(s[r][i], growth);
                add_product(known, s[r][i], k[i]);
            }
            const float update = beta * (values[step][own_row + r] - row_sum(known));
#pragma unroll
            for (int i = 0; i < kRowQuads; ++i) {
                add_product(s[r][i], {update, update, update, update}, k[i]);
                add_product(answer, s[r][i], q[i]);
            }
            const float result = row_sum(answer);
            if (step >= before && part == 0) {
                const size_t token = first + step - before;
                write(out + (token * value_heads + head) * kHead + block_row + own_row + r, result);
            }
        }
    }
    if (tokens == 0 && before > 0) {
        keep();
    }
}
