// Gated delta rule for decoding: causal convolution, gates and recurrence in one kernel, with exact replay.
//
// What a lane keeps is the state before the last round, and the projection's rows of that round. How many of its tokens
// stand is known when the next round begins: the kernel passes those again, with the same arithmetic and so the same
// bits, stores the state there, and passes the new tokens without storing. A rejected draft leaves no trace, and the
// state is read and written once a round. Rows are kept twice and written to the half that is not read, because several
// blocks read the same ones. docs/kernels/delta.md.
#include "delta.cuh"

constexpr int kSteps = 2 * kMaxTokens; // accepted tokens of the last round, then those of this one
constexpr int kTogether = 4;     // steps normalised side by side
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

// One token: the rows of the state that this thread holds parts of, moved; their outputs, known to all lanes of a row.
__device__ __forceinline__ float2 advance(float4 (&s)[kRowsLane][kRowQuads], const float4 *key, const float4 *query,
                                          const float *value, float growth, float beta, int part) {
    float4 k[kRowQuads], q[kRowQuads];
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
        k[i] = key[i * kLanesRow + part];
        q[i] = query[i * kLanesRow + part];
    }
    float results[kRowsLane];
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
        float4 known = {}, answer = {};
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            s[r][i] = scaled(s[r][i], growth);
            add_product(known, s[r][i], k[i]);
        }
        const float update = beta * (value[r] - row_sum(known));
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            add_product(s[r][i], {update, update, update, update}, k[i]);
            add_product(answer, s[r][i], q[i]);
        }
        results[r] = row_sum(answer);
    }
    return {results[0], results[1]};
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
    { // values: a thread has one channel and every fourth step
        constexpr int kEvery = kThreads / kBlockRows, kOwn = (kKept + kSteps + kEvery - 1) / kEvery;
        const int row = threadIdx.x % kBlockRows, channel = (2 * key_heads + head) * kHead + block_row + row;
        const float4 taps = read(reinterpret_cast<const float4 *>(weight) + channel);
        float in[kOwn][4];
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
#pragma unroll
            for (int tap = 0; tap < 4; ++tap) {
                const int i = n * kEvery + threadIdx.x / kBlockRows - 3 + tap;
                in[n][tap] = i >= 0 && i < kKept + steps ? read(input(i) + channel) : 0.0f;
            }
        }
#pragma unroll
        for (int n = 0; n < kOwn; ++n) {
            const int i = n * kEvery + threadIdx.x / kBlockRows;
            if (i >= kKept && i < kKept + steps) {
                values[i - kKept][row] = convolved(in[n][0], in[n][1], in[n][2], in[n][3], taps);
            }
            if (i >= before && i < kKept + steps) {
                write(new_rows + static_cast<size_t>(i - before) * width + channel, in[n][3]);
            }
        }
    }
    { // queries and keys, normalised
        const int channel = (warp * key_heads + key_head) * kHead + lane; // and those 32, 64, 96 further on
        const bool keeps = blockIdx.x == 0 && head % ratio == 0; // one of the blocks that read these channels
        float4 in[kKept + kSteps], taps[4];
#pragma unroll
        for (int i = 0; i < kKept + kSteps; ++i) {
            in[i] = {};
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
        const float factor = warp == 0 ? kQueryScale : 1.0f;
        float *to = reinterpret_cast<float *>(warp == 0 ? queries : keys) + lane;
        // Four steps at a time without a branch between them, so that their chains of exchanges overlap.
#pragma unroll
        for (int group = 0; group < kSteps; group += kTogether) {
            if (group < steps) {
                float4 y[kTogether];
                float squares[kTogether];
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const float4 *w = in + group + i;
                    y[i] = {convolved(w[0].x, w[1].x, w[2].x, w[3].x, taps[0]),
                            convolved(w[0].y, w[1].y, w[2].y, w[3].y, taps[1]),
                            convolved(w[0].z, w[1].z, w[2].z, w[3].z, taps[2]),
                            convolved(w[0].w, w[1].w, w[2].w, w[3].w, taps[3])};
                    squares[i] = warp_sum(dot(y[i], y[i]));
                }
#pragma unroll
                for (int i = 0; i < kTogether; ++i) {
                    const float4 unit = scaled(y[i], factor / sqrtf(squares[i] + eps));
                    to[(group + i) * kHead] = unit.x;
                    to[(group + i) * kHead + 32] = unit.y;
                    to[(group + i) * kHead + 64] = unit.z;
                    to[(group + i) * kHead + 96] = unit.w;
                }
            }
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
        const float2 results = advance(s, keys[step], queries[step], &values[step][own_row], decay[step],
                                       strength[step], part);
        if (step >= before && part == 0) {
            const size_t token = first + step - before;
            float *to = out + (token * value_heads + head) * kHead + block_row + own_row;
            write(to, results.x);
            write(to + 1, results.y);
        }
    }
    if (tokens == 0 && before > 0) {
        keep();
    }
}

constexpr int kRun = 16;      // tokens that a warp convolves one after another
constexpr int kRunWarps = 4;

// A prompt's chunk, first half: the same convolution, normalisation and gates for T tokens of one lane, whose history is
// at `rows` (half turns[lane]). convolved_out: FP32 [T, channels]; gates: FP32 [2, T, value_heads], decay and strength.
// Grid: (heads of 128 channels + 1, tokens / (kRun * kRunWarps) rounded up).
extern "C" __global__ void __launch_bounds__(32 * kRunWarps)
    delta_convolve(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                   const float *a_log, const float *dt_bias, const float *rows, int all_lanes, int lane_index,
                   const int *turns, float *convolved_out, float *gates, int tokens, int key_heads, int value_heads,
                   float eps) {
    const int head = blockIdx.x, heads = gridDim.x - 1, channels = heads * kHead;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = (blockIdx.y * kRunWarps + warp) * kRun, end = min(tokens, begin + kRun);
    if (head == heads) {
        for (int index = lane; index < (end - begin) * value_heads; index += 32) {
            const int token = begin + index / value_heads, own = index % value_heads;
            const size_t row = static_cast<size_t>(token) * x_stride + own;
            const size_t to = static_cast<size_t>(token) * value_heads + own;
            write(gates + to, expf(-expf(read(a_log + own)) * softplus(read(x_a + row) + read(dt_bias + own))));
            write(gates + static_cast<size_t>(tokens) * value_heads + to, sigmoid(read(x_b + row)));
        }
        return;
    }
    const int width = channels + 2 * value_heads, channel = head * kHead + lane;
    const float *history = rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width);
    const auto input = [&](int token) -> float4 {
        const float *from = (token < 0 ? history + static_cast<size_t>(token + kKept) * width
                                       : x + static_cast<size_t>(token) * x_stride) + channel;
        return {read(from), read(from + 32), read(from + 64), read(from + 96)};
    };
    if (begin >= end) {
        return;
    }
    float4 taps[4], in[4] = {input(begin - 3), input(begin - 2), input(begin - 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        taps[i] = read(reinterpret_cast<const float4 *>(weight) + channel + 32 * i);
    }
    for (int token = begin; token < end; ++token) {
        in[3] = input(token);
        float4 y = {convolved(in[0].x, in[1].x, in[2].x, in[3].x, taps[0]),
                    convolved(in[0].y, in[1].y, in[2].y, in[3].y, taps[1]),
                    convolved(in[0].z, in[1].z, in[2].z, in[3].z, taps[2]),
                    convolved(in[0].w, in[1].w, in[2].w, in[3].w, taps[3])};
        if (head < 2 * key_heads) {
            const float factor = head < key_heads ? kQueryScale : 1.0f;
            y = scaled(y, factor / sqrtf(warp_sum(dot(y, y)) + eps));
        }
        float *to = convolved_out + static_cast<size_t>(token) * channels + channel;
        write(to, y.x);
        write(to + 32, y.y);
        write(to + 64, y.z);
        write(to + 96, y.w);
        in[0] = in[1];
        in[1] = in[2];
        in[2] = in[3];
    }
}

// Second half: the recurrence over all tokens, with the state in registers; the same step as in delta_decode, so the same
// bits. Moves the lane's state and history to the end of the chunk. Grid: (128 / kBlockRows, value_heads).
extern "C" __global__ void __launch_bounds__(kThreads)
    delta_scan(const float *x, int x_stride, const float *convolved_in, const float *gates, float *rows, float *state,
               int all_lanes, int lane_index, const int *turns, float *out, int tokens, int key_heads) {
    __shared__ float4 queries[kSteps][kQuads], keys[kSteps][kQuads];
    __shared__ float values[kSteps][kBlockRows], decay[kSteps], strength[kSteps];
    const int head = blockIdx.y, value_heads = gridDim.y;
    const int channels = (2 * key_heads + value_heads) * kHead, width = channels + 2 * value_heads;
    const int key_head = head / (value_heads / key_heads);
    const int part = threadIdx.x % kLanesRow, own_row = threadIdx.x / kLanesRow * kRowsLane;
    const int block_row = blockIdx.x * kBlockRows;

    const int block = head * gridDim.x + blockIdx.x;
    keep_history(x, x_stride, rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width), width, channels,
                 tokens, block * kThreads + threadIdx.x, gridDim.x * gridDim.y * kThreads);

    float4 *place = reinterpret_cast<float4 *>(state) +
                    ((static_cast<size_t>(lane_index) * value_heads + head) * kHead + block_row + own_row) * kQuads + part;
    float4 s[kRowsLane][kRowQuads];
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            s[r][i] = read(place + r * kQuads + i * kLanesRow);
        }
    }

    // A thread fetches the same places of every run of kSteps tokens, one run ahead of its use.
    constexpr int kFetched = kSteps * kQuads / kThreads, kOwnValues = kSteps * kBlockRows / kThreads;
    float4 next_query[kFetched], next_key[kFetched];
    float next_value[kOwnValues], next_decay = 0, next_strength = 0;
    const auto fetch = [&](int begin) {
#pragma unroll
        for (int n = 0; n < kFetched; ++n) {
            const int index = n * kThreads + threadIdx.x, token = begin + index / kQuads, quad = index % kQuads;
            const float4 *row = reinterpret_cast<const float4 *>(convolved_in + static_cast<size_t>(token) * channels);
            next_query[n] = token < tokens ? read(row + key_head * kQuads + quad) : float4{};
            next_key[n] = token < tokens ? read(row + (key_heads + key_head) * kQuads + quad) : float4{};
        }
#pragma unroll
        for (int n = 0; n < kOwnValues; ++n) {
            const int index = n * kThreads + threadIdx.x, token = begin + index / kBlockRows;
            const size_t from = static_cast<size_t>(token) * channels + (2 * key_heads + head) * kHead + block_row;
            next_value[n] = token < tokens ? read(convolved_in + from + index % kBlockRows) : 0.0f;
        }
        const int token = begin + threadIdx.x;
        if (threadIdx.x < kSteps && token < tokens) {
            next_decay = read(gates + static_cast<size_t>(token) * value_heads + head);
            next_strength = read(gates + (static_cast<size_t>(tokens) + token) * value_heads + head);
        }
    };
    fetch(0);
    for (int begin = 0; begin < tokens; begin += kSteps) {
        __syncthreads();
#pragma unroll
        for (int n = 0; n < kFetched; ++n) {
            const int index = n * kThreads + threadIdx.x;
            queries[index / kQuads][index % kQuads] = next_query[n];
            keys[index / kQuads][index % kQuads] = next_key[n];
        }
#pragma unroll
        for (int n = 0; n < kOwnValues; ++n) {
            const int index = n * kThreads + threadIdx.x;
            values[index / kBlockRows][index % kBlockRows] = next_value[n];
        }
        if (threadIdx.x < kSteps) {
            decay[threadIdx.x] = next_decay;
            strength[threadIdx.x] = next_strength;
        }
        __syncthreads();
        fetch(begin + kSteps);
        for (int step = 0; step < min(kSteps, tokens - begin); ++step) {
            const float2 results = advance(s, keys[step], queries[step], &values[step][own_row], decay[step],
                                           strength[step], part);
            if (part == 0) {
                float *to = out + (static_cast<size_t>(begin + step) * value_heads + head) * kHead + block_row + own_row;
                write(to, results.x);
                write(to + 1, results.y);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            write(place + r * kQuads + i * kLanesRow, s[r][i]);
        }
    }
}
