// Gated delta rule for decoding: causal convolution, gates and recurrence in one kernel, with exact replay.
//
// What a lane keeps is the state before the last round, and the projection's rows of that round. How many of its tokens
// stand is known when the next round begins: the kernel passes those again, with the same arithmetic and so the same
// bits, stores the state there, and passes the new tokens without storing. A rejected draft leaves no trace, and the
// state is read and written once a round. Rows are kept twice and written to the half that is not read, because several
// blocks read the same ones. docs/kernels/delta.md.
#include "delta.cuh"

constexpr int kSteps = 2 * kMaxTokens; // accepted tokens of the last round, then those of this one
constexpr int kLanesRow = 8;           // lanes that share a row of the state
constexpr int kRowQuads = kQuads / kLanesRow; // float4 of a row that a lane holds
constexpr int kWarps = 4;              // of a block in decoding: each prepares a token at a time
constexpr int kRowsLane = 2;           // rows that a lane holds parts of
constexpr int kBlockRows = 32 * kWarps / kLanesRow * kRowsLane;
#if __CUDA_ARCH__ >= 900
constexpr bool kOverlaps = true; // what the last round left is dealt with while the launch before still runs
#else
constexpr bool kOverlaps = false;
#endif

// Sums over the lanes that share a row, of several values side by side.
template <int kCount> __device__ __forceinline__ void row_sums(float (&values)[kCount]) {
#pragma unroll
    for (int step = 1; step < kLanesRow; step *= 2) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            values[i] += __shfl_xor_sync(kAll, values[i], step);
        }
    }
}

__device__ __forceinline__ void add_product(float4 &sum, float4 a, float4 b) {
    sum = {sum.x + a.x * b.x, sum.y + a.y * b.y, sum.z + a.z * b.z, sum.w + a.w * b.w};
}

// A lane's part of a key or query.
__device__ __forceinline__ void take_part(float4 (&own)[kRowQuads], const float4 *vector, int part) {
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
        own[i] = vector[i * kLanesRow + part];
    }
}

// This lane's part of the rows times a vector.
__device__ __forceinline__ float part_of_product(const float4 (&row)[kRowQuads], const float4 (&vector)[kRowQuads]) {
    float4 sum = {};
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) {
        add_product(sum, row[i], vector[i]);
    }
    return (sum.x + sum.y) + (sum.z + sum.w);
}

// One token's key and value into the rows that this thread holds parts of. `also`: parts of other products, whose sums go
// along with those that this needs: their waits overlap.
__device__ __forceinline__ void absorb(float4 (&s)[kRowsLane][kRowQuads], const float4 (&key)[kRowQuads],
                                       const float *value, float growth, float beta, float (&also)[kRowsLane]) {
    float sums[2 * kRowsLane];
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            s[r][i] = scaled(s[r][i], growth);
        }
        sums[r] = part_of_product(s[r], key);
        sums[kRowsLane + r] = also[r];
    }
    row_sums(sums);
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
        const float update = beta * (value[r] - sums[r]);
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            add_product(s[r][i], {update, update, update, update}, key[i]);
        }
        also[r] = sums[kRowsLane + r];
    }
}

// Entry `index` of a table that a warp has read side by side with what told it the index: one wait in place of two.
__device__ __forceinline__ int entry(const int *table, int own, int index) {
    return index < 32 ? __shfl_sync(kAll, own, max(index, 0)) : read(table + index);
}

// Four channels next to one another, after the convolution: taps[j] are those of channel j.
__device__ __forceinline__ float4 convolved_four(const float4 (&in)[4], const float4 (&taps)[4]) {
    return {convolved(in[0].x, in[1].x, in[2].x, in[3].x, taps[0]),
            convolved(in[0].y, in[1].y, in[2].y, in[3].y, taps[1]),
            convolved(in[0].z, in[1].z, in[2].z, in[3].z, taps[2]),
            convolved(in[0].w, in[1].w, in[2].w, in[3].w, taps[3])};
}

// x: FP32 [T, ...], rows x_stride apart: channels (q, k, v) at x, the gates' a at x_a and b at x_b. weight: FP32
// [channels, 4]. rows: FP32 [2, all_lanes, kRowsKept, width]: history, then the last round's inputs, a and b;
// half turns[lane] is read, the other written. state: FP32 [all_lanes, value_heads, 128 (value), 128 (key)].
// lanes: [sequences], -1: none; counts, firsts: [sequences]; accepted, turns: [all_lanes]. A count of 0 only moves a
// lane. out: FP32 [T, value_heads, 128]. Grid: (128 / kBlockRows, value_heads, sequences).
extern "C" __global__ void __launch_bounds__(32 * kWarps, 3)
    delta_decode(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                 const float *a_log, const float *dt_bias, float *rows, float *state, int all_lanes, const int *lanes,
                 const int *accepted, const int *turns, const int *counts, const int *firsts, float *out,
                 int key_heads, float eps) {
    __shared__ float4 queries[kSteps][kQuads], keys[kSteps][kQuads];
    __shared__ float values[kSteps][kBlockRows], decay[kSteps], strength[kSteps];
    const int head = blockIdx.y, value_heads = gridDim.y, sequence = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = lane % kLanesRow;
    const int own_accepted = lane < all_lanes ? read(accepted + lane) : 0;
    const int own_turn = lane < all_lanes ? read(turns + lane) : 0;
    const int lane_index = read(lanes + sequence);
    const int tokens = min(max(read(counts + sequence), 0), kMaxTokens);
    const int first = read(firsts + sequence);
    if (lane_index < 0) {
        take_over();
        return;
    }
    const int before = min(max(entry(accepted, own_accepted, lane_index), 0), kMaxTokens), steps = before + tokens;
    const int turn = entry(turns, own_turn, lane_index) & 1;
    const int own_row = threadIdx.x / kLanesRow * kRowsLane, block_row = blockIdx.x * kBlockRows;

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

    const int channels = (2 * key_heads + value_heads) * kHead, width = row_width(channels, value_heads);
    const int ratio = value_heads / key_heads;
    const bool keeps = blockIdx.x == 0 && head % ratio == 0; // one of the blocks that read these queries and keys
    const int query_channel = head / ratio * kHead + 4 * lane, key_channel = query_channel + key_heads * kHead;
    const int value_channel = (2 * key_heads + head) * kHead + block_row + lane;
    const size_t half = static_cast<size_t>(kRowsKept) * width;
    const float *old_rows = rows + (static_cast<size_t>(turn) * all_lanes + lane_index) * half;
    float *new_rows = rows + (static_cast<size_t>(1 - turn) * all_lanes + lane_index) * half;
    float4 query_taps[4], key_taps[4];
    const float4 *all_taps = reinterpret_cast<const float4 *>(weight);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        query_taps[i] = read(all_taps + query_channel + i);
        key_taps[i] = read(all_taps + key_channel + i);
    }
    const float4 value_taps = read(all_taps + value_channel);
    const float rate = -expf(read(a_log + head)), bias = read(dt_bias + head);

    const auto four = [](const float *from) { return read(reinterpret_cast<const float4 *>(from)); };
    const auto keep_row = [&](int row, float4 query, float4 key, float value) {
        float *to = new_rows + static_cast<size_t>(row) * width;
        if (keeps) {
            write(reinterpret_cast<float4 *>(to + query_channel), query);
            write(reinterpret_cast<float4 *>(to + key_channel), key);
        }
        write(to + value_channel, value);
    };
    if (warp < kKept) { // the last inputs before this round's tokens
        const float *from = old_rows + static_cast<size_t>(before + warp) * width;
        keep_row(warp, four(from + query_channel), four(from + key_channel), read(from + value_channel));
    }

    // First what the last round has left, then this round's tokens; both at once where launches do not overlap.
    int begin = 0;
    float4 key[kRowQuads];
#pragma unroll 1
    do {
        const int end = kOverlaps && begin < before ? before : steps;
        if (end == steps) { // once: after the last round's tokens there are this one's, or none
            await_previous();
        }
#pragma unroll 1
        for (int step = begin + warp; step < end; step += kWarps) {
            const int token = step - before;
            float4 in_query[4], in_key[4];
            float in_value[4];
#pragma unroll
            for (int tap = 0; tap < 4; ++tap) {
                const int i = step + tap; // history, accepted tokens, new tokens
                const float *from = i < kKept + before
                                        ? old_rows + static_cast<size_t>(i) * width
                                        : x + static_cast<size_t>(first + i - kKept - before) * x_stride;
                in_key[tap] = four(from + key_channel);
                in_value[tap] = read(from + value_channel);
                in_query[tap] = token < 0 ? float4{} : four(from + query_channel); // whose answer is known
            }
            const float *kept = old_rows + static_cast<size_t>(kKept + step) * width + channels + head;
            const size_t row = static_cast<size_t>(first + token) * x_stride + head;
            const float a = token < 0 ? read(kept) : read(x_a + row);
            const float b = token < 0 ? read(kept + value_heads) : read(x_b + row);
            const float growth = expf(rate * softplus(a + bias)), beta = sigmoid(b);
            const float4 q = convolved_four(in_query, query_taps), k = convolved_four(in_key, key_taps);
            queries[step][lane] = scaled(q, kQueryScale * fast_inverse_root(warp_sum(dot(q, q)) + eps));
            keys[step][lane] = scaled(k, fast_inverse_root(warp_sum(dot(k, k)) + eps));
            values[step][lane] = convolved(in_value[0], in_value[1], in_value[2], in_value[3], value_taps);
            if (lane == 0) {
                decay[step] = growth;
                strength[step] = beta;
            }
            if (token >= 0) {
                keep_row(kKept + token, in_query[3], in_key[3], in_value[3]);
                if (lane == 0 && blockIdx.x == 0) {
                    float *to = new_rows + static_cast<size_t>(kKept + token) * width + channels + head;
                    write(to, a);
                    write(to + value_heads, b);
                }
            }
        }
        __syncthreads();

        int step = begin;
        float growth, answers[kRowsLane] = {};
        const auto fetch = [&](int next) {
            next = min(next, end - 1);
            take_part(key, keys[next], part);
            growth = decay[next];
        };
        fetch(step);
        if (begin < before) {
#pragma unroll 1
            for (; step < before; ++step) {
                absorb(s, key, &values[step][own_row], growth, strength[step], answers);
                fetch(step + 1);
            }
#pragma unroll
            for (int r = 0; r < kRowsLane; ++r) { // after the last accepted token; with none it is there already
#pragma unroll
                for (int i = 0; i < kRowQuads; ++i) {
                    write(place + r * kQuads + i * kLanesRow, s[r][i]);
                }
            }
        }
        // A token's answers are summed together with what the next token needs.
        float *to = out + (static_cast<size_t>(first) * value_heads + head) * kHead + block_row + own_row;
        const auto put = [&](int done) {
            if (part == 0) {
                write(reinterpret_cast<float2 *>(to + static_cast<size_t>(done - before) * value_heads * kHead),
                      float2{answers[0], answers[1]});
            }
        };
#pragma unroll 1
        for (; step < end; ++step) {
            float4 query[kRowQuads];
            take_part(query, queries[step], part);
            absorb(s, key, &values[step][own_row], growth, strength[step], answers);
            fetch(step + 1);
            if (step > before) {
                put(step - 1);
            }
#pragma unroll
            for (int r = 0; r < kRowsLane; ++r) {
                answers[r] = part_of_product(s[r], query);
            }
        }
        if (end > before) {
            row_sums(answers);
            put(end - 1);
        }
        begin = end;
    } while (begin < steps);
    admit_next_after_writes(); // it may be of the same layer
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
            float results[kRowsLane] = {};
            take_part(key, keys[step], part);
            take_part(query, queries[step], part);
            absorb(s, key, &values[step][own_row], decay[step], strength[step], results);
#pragma unroll
            for (int r = 0; r < kRowsLane; ++r) {
                results[r] = part_of_product(s[r], query);
            }
            row_sums(results);
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
