// A round's tokens of a head: their convolution, norms and gates, and their steps through the rows of the state that a
// block holds. One piece of code for every form of the decoding kernel, so that the bits are the same.
#pragma once
#include "delta.cuh"
#include "delta_called.cuh"

constexpr int kSteps = 2 * kMaxTokens; // accepted tokens of the last round, then those of this one
constexpr int kLanesRow = 8;           // lanes that share a row of the state
constexpr int kRowQuads = kQuads / kLanesRow; // float4 of a row that a lane holds
constexpr int kWarps = 4;              // that hold a block's rows, or prepare its tokens, one each at a time
constexpr int kRowsLane = 2;           // rows that a lane holds parts of
constexpr int kBlockRows = 32 * kWarps / kLanesRow * kRowsLane;

using OwnRows = float4[kRowsLane][kRowQuads];

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

// A product that is rounded: left to itself, the compiler fuses one of the two products of g s + u k, here this and there that,
// and a replay would have other bits.
__device__ __forceinline__ float4 grown(float4 v, float factor) {
    return {__fmul_rn(v.x, factor), __fmul_rn(v.y, factor), __fmul_rn(v.z, factor), __fmul_rn(v.w, factor)};
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

// One token passes the rows that this thread holds parts of: S = g S; u = beta (v - S k); S += u k^T, and its answers S q, if
// `query` is given. What the next token waits for is S k alone: products are taken of the rows as they were, those with the
// query and the growth while the sums over keys travel, and an answer is g (S q) + u (k q).
template <class... Query>
__device__ __forceinline__ void pass(OwnRows &s, const float4 (&key)[kRowQuads], const float *value, float growth, float beta,
                                     float (&answers)[kRowsLane], const Query &...query) {
    float sums[kRowsLane], asked[kRowsLane + 1], update[kRowsLane];
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
        sums[r] = part_of_product(s[r], key);
    }
    row_sums(sums);
    if constexpr (sizeof...(query) > 0) {
#pragma unroll
        for (int r = 0; r < kRowsLane; ++r) {
            asked[r] = part_of_product(s[r], query...);
        }
        asked[kRowsLane] = part_of_product(key, query...);
    }
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            s[r][i] = grown(s[r][i], growth);
        }
    }
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
        update[r] = beta * fmaf(-growth, sums[r], value[r]);
#pragma unroll
        for (int i = 0; i < kRowQuads; ++i) {
            add_product(s[r][i], {update[r], update[r], update[r], update[r]}, key[i]);
        }
    }
    if constexpr (sizeof...(query) > 0) {
        row_sums(asked);
#pragma unroll
        for (int r = 0; r < kRowsLane; ++r) {
            answers[r] = fmaf(update[r], asked[kRowsLane], __fmul_rn(growth, asked[r]));
        }
    }
}

// What `pass` answers, of rows that nobody needs afterwards.
__device__ __forceinline__ void answer_only(const OwnRows &s, const float4 (&key)[kRowQuads], const float *value, float growth,
                                            float beta, float (&answers)[kRowsLane], const float4 (&query)[kRowQuads]) {
    float sums[kRowsLane], asked[kRowsLane + 1];
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
        sums[r] = part_of_product(s[r], key);
        asked[r] = part_of_product(s[r], query);
    }
    asked[kRowsLane] = part_of_product(key, query);
    row_sums(sums);
    row_sums(asked);
#pragma unroll
    for (int r = 0; r < kRowsLane; ++r) {
        const float update = beta * fmaf(-growth, sums[r], value[r]);
        answers[r] = fmaf(update, asked[kRowsLane], __fmul_rn(growth, asked[r]));
    }
}

// Four channels next to one another, after the convolution: taps[j] are those of channel j.
__device__ __forceinline__ float4 convolved_four(const float4 (&in)[4], const float4 (&taps)[4]) {
    return {convolved(in[0].x, in[1].x, in[2].x, in[3].x, taps[0]),
            convolved(in[0].y, in[1].y, in[2].y, in[3].y, taps[1]),
            convolved(in[0].z, in[1].z, in[2].z, in[3].z, taps[2]),
            convolved(in[0].w, in[1].w, in[2].w, in[3].w, taps[3])};
}

// What a block works on. Grid: (128 / kBlockRows * value heads a key head, key heads, sequences): no divisions.
struct Head {
    int head, value_heads, channels, width, row; // row: the first of the head's 128 that the block holds
    int query, key, value;                       // this lane's channels: four, four and one
    bool first, keeps; // holds the head's first rows; and is one of the blocks that read these queries and keys

    __device__ __forceinline__ explicit Head(int lane) {
        constexpr int kParts = kHead / kBlockRows;
        const int part = blockIdx.x % kParts, own = blockIdx.x / kParts, ratio = gridDim.x / kParts;
        const int key_heads = gridDim.y, key_head = blockIdx.y;
        head = key_head * ratio + own;
        value_heads = key_heads * ratio;
        channels = (2 * key_heads + value_heads) * kHead;
        width = row_width(channels, value_heads);
        row = part * kBlockRows;
        query = key_head * kHead + 4 * lane;
        key = query + key_heads * kHead;
        value = (2 * key_heads + head) * kHead + row + lane;
        first = part == 0;
        keeps = blockIdx.x == 0;
    }
};

// What a layer's weights say of it.
struct Taps {
    float4 query[4], key[4], value;
    float log_rate, bias;

    __device__ __forceinline__ Taps(const Head &own, const float *weight, const float *a_log, const float *dt_bias) {
        const float4 *all = reinterpret_cast<const float4 *>(weight);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            query[i] = read_here(all + own.query + i);
            key[i] = read_here(all + own.key + i);
        }
        value = read_here(all + own.value);
        log_rate = read_here(a_log + own.head);
        bias = read_here(dt_bias + own.head);
    }
};

// Where a round's inputs are: FP32 rows of a projection, its tokens from row `first` on, and those of the last round, of
// which the first three are history and `before` stand.
struct Inputs {
    const float *x, *x_a, *x_b, *old_rows;
    int x_stride, first, before;
};

// A token's inputs in a lane: those of its four taps, and the gates'.
struct Token {
    float4 query[4], key[4];
    float value[4], a, b;

    // Step `step`, of the last round if it is below `before`.
    __device__ __forceinline__ void ask(const Inputs &from, const Head &own, int step) {
        const int token = step - from.before;
#pragma unroll
        for (int tap = 0; tap < 4; ++tap) {
            const int i = step + tap; // history, accepted tokens, new tokens
            const float *row = i < kKept + from.before
                                   ? from.old_rows + i * own.width
                                   : from.x + (from.first + i - kKept - from.before) * from.x_stride;
            key[tap] = read(reinterpret_cast<const float4 *>(row + own.key));
            value[tap] = read(row + own.value);
            query[tap] = token < 0 ? float4{} : read(reinterpret_cast<const float4 *>(row + own.query)); // answer known
        }
        const float *kept = from.old_rows + (kKept + step) * own.width + own.channels + own.head;
        const int row = (from.first + token) * from.x_stride + own.head;
        a = token < 0 ? read(kept) : read(from.x_a + row);
        b = token < 0 ? read(kept + own.value_heads) : read(from.x_b + row);
    }
};

// Tokens as the steps take them, in shared memory.
struct Prepared {
    float4 queries[kSteps][kQuads], keys[kSteps][kQuads];
    float values[kSteps][kBlockRows], decay[kSteps], strength[kSteps];

    // By a warp.
    __device__ __forceinline__ void put(const Token &in, const Taps &taps, int step, float eps, int lane) {
        const float4 q = convolved_four(in.query, taps.query), k = convolved_four(in.key, taps.key);
        values[step][lane] = convolved(in.value[0], in.value[1], in.value[2], in.value[3], taps.value);
        queries[step][lane] = scaled(q, kQueryScale * fast_inverse_root(warp_sum(dot(q, q)) + eps));
        keys[step][lane] = scaled(k, fast_inverse_root(warp_sum(dot(k, k)) + eps));
        const float growth = expf(-expf(taps.log_rate) * softplus(in.a + taps.bias)), beta = sigmoid(in.b);
        if (lane == 0) {
            decay[step] = growth;
            strength[step] = beta;
        }
    }
};

// Row `row` of the next round: its channels as this block's warps have read them.
__device__ __forceinline__ void keep_row(float *rows, const Head &own, int row, float4 query, float4 key, float value) {
    float *to = rows + row * own.width;
    if (own.keeps) {
        write(reinterpret_cast<float4 *>(to + own.query), query);
        write(reinterpret_cast<float4 *>(to + own.key), key);
    }
    write(to + own.value, value);
}

// A new token's own inputs, for the next round.
__device__ __forceinline__ void keep_token(float *rows, const Head &own, int token, const Token &in, int lane) {
    keep_row(rows, own, kKept + token, in.query[3], in.key[3], in.value[3]);
    if (lane == 0 && own.first) {
        float *to = rows + (kKept + token) * own.width + own.channels + own.head;
        write(to, in.a);
        write(to + own.value_heads, in.b);
    }
}

// The last inputs before this round's tokens, by warps 0 to 2. They have been read for a convolution before.
__device__ __forceinline__ void keep_last(float *rows, const Inputs &from, const Head &own, int warp) {
    if (warp < kKept) {
        const float *row = from.old_rows + (from.before + warp) * own.width;
        keep_row(rows, own, warp, read(reinterpret_cast<const float4 *>(row + own.query)),
                 read(reinterpret_cast<const float4 *>(row + own.key)), read(row + own.value));
    }
}

// The steps of one thread, in order. Before a run of them the first one's key is fetched.
struct Walk {
    OwnRows s;
    float4 key[kRowQuads];
    float growth;
    int part, own_row; // of the block's rows, the first that this thread holds parts of

    __device__ __forceinline__ Walk(int thread) : part(thread % kLanesRow), own_row(thread / kLanesRow * kRowsLane) {}

    // This thread's first part of the block's rows in `state`, those of head `own` of a lane.
    __device__ __forceinline__ float4 *place(float *state, const Head &own, int lane_index) const {
        const size_t row = (static_cast<size_t>(lane_index) * own.value_heads + own.head) * kHead + own.row + own_row;
        return reinterpret_cast<float4 *>(state) + row * kQuads + part;
    }

    __device__ __forceinline__ void load(const float4 *place) {
#pragma unroll
        for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
            for (int i = 0; i < kRowQuads; ++i) {
                s[r][i] = stream(place + r * kQuads + i * kLanesRow);
            }
        }
    }

    __device__ __forceinline__ void store(float4 *place) const {
#pragma unroll
        for (int r = 0; r < kRowsLane; ++r) {
#pragma unroll
            for (int i = 0; i < kRowQuads; ++i) {
                write(place + r * kQuads + i * kLanesRow, s[r][i]);
            }
        }
    }

    __device__ __forceinline__ void fetch(const Prepared &tokens, int step) {
        take_part(key, tokens.keys[step], part);
        growth = tokens.decay[step];
    }

    // Steps begin .. end - 1 without answers; step `last` is the last there is.
    __device__ __forceinline__ void replay(const Prepared &tokens, int begin, int end, int last) {
        float none[kRowsLane];
#pragma unroll 1
        for (int step = begin; step < end; ++step) {
            pass(s, key, &tokens.values[step][own_row], growth, tokens.strength[step], none);
            fetch(tokens, min(step + 1, last));
        }
    }

    // Steps begin .. end - 1; the answers of step s go to out + (s - begin) * stride. Step `last` is the last there is.
    __device__ __forceinline__ void answer(const Prepared &tokens, int begin, int end, int last, float *out, int stride) {
#pragma unroll 1
        for (int step = begin; step < end; ++step) {
            float4 query[kRowQuads];
            float answers[kRowsLane];
            take_part(query, tokens.queries[step], part);
            pass(s, key, &tokens.values[step][own_row], growth, tokens.strength[step], answers, query);
            fetch(tokens, min(step + 1, last));
            keep(answers, out);
            out += stride;
        }
    }

    // The same, and the rows are of no use afterwards: the last step leaves them as they were.
    __device__ __forceinline__ void answer_to_the_end(const Prepared &tokens, int begin, int end, float *out, int stride) {
        const int last = end - 1;
        answer(tokens, begin, last, last, out, stride);
        float4 query[kRowQuads];
        float answers[kRowsLane];
        take_part(query, tokens.queries[last], part);
        answer_only(s, key, &tokens.values[last][own_row], growth, tokens.strength[last], answers, query);
        keep(answers, out + static_cast<long long>(last - begin) * stride);
    }

    __device__ __forceinline__ void keep(const float (&answers)[kRowsLane], float *out) const {
        if (part == 0) {
            write(reinterpret_cast<float2 *>(out), float2{answers[0], answers[1]});
        }
    }
};
