// Gated delta rule for a prompt, 64 tokens at a time, on tensor cores (the WY form of Gated Delta Networks, Yang et al.
// 2024). With G the running sum of the log decay within a chunk that starts from the state S, the updates u solve
//   u_i + beta_i sum_{j<i} e^(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - e^(G_i) S k_i),
// so u = U - W S^T with U and W known before S. Three kernels: the convolution; then, for every chunk and head at once,
// the inverse of the system, W, U and the weights of u in the outputs; then the chunks one after another, a block for 32
// rows of a head's state. Operands are fp16, sums, inverse and state FP32. docs/kernels/delta.md.
#include "ampere.cuh"
#include "delta.cuh"
#include "warp_product.cuh"

constexpr int kChunk = 64;
constexpr int kTile = 16;
constexpr int kPitch = kHead + 8;          // rows of 128 fp16 in shared memory: 8 of them meet all banks
constexpr int kSquarePitch = kChunk + 8;   // rows of 64 fp16
constexpr int kWidePitch = kChunk + 4;     // rows of 64 FP32
constexpr bool kAsync = __CUDA_ARCH__ >= 800;

// `rows` rows of `columns` fp16 to shared memory; on sm_80 and newer they are there once the thread's copies were waited
// for and the block has met.
template <int columns>
__device__ __forceinline__ void stage(unsigned short *to, int to_pitch, const unsigned short *from, int from_pitch,
                                      int rows, int threads) {
    constexpr int kAcross = columns / 8;
    for (int index = threadIdx.x; index < rows * kAcross; index += threads) {
        const int row = index / kAcross, part = index % kAcross * 8;
        const unsigned short *source = from + static_cast<size_t>(row) * from_pitch + part;
        unsigned short *place = to + row * to_pitch + part;
#if __CUDA_ARCH__ >= 800
        copy_async(shared_address(place), reinterpret_cast<const unsigned char *>(source));
#else
        *reinterpret_cast<uint4 *>(place) = read(reinterpret_cast<const uint4 *>(source));
#endif
    }
}

__device__ __forceinline__ void copies_end() {
#if __CUDA_ARCH__ >= 800
    commit_copies();
#endif
}
__device__ __forceinline__ void copies_wait() {
#if __CUDA_ARCH__ >= 800
    wait_copies<0>();
#endif
}

__device__ __forceinline__ unsigned halves(float low, float high) {
    int none = 0;
    return staged_pair(low, high, none);
}

constexpr int kRun = 16; // rows that a warp convolves one after another
constexpr int kAhead = 4;
constexpr int kConvolveThreads = 128;

// Row r of the chunks is token r - lead; rows of no token are zeros, with gates that change nothing. x, x_a, x_b, weight,
// rows: as in delta_decode. halves_out: fp16 [padded, channels]: queries and keys normalised, queries times 1 / sqrt(128),
// values. gates: FP32 [2, value_heads, padded], log decay and beta. Grid: (heads of 128 channels + 1, padded / 64).
extern "C" __global__ void __launch_bounds__(kConvolveThreads)
    chunks_convolve(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                    const float *a_log, const float *dt_bias, const float *rows, int all_lanes, int lane_index,
                    const int *turns, unsigned short *halves_out, float *gates, int lead, int tokens, int key_heads,
                    int value_heads, float eps) {
    const int head = blockIdx.x, heads = gridDim.x - 1, channels = heads * kHead, padded = gridDim.y * kChunk;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head == heads) {
        for (int index = threadIdx.x; index < kChunk * value_heads; index += kConvolveThreads) {
            const int row = blockIdx.y * kChunk + index / value_heads, own = index % value_heads, token = row - lead;
            const bool there = token >= 0 && token < tokens;
            const size_t from = static_cast<size_t>(token) * x_stride + own, to = static_cast<size_t>(own) * padded + row;
            write(gates + to, there ? -expf(read(a_log + own)) * softplus(read(x_a + from) + read(dt_bias + own)) : 0.0f);
            write(gates + static_cast<size_t>(value_heads) * padded + to, there ? sigmoid(read(x_b + from)) : 0.0f);
        }
        return;
    }
    const int width = channels + 2 * value_heads, channel = head * kHead + 2 * lane; // it, the next, and those 64 on
    const float *history = rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width);
    const auto input = [&](int token) -> float4 {
        if (token >= tokens || token < -kKept) {
            return {};
        }
        const float *from = (token < 0 ? history + static_cast<size_t>(token + kKept) * width
                                       : x + static_cast<size_t>(token) * x_stride) + channel;
        return {read(from), read(from + 1), read(from + 64), read(from + 65)};
    };
    float4 taps[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        taps[i] = read(reinterpret_cast<const float4 *>(weight) + channel + i % 2 + i / 2 * 64);
    }
    const int begin = blockIdx.y * kChunk + warp * kRun;
    const float factor = head < key_heads ? kQueryScale : 1.0f;
    float4 in[kKept + kAhead];
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
        in[i] = input(begin - lead - kKept + i);
    }
    for (int row = begin; row < begin + kRun; row += kAhead) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            in[kKept + i] = input(row + i - lead);
        }
        float4 y[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int token = row + i - lead;
            const float4 *w = in + i;
            y[i] = {convolved(w[0].x, w[1].x, w[2].x, w[3].x, taps[0]), convolved(w[0].y, w[1].y, w[2].y, w[3].y, taps[1]),
                    convolved(w[0].z, w[1].z, w[2].z, w[3].z, taps[2]), convolved(w[0].w, w[1].w, w[2].w, w[3].w, taps[3])};
            if (token < 0 || token >= tokens) {
                y[i] = {};
            }
        }
        if (head < 2 * key_heads) {
            float squares[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                squares[i] = warp_sum(dot(y[i], y[i]));
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                y[i] = scaled(y[i], factor / sqrtf(squares[i] + eps));
            }
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            unsigned *to = reinterpret_cast<unsigned *>(halves_out + static_cast<size_t>(row + i) * channels + channel);
            write(to, halves(y[i].x, y[i].y));
            write(to + 32, halves(y[i].z, y[i].w));
        }
#pragma unroll
        for (int i = 0; i < kKept; ++i) {
            in[i] = in[kAhead + i];
        }
    }
}

constexpr int kPrepareThreads = 256;

struct PrepareShared { // what overlaps is never alive at once
    unsigned short keys[kChunk * kPitch], values[kChunk * kPitch];
    union {
        unsigned short queries[kChunk * kPitch];
        unsigned short for_keys[kChunk * kSquarePitch]; // inverse of the system, times beta and growth of its columns
    };
    float system[kChunk * kWidePitch]; // at last a place where sums become fp16
    union {
        float weights[kChunk * kWidePitch];
        unsigned short for_values[kChunk * kSquarePitch]; // the inverse times beta
    };
    float total[kChunk], beta[kChunk];
};

// For one chunk and value head, whose rows are `begin` onwards: w fp16 [value_heads, padded, 128] = W, grown fp16 likewise
// = queries times e^G, u FP32 likewise = U, weights fp16 [value_heads, padded, 64]: of u_j in output i; factors FP32
// [2, value_heads, padded]: e^(G_last - G_i), and e^G_i. Grid: (chunks, value_heads).
extern "C" __global__ void __launch_bounds__(kPrepareThreads)
    chunks_prepare(const unsigned short *halves_in, const float *gates, unsigned short *w, unsigned short *grown, float *u,
                   unsigned short *weights, float *factors, int key_heads) {
    DYNAMIC_SHARED(memory);
    PrepareShared &s = *reinterpret_cast<PrepareShared *>(memory);
    const int chunk = blockIdx.x, head = blockIdx.y, value_heads = gridDim.y, padded = gridDim.x * kChunk;
    const int channels = (2 * key_heads + value_heads) * kHead, key_head = head / (value_heads / key_heads);
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32 % 4, begin = chunk * kChunk;
    const bool second = threadIdx.x >= kPrepareThreads / 2; // four warps work with values and queries, four with keys
    const size_t row = static_cast<size_t>(head) * padded + begin; // of the outputs
    const unsigned short *own = halves_in + static_cast<size_t>(begin) * channels;
    stage<kHead>(s.keys, kPitch, own + (key_heads + key_head) * kHead, channels, kChunk, kPrepareThreads);
    stage<kHead>(s.queries, kPitch, own + key_head * kHead, channels, kChunk, kPrepareThreads);
    stage<kHead>(s.values, kPitch, own + (2 * key_heads + head) * kHead, channels, kChunk, kPrepareThreads);
    copies_end();
    if (threadIdx.x < 32) { // running sums of the log decay, two rows a lane
        const float first = read(gates + row + 2 * lane), pair = first + read(gates + row + 2 * lane + 1);
        float sum = pair;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const float other = __shfl_up_sync(kAll, sum, step);
            sum += lane >= step ? other : 0.0f;
        }
        s.total[2 * lane] = sum - pair + first;
        s.total[2 * lane + 1] = sum;
    } else if (threadIdx.x < 32 + kChunk) {
        const int index = threadIdx.x - 32;
        s.beta[index] = read(gates + static_cast<size_t>(value_heads) * padded + row + index);
    }
    copies_wait();
    __syncthreads();

    { // keys by keys, and queries by keys: the tiles on and below the diagonal
        const unsigned short *left = second ? s.queries : s.keys;
        float *to = second ? s.weights : s.system;
        SumTile sum[4] = {};
#pragma unroll
        for (int k = 0; k < kHead / kTile; ++k) {
            const HalfTile a = left_tile<From::kShared, Order::kRows>(left + part * kTile * kPitch + k * kTile, kPitch);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (n <= part) {
                    const HalfTile b =
                        right_tile<From::kShared, Order::kColumns>(s.keys + n * kTile * kPitch + k * kTile, kPitch);
                    multiply_tiles<Order::kRows, Order::kColumns>(sum[n], a, b);
                }
            }
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            if (n <= part) {
                store_tile<From::kShared>(to + part * kTile * kWidePitch + n * kTile, sum[n], kWidePitch);
            }
        }
    }
    __syncwarp();
    const float last = s.total[kChunk - 1];
    for (int i = part * kTile; i < (part + 1) * kTile; ++i) { // a row at a time, two columns a lane
        const float total = s.total[i];
        const int column = 2 * lane;
        // Above the diagonal the difference is positive and may overflow: it is selected away.
        const float low = column <= i ? expf(total - s.total[column]) : 0.0f;
        const float high = column + 1 <= i ? expf(total - s.total[column + 1]) : 0.0f;
        if (!second) {
            float *place = s.system + i * kWidePitch + column;
            place[0] = column < i ? s.beta[i] * low * place[0] : 0.0f;
            place[1] = column + 1 < i ? s.beta[i] * high * place[1] : 0.0f;
        } else {
            const float *place = s.weights + i * kWidePitch + column;
            const float first = column <= i ? low * place[0] : 0.0f, next = column + 1 <= i ? high * place[1] : 0.0f;
            write(reinterpret_cast<unsigned *>(weights + (row + i) * kChunk) + lane, halves(first, next));
            const float growth = expf(total);
            const uint2 q = *reinterpret_cast<const uint2 *>(s.queries + i * kPitch + 4 * lane);
            write(reinterpret_cast<uint2 *>(grown + (row + i) * kHead) + lane,
                  uint2{halves(growth * half_value(q.x & 0xFFFF), growth * half_value(q.x >> 16)),
                        halves(growth * half_value(q.y & 0xFFFF), growth * half_value(q.y >> 16))});
            if (lane == 0) {
                write(factors + row + i, expf(last - total));
                write(factors + static_cast<size_t>(value_heads) * padded + row + i, growth);
            }
        }
    }
    __syncthreads();

    if (threadIdx.x < kChunk) { // a thread a column of the inverse, from its top to its bottom
        const int column = threadIdx.x;
        float inverse[kChunk];
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            float sum[4] = {};
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 four = *reinterpret_cast<const float4 *>(s.system + i * kWidePitch + j);
                sum[0] += four.x * inverse[j];
                sum[1] += j + 1 < i ? four.y * inverse[j + 1] : 0.0f;
                sum[2] += j + 2 < i ? four.z * inverse[j + 2] : 0.0f;
                sum[3] += j + 3 < i ? four.w * inverse[j + 3] : 0.0f;
            }
            inverse[i] = (i == column ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
        const float beta = s.beta[column], both = beta * expf(s.total[column]);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
            s.for_values[i * kSquarePitch + column] = static_cast<unsigned short>(half_bits(inverse[i] * beta));
            s.for_keys[i * kSquarePitch + column] = static_cast<unsigned short>(half_bits(inverse[i] * both));
        }
    }
    __syncthreads();

    const unsigned short *left = second ? s.for_values : s.for_keys, *right = second ? s.values : s.keys;
    SumTile sum[kHead / kTile] = {};
#pragma unroll
    for (int k = 0; k < kChunk / kTile; ++k) {
        if (k <= part) {
            const HalfTile a =
                left_tile<From::kShared, Order::kRows>(left + part * kTile * kSquarePitch + k * kTile, kSquarePitch);
#pragma unroll
            for (int n = 0; n < kHead / kTile; ++n) {
                const HalfTile b =
                    right_tile<From::kShared, Order::kRows>(right + k * kTile * kPitch + n * kTile, kPitch);
                multiply_tiles<Order::kRows, Order::kRows>(sum[n], a, b);
            }
        }
    }
    const size_t own_row = row + part * kTile;
    if (second) {
#pragma unroll
        for (int n = 0; n < kHead / kTile; ++n) {
            store_tile<From::kGlobal>(u + own_row * kHead + n * kTile, sum[n], kHead);
        }
        return;
    }
    float *scratch = s.system + part * kTile * kWidePitch;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            store_tile<From::kShared>(scratch + n * kTile, sum[side * 4 + n], kWidePitch);
        }
        __syncwarp();
#pragma unroll
        for (int n = 0; n < kTile / 2; ++n) {
            const int i = n * 2 + lane / 16, column = lane % 16 * 4;
            const float4 four = *reinterpret_cast<const float4 *>(scratch + i * kWidePitch + column);
            write(reinterpret_cast<uint2 *>(w + (own_row + i) * kHead + side * kChunk + column),
                  uint2{halves(four.x, four.y), halves(four.z, four.w)});
        }
        __syncwarp();
    }
}

constexpr int kScanThreads = 128;
constexpr int kValues = 32;                // rows of a head's state that a block has
constexpr int kValueTiles = kValues / kTile;
constexpr int kValuePitch = kValues + 8;   // rows of 32 fp16
constexpr int kScratchPitch = kValues + 4; // FP32
constexpr int kStatePitch = kTile + 4;

struct ScanShared {
    unsigned short state[kValues * kPitch]; // of the chunk's beginning
    unsigned short update[kChunk * kValuePitch], decayed[kChunk * kValuePitch]; // u, and u as the chunk's end sees it
    float scratch[4][kValues * kStatePitch];                                   // a warp's
    // sm_80 and newer: the chunk's operands; sm_70 takes them from where they are.
    unsigned short w[kChunk * kPitch], grown[kChunk * kPitch], keys[kChunk * kPitch], weights[kChunk * kSquarePitch];
};
constexpr int kScratchFloats = kValues * kStatePitch;
static_assert(kScratchFloats >= kTile * kScratchPitch, "scratch");

// The chunks of a lane in order. halves_in, w, grown, u, weights, factors: as above. x and rows: the history moves, too.
// state: FP32 [all_lanes, value_heads, 128 (value), 128 (key)]; out: FP32 [tokens, value_heads, 128].
// Grid: (128 / kValues, value_heads). A warp has 16 rows of the chunk, and 32 columns of the state.
extern "C" __global__ void __launch_bounds__(kScanThreads)
    chunks_scan(const float *x, int x_stride, float *rows, float *state, int all_lanes, int lane_index, const int *turns,
                const unsigned short *halves_in, const unsigned short *w, const unsigned short *grown, const float *u,
                const unsigned short *weights, const float *factors, float *out, int chunks, int lead, int tokens,
                int key_heads) {
    DYNAMIC_SHARED(memory);
    ScanShared &s = *reinterpret_cast<ScanShared *>(memory);
    const int head = blockIdx.y, value_heads = gridDim.y, padded = chunks * kChunk, value = blockIdx.x * kValues;
    const int channels = (2 * key_heads + value_heads) * kHead, key_head = head / (value_heads / key_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp * kTile, column = warp * 32;
    const size_t first = static_cast<size_t>(head) * padded;
    const unsigned short *keys = halves_in + (key_heads + key_head) * kHead;
    float *scratch = s.scratch[warp];
    {
        const int width = channels + 2 * value_heads;
        keep_history(x, x_stride, rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width), width, channels,
                     tokens, (head * gridDim.x + blockIdx.x) * kScanThreads + threadIdx.x,
                     gridDim.x * gridDim.y * kScanThreads);
    }
    const auto stage_rows = [&](int chunk) { // what meets the state
        if (kAsync && chunk < chunks) {
            const size_t at = first + chunk * kChunk;
            stage<kHead>(s.w, kPitch, w + at * kHead, kHead, kChunk, kScanThreads);
            stage<kHead>(s.grown, kPitch, grown + at * kHead, kHead, kChunk, kScanThreads);
        }
        copies_end();
    };
    const auto stage_rest = [&](int chunk) { // what meets the updates
        if (kAsync && chunk < chunks) {
            const size_t at = first + chunk * kChunk;
            stage<kHead>(s.keys, kPitch, keys + static_cast<size_t>(chunk) * kChunk * channels, channels, kChunk,
                         kScanThreads);
            stage<kChunk>(s.weights, kSquarePitch, weights + at * kChunk, kChunk, kChunk, kScanThreads);
        }
        copies_end();
    };
    stage_rows(0);

    float *place = state + ((static_cast<size_t>(lane_index) * value_heads + head) * kHead + value) * kHead + column;
    SumTile now[kValueTiles][2];
#pragma unroll
    for (int m = 0; m < kValueTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            now[m][n] = sum_tile(place + m * kTile * kHead + n * kTile, kHead);
        }
    }
    const auto publish = [&] { // this warp's columns of the state as fp16
#pragma unroll
        for (int n = 0; n < 2; ++n) {
#pragma unroll
            for (int m = 0; m < kValueTiles; ++m) {
                store_tile<From::kShared>(scratch + m * kTile * kStatePitch, now[m][n], kStatePitch);
            }
            __syncwarp();
            const float4 *from = reinterpret_cast<const float4 *>(scratch + lane * kStatePitch); // a lane a row
            uint4 *to = reinterpret_cast<uint4 *>(s.state + lane * kPitch + column + n * kTile);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float4 a = from[2 * i], b = from[2 * i + 1];
                to[i] = uint4{halves(a.x, a.y), halves(a.z, a.w), halves(b.x, b.y), halves(b.z, b.w)};
            }
            __syncwarp();
        }
    };
    publish();
    copies_wait();
    __syncthreads();
    stage_rest(0);

    for (int chunk = 0; chunk < chunks; ++chunk) {
        const size_t at = first + chunk * kChunk + own; // this warp's first row
        constexpr int kOwn = kTile * kValues / 4 / 32;  // float4 of u a lane
        float4 known[kOwn];
        float remaining[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int row = (i * 32 + lane) / (kValues / 4), quad = lane % (kValues / 4);
            known[i] = read(reinterpret_cast<const float4 *>(u + (at + row) * kHead + value) + quad);
            remaining[i] = read(factors + at + row);
        }
        const float growth = read(factors + static_cast<size_t>(value_heads) * padded + first + chunk * kChunk + kChunk - 1);

        SumTile meant[kValueTiles] = {}, answer[kValueTiles] = {}; // W S^T, and the outputs
#pragma unroll
        for (int k = 0; k < kHead / kTile; ++k) {
            HalfTile a, q;
            if (kAsync) {
                a = left_tile<From::kShared, Order::kRows>(s.w + own * kPitch + k * kTile, kPitch);
                q = left_tile<From::kShared, Order::kRows>(s.grown + own * kPitch + k * kTile, kPitch);
            } else {
                a = left_tile<From::kGlobal, Order::kRows>(w + at * kHead + k * kTile, kHead);
                q = left_tile<From::kGlobal, Order::kRows>(grown + at * kHead + k * kTile, kHead);
            }
#pragma unroll
            for (int n = 0; n < kValueTiles; ++n) {
                const HalfTile b =
                    right_tile<From::kShared, Order::kColumns>(s.state + n * kTile * kPitch + k * kTile, kPitch);
                multiply_tiles<Order::kRows, Order::kColumns>(meant[n], a, b);
                multiply_tiles<Order::kRows, Order::kColumns>(answer[n], q, b);
            }
        }
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
            store_tile<From::kShared>(scratch + n * kTile, meant[n], kScratchPitch);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int row = (i * 32 + lane) / (kValues / 4), quad = lane % (kValues / 4);
            const float4 m = *reinterpret_cast<const float4 *>(scratch + row * kScratchPitch + 4 * quad);
            const float4 v = {known[i].x - m.x, known[i].y - m.y, known[i].z - m.z, known[i].w - m.w};
            const float4 d = scaled(v, remaining[i]);
            const int to = (own + row) * kValuePitch + 4 * quad;
            *reinterpret_cast<uint2 *>(s.update + to) = uint2{halves(v.x, v.y), halves(v.z, v.w)};
            *reinterpret_cast<uint2 *>(s.decayed + to) = uint2{halves(d.x, d.y), halves(d.z, d.w)};
        }
        copies_wait();
        __syncthreads();
        stage_rows(chunk + 1);

#pragma unroll
        for (int k = 0; k < kChunk / kTile; ++k) {
            if (k <= warp) {
                HalfTile a;
                if (kAsync) {
                    a = left_tile<From::kShared, Order::kRows>(s.weights + own * kSquarePitch + k * kTile, kSquarePitch);
                } else {
                    a = left_tile<From::kGlobal, Order::kRows>(weights + at * kChunk + k * kTile, kChunk);
                }
#pragma unroll
                for (int n = 0; n < kValueTiles; ++n) {
                    const HalfTile b = right_tile<From::kShared, Order::kRows>(
                        s.update + k * kTile * kValuePitch + n * kTile, kValuePitch);
                    multiply_tiles<Order::kRows, Order::kRows>(answer[n], a, b);
                }
            }
        }
        const int token = chunk * kChunk + own - lead;
        if (token >= 0 && token + kTile <= tokens) {
            float *to = out + (static_cast<size_t>(token) * value_heads + head) * kHead + value;
#pragma unroll
            for (int n = 0; n < kValueTiles; ++n) {
                store_tile<From::kGlobal>(to + n * kTile, answer[n], value_heads * kHead);
            }
        } else {
#pragma unroll
            for (int n = 0; n < kValueTiles; ++n) {
                store_tile<From::kShared>(scratch + n * kTile, answer[n], kScratchPitch);
            }
            __syncwarp();
            for (int i = 0; i < kTile; ++i) {
                if (token + i >= 0 && token + i < tokens) {
                    write(out + (static_cast<size_t>(token + i) * value_heads + head) * kHead + value + lane,
                          scratch[i * kScratchPitch + lane]);
                }
            }
            __syncwarp();
        }
#pragma unroll
        for (int m = 0; m < kValueTiles; ++m) {
            now[m][0].scale(growth);
            now[m][1].scale(growth);
        }
#pragma unroll
        for (int k = 0; k < kChunk / kTile; ++k) {
            HalfTile b[2];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                if (kAsync) {
                    b[n] = right_tile<From::kShared, Order::kRows>(s.keys + k * kTile * kPitch + column + n * kTile, kPitch);
                } else {
                    const size_t key_row = static_cast<size_t>(chunk * kChunk + k * kTile);
                    b[n] = right_tile<From::kGlobal, Order::kRows>(keys + key_row * channels + column + n * kTile, channels);
                }
            }
#pragma unroll
            for (int m = 0; m < kValueTiles; ++m) {
                const HalfTile a = left_tile<From::kShared, Order::kColumns>(
                    s.decayed + k * kTile * kValuePitch + m * kTile, kValuePitch);
                multiply_tiles<Order::kColumns, Order::kRows>(now[m][0], a, b[0]);
                multiply_tiles<Order::kColumns, Order::kRows>(now[m][1], a, b[1]);
            }
        }
        publish();
        copies_wait();
        __syncthreads();
        stage_rest(chunk + 1);
    }
#pragma unroll
    for (int m = 0; m < kValueTiles; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            store_tile<From::kGlobal>(place + m * kTile * kHead + n * kTile, now[m][n], kHead);
        }
    }
}
