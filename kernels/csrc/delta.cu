// Gated delta rule for decoding: the causal convolution with its history, and the recurrence with exact replay.
//
// What a lane keeps is the state before the last round, and the convolution's inputs of that round. How many of that
// round's tokens were accepted is known when the next round begins: its kernels go through those again, with the same
// arithmetic and so the same bits, store the state there, and then pass the new tokens without storing. So a rejected
// draft leaves no trace, and no state is copied: it is read and written once a round. docs/kernels/delta.md.
#include "common.cuh"

constexpr int kHead = 128;         // dimensions of a key and of a value head
constexpr int kTaps = 4;           // width of the convolution
constexpr int kKept = kTaps - 1;   // rows of history
constexpr int kMaxTokens = 8;      // tokens a round
constexpr int kRowsKept = kKept + kMaxTokens;
constexpr int kSteps = 2 * kMaxTokens; // accepted tokens of the last round, then those of this one

// rows: FP32 [lanes, kRowsKept, row_width], in place: history, then the inputs of the last round; a row holds the
// convolution's channels (q, k, v), then a and b of each value head. x: FP32 [T, ...], rows x_stride apart, channels at
// x, gates a at x_a and b at x_b. weight: FP32 [channels, 4].
// convolved: FP32 [lanes, kSteps, channels], q and k normalised, for the accepted tokens and those of this round.
// gates: FP32 [lanes, kSteps, 2, value_heads], e^g and beta.
// Grid: (heads of 128 channels + 1 block for the gates, sequences). lanes: [sequences], lane of each, -1: none. A count
// of 0 only moves a lane to its last accepted token.
extern "C" __global__ void __launch_bounds__(kHead, 4)
    delta_inputs(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                 const float *a_log, const float *dt_bias, float *rows, const int *lanes, const int *accepted,
                 const int *counts, const int *firsts, float *convolved, float *gates, int key_heads, int value_heads,
                 float eps) {
    __shared__ float scratch[kHead / 32];
    const int sequence = blockIdx.y, head = blockIdx.x, heads = gridDim.x - 1;
    const int channels = heads * kHead, width = channels + 2 * value_heads;
    const int lane = read(lanes + sequence), tokens = min(max(read(counts + sequence), 0), kMaxTokens);
    if (lane < 0) {
        return;
    }
    const int before = min(max(read(accepted + lane), 0), kMaxTokens), steps = before + tokens;
    const size_t first = read(firsts + sequence);
    float *own_rows = rows + static_cast<size_t>(lane) * kRowsKept * width;

    if (head == heads) { // a and b: the accepted ones from the kept rows, the new ones from x and into the rows
        float *out = gates + static_cast<size_t>(sequence) * kSteps * 2 * value_heads;
        for (int index = threadIdx.x; index < value_heads; index += kHead) {
            const float rate = -expf(read(a_log + index)), bias = read(dt_bias + index);
            for (int step = 0; step < steps; ++step) {
                float *kept = own_rows + (kKept + step) * width + channels + index; // of the last round
                const size_t row = (first + step - before) * x_stride + index;
                const float a = step < before ? read(kept) : read(x_a + row);
                const float b = step < before ? read(kept + value_heads) : read(x_b + row);
                write(out + step * 2 * value_heads + index, expf(rate * softplus(a + bias)));
                write(out + (step * 2 + 1) * value_heads + index, sigmoid(b));
            }
            for (int token = 0; token < tokens; ++token) {
                float *kept = own_rows + (kKept + token) * width + channels + index;
                write(kept, read(x_a + (first + token) * x_stride + index));
                write(kept + value_heads, read(x_b + (first + token) * x_stride + index));
            }
        }
        return;
    }

    const int channel = head * kHead + threadIdx.x;
    float inputs[kKept + kSteps]; // history, accepted, new
#pragma unroll
    for (int i = 0; i < kKept + kSteps; ++i) {
        const int token = i - kKept - before;
        inputs[i] = token < 0          ? read(own_rows + min(i, kRowsKept - 1) * width + channel)
                    : token < tokens ? read(x + (first + token) * x_stride + channel)
                                       : 0.0f;
    }
    const float4 taps = read(reinterpret_cast<const float4 *>(weight) + channel);
    float *out = convolved + static_cast<size_t>(sequence) * kSteps * channels + channel;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        if (step < steps) {
            const float sum = inputs[step] * taps.x + inputs[step + 1] * taps.y + inputs[step + 2] * taps.z +
                              inputs[step + 3] * taps.w;
            float y = silu(sum);
            if (head < 2 * key_heads) {
                y *= 1.0f / sqrtf(block_sum(y * y, scratch) + eps);
            }
            write(out + static_cast<size_t>(step) * channels, y);
        }
    }
#pragma unroll
    for (int i = 0; i < kKept + kSteps; ++i) { // from the last accepted token's history on
        if (i >= before && i < before + kKept + tokens) {
            write(own_rows + (i - before) * width + channel, inputs[i]);
        }
    }
}

constexpr int kLanesRow = 8;                 // lanes that share a row of the state
constexpr int kRowQuads = kHead / 4 / kLanesRow; // float4 of it that a lane holds
constexpr int kRowsLane = 2;                 // rows a lane holds parts of
constexpr int kDeltaWarps = 2;
constexpr int kBlockRows = kDeltaWarps * (32 / kLanesRow) * kRowsLane;
constexpr int kDeltaThreads = 32 * kDeltaWarps;

__device__ __forceinline__ float row_sum(float value) {
#pragma unroll
    for (int step = 1; step < kLanesRow; step *= 2) {
        value += __shfl_xor_sync(kAll, value, step);
    }
    return value;
}

// state: FP32 [lanes, value_heads, 128 (value), 128 (key)], in place: moved to the last accepted token.
// out: FP32 [T, value_heads, 128]. Grid: (128 / kBlockRows, value_heads, sequences).
extern "C" __global__ void __launch_bounds__(kDeltaThreads)
    delta_steps(const float *convolved, const float *gates, float *state, const int *lanes, const int *accepted,
                const int *counts, const int *firsts, float *out, int key_heads) {
    __shared__ float4 keys[kSteps][kHead / 4], queries[kSteps][kHead / 4];
    __shared__ float values[kSteps][kBlockRows], decay[kSteps], strength[kSteps];
    const int head = blockIdx.y, value_heads = gridDim.y, sequence = blockIdx.z;
    const int lane_index = read(lanes + sequence), tokens = min(max(read(counts + sequence), 0), kMaxTokens);
    if (lane_index < 0) {
        return;
    }
    const int before = min(max(read(accepted + lane_index), 0), kMaxTokens), steps = before + tokens;
    const int channels = (2 * key_heads + value_heads) * kHead;
    const int lane = threadIdx.x % 32, part = lane % kLanesRow;
    const int first_row = threadIdx.x / kLanesRow * kRowsLane; // of the block's

    float4 *rows = reinterpret_cast<float4 *>(state) +
                   ((static_cast<size_t>(lane_index) * value_heads + head) * kHead + blockIdx.x * kBlockRows) * (kHead / 4);
    float4 s[kRowsLane][kRowQuads];
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
        for (int q = 0; q < kRowQuads; ++q) {
            s[r][q] = stream(rows + (first_row + r) * (kHead / 4) + q * kLanesRow + part);
        }
    }

    const float *in = convolved + static_cast<size_t>(sequence) * kSteps * channels;
    const int key_head = head / (value_heads / key_heads);
    for (int index = threadIdx.x; index < steps * (kHead / 4); index += kDeltaThreads) {
        const int step = index / (kHead / 4), quad = index % (kHead / 4);
        const float4 *row = reinterpret_cast<const float4 *>(in + static_cast<size_t>(step) * channels);
        queries[step][quad] = scaled(read(row + key_head * (kHead / 4) + quad), 0.08838834764831845f); // 1 / sqrt(128)
        keys[step][quad] = read(row + (key_heads + key_head) * (kHead / 4) + quad);
    }
    for (int index = threadIdx.x; index < steps * kBlockRows; index += kDeltaThreads) {
        const int step = index / kBlockRows, row = index % kBlockRows;
        values[step][row] = read(in + static_cast<size_t>(step) * channels + (2 * key_heads + head) * kHead +
                                 blockIdx.x * kBlockRows + row);
    }
    if (threadIdx.x < steps) {
        const float *own = gates + (static_cast<size_t>(sequence) * kSteps + threadIdx.x) * 2 * value_heads + head;
        decay[threadIdx.x] = read(own);
        strength[threadIdx.x] = read(own + value_heads);
    }
    __syncthreads();

    const auto keep = [&] {
#pragma unroll
        for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
            for (int q = 0; q < kRowQuads; ++q) {
                write(rows + (first_row + r) * (kHead / 4) + q * kLanesRow + part, s[r][q]);
            }
        }
    };
    const size_t first = read(firsts + sequence);
    for (int step = 0; step < steps; ++step) {
        if (step == before && before > 0) {
            keep(); // the state after the last accepted token; before the first round it is there already
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
            float known = 0;
#pragma unroll
            for (int i = 0; i < kRowQuads; ++i) {
                s[r][i] = scaled(s[r][i], growth);
                known += dot(s[r][i], k[i]);
            }
            const float update = beta * (values[step][first_row + r] - row_sum(known));
            float answer = 0;
#pragma unroll
            for (int i = 0; i < kRowQuads; ++i) {
                s[r][i] = {s[r][i].x + update * k[i].x, s[r][i].y + update * k[i].y, s[r][i].z + update * k[i].z,
                           s[r][i].w + update * k[i].w};
                answer += dot(s[r][i], q[i]);
            }
            answer = row_sum(answer);
            if (step >= before && part == 0) {
                const size_t token = first + step - before;
                write(out + (token * value_heads + head) * kHead + blockIdx.x * kBlockRows + first_row + r, answer);
            }
        }
    }
    if (tokens == 0 && before > 0) {
        keep();
    }
}
