// Gated delta rule for decoding: causal convolution, gates and recurrence in one kernel, with exact replay.
//
// What a lane keeps is the state before the last round, and the projection's rows of that round. How many of its tokens
// stand is known when the next round begins: the kernel passes those again, with the same arithmetic and so the same
// bits, stores the state there, and passes the new tokens without storing. A rejected draft leaves no trace, and the
// state is read and written once a round. Rows are kept twice and written to the half that is not read, because several
// blocks read the same ones. docs/kernels/delta.md.
#include "delta_step.cuh"

// x: FP32 [T, ...], rows x_stride apart: channels (q, k, v) at x, the gates' a at x_a and b at x_b. weight: FP32
// [channels, 4]. rows: FP32 [2, all_lanes, kRowsKept, width]: history, then the last round's inputs, a and b;
// half turns[lane] is read, the other written. state: FP32 [all_lanes, value_heads, 128 (value), 128 (key)].
// lanes: [sequences], -1: none; counts, firsts: [sequences]; accepted, turns: [all_lanes]. A count of 0 only moves a
// lane. out: FP32 [T, value_heads, 128]. Grid: as `Head` has it.
extern "C" __global__ void __launch_bounds__(32 * kWarps, 3)
    delta_decode(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                 const float *a_log, const float *dt_bias, float *rows, float *state, int all_lanes, const int *lanes,
                 const int *accepted, const int *turns, const int *counts, const int *firsts, float *out, float eps) {
    __shared__ Prepared tokens;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Asked asked(all_lanes, lanes, accepted, turns, counts, firsts, lane);
    const Head own(lane);
    const Called called(asked, accepted, turns);
    if (called.lane < 0) {
        return;
    }
    const int before = called.before, turn = called.turn, steps = before + called.tokens;
    Walk walk(threadIdx.x);
    float4 *place = walk.place(state, own, called.lane);
    __syncwarp(); // what tells where the rows are is there before the state is asked for: waits for later loads include it
    walk.load(place);
    const Taps taps(own, weight, a_log, dt_bias);
    const Inputs inputs = {x, x_a, x_b, called_rows(rows, turn, all_lanes, called.lane, own.width), x_stride, called.first, before};
    float *new_rows = called_rows(rows, turn + 1, all_lanes, called.lane, own.width);
    float *answers = out + (static_cast<size_t>(called.first) * own.value_heads + own.head) * kHead + own.row + walk.own_row;

#pragma unroll 1
    for (int step = warp; step < steps; step += kWarps) {
        Token in;
        in.ask(inputs, own, step);
        tokens.put(in, taps, step, eps, lane);
        if (step >= before) {
            keep_token(new_rows, own, step - before, in, lane);
        }
    }
    keep_last(new_rows, inputs, own, warp);
    __syncthreads();
    if (steps > 0) {
        walk.fetch(tokens, 0);
    }
    if (before > 0) {
        walk.replay(tokens, 0, before, steps - 1);
        walk.store(place); // after the last accepted token; with none it is there already
    }
    walk.answer(tokens, before, steps, steps - 1, answers, own.value_heads * kHead);
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
    const int width = row_width(channels, value_heads), channel = head * kHead + 4 * lane;
    const float *history = rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width);
    const auto input = [&](int token) -> float4 {
        const float *from = (token < 0 ? history + static_cast<size_t>(token + kKept) * width
                                       : x + static_cast<size_t>(token) * x_stride) + channel;
        return read(reinterpret_cast<const float4 *>(from));
    };
    if (begin >= end) {
        return;
    }
    float4 taps[4], in[4] = {input(begin - 3), input(begin - 2), input(begin - 1)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        taps[i] = read(reinterpret_cast<const float4 *>(weight) + channel + i);
    }
    for (int token = begin; token < end; ++token) {
        in[3] = input(token);
        float4 y = convolved_four(in, taps);
        if (head < 2 * key_heads) {
            const float factor = head < key_heads ? kQueryScale : 1.0f;
            y = scaled(y, factor * fast_inverse_root(warp_sum(dot(y, y)) + eps));
        }
        write(reinterpret_cast<float4 *>(convolved_out + static_cast<size_t>(token) * channels + channel), y);
        in[0] = in[1];
        in[1] = in[2];
        in[2] = in[3];
    }
}

constexpr int kScanThreads = 64, kScanRows = kScanThreads / kLanesRow * kRowsLane;

// Second half: the recurrence over all tokens, with the state in registers; the same step as in delta_decode, so the same
// bits. Moves the lane's state and history to the end of the chunk. Grid: (128 / kScanRows, value_heads).
extern "C" __global__ void __launch_bounds__(kScanThreads)
    delta_scan(const float *x, int x_stride, const float *convolved_in, const float *gates, float *rows, float *state,
               int all_lanes, int lane_index, const int *turns, float *out, int tokens, int key_heads) {
    __shared__ float4 queries[kSteps][kQuads], keys[kSteps][kQuads];
    __shared__ float values[kSteps][kScanRows], decay[kSteps], strength[kSteps];
    const int head = blockIdx.y, value_heads = gridDim.y;
    const int channels = (2 * key_heads + value_heads) * kHead, width = row_width(channels, value_heads);
    const int key_head = head / (value_heads / key_heads);
    const int part = threadIdx.x % kLanesRow, own_row = threadIdx.x / kLanesRow * kRowsLane;
    const int block_row = blockIdx.x * kScanRows;

    const int block = head * gridDim.x + blockIdx.x;
    keep_history(x, x_stride, rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width), width, channels,
                 tokens, block * kScanThreads + threadIdx.x, gridDim.x * gridDim.y * kScanThreads);

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
    constexpr int kFetched = kSteps * kQuads / kScanThreads, kOwnValues = kSteps * kScanRows / kScanThreads;
    float4 next_query[kFetched], next_key[kFetched];
    float next_value[kOwnValues], next_decay = 0, next_strength = 0;
    const auto fetch = [&](int begin) {
#pragma unroll
        for (int n = 0; n < kFetched; ++n) {
            const int index = n * kScanThreads + threadIdx.x, token = begin + index / kQuads, quad = index % kQuads;
            const float4 *row = reinterpret_cast<const float4 *>(convolved_in + static_cast<size_t>(token) * channels);
            next_query[n] = token < tokens ? read(row + key_head * kQuads + quad) : float4{};
            next_key[n] = token < tokens ? read(row + (key_heads + key_head) * kQuads + quad) : float4{};
        }
#pragma unroll
        for (int n = 0; n < kOwnValues; ++n) {
            const int index = n * kScanThreads + threadIdx.x, token = begin + index / kScanRows;
            const size_t from = static_cast<size_t>(token) * channels + (2 * key_heads + head) * kHead + block_row;
            next_value[n] = token < tokens ? read(convolved_in + from + index % kScanRows) : 0.0f;
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
            const int index = n * kScanThreads + threadIdx.x;
            queries[index / kQuads][index % kQuads] = next_query[n];
            keys[index / kQuads][index % kQuads] = next_key[n];
        }
#pragma unroll
        for (int n = 0; n < kOwnValues; ++n) {
            const int index = n * kScanThreads + threadIdx.x;
            values[index / kScanRows][index % kScanRows] = next_value[n];
        }
        if (threadIdx.x < kSteps) {
            decay[threadIdx.x] = next_decay;
            strength[threadIdx.x] = next_strength;
        }
        __syncthreads();
        fetch(begin + kSteps);
        for (int step = 0; step < min(kSteps, tokens - begin); ++step) {
            float4 key[kRowQuads], query[kRowQuads];
            float results[kRowsLane];
            take_part(key, keys[step], part);
            take_part(query, queries[step], part);
            pass(s, key, &values[step][own_row], decay[step], strength[step], results, query);
            if (part == 0) {
                float *to = out + (static_cast<size_t>(begin + step) * value_heads + head) * kHead + block_row + own_row;
                write(to, results[0]);
                write(to + 1, results[1]);
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
