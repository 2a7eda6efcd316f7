// Gated delta rule for a prompt, 64 tokens at a time, on tensor cores (the WY form of Gated Delta Networks, Yang et al.
// 2024). With G the running sum of the log decay within a chunk that starts from the state S, the updates u solve
//   u_i + beta_i sum_{j<i} e^(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - e^(G_i) S k_i),
// so u = U - W S^T with U and W known before S. Three kernels: the convolution; then, for every chunk and head at once,
// the inverse of the system, W, U and the weights of u in the outputs; then the chunks one after another, a block for 32
// rows of a head's state. Operands are fp16, sums, inverse and state FP32. docs/kernels/delta.md.
#include "ampere.cuh"
#include "delta.cuh"
#include "volta.cuh"
#include "warp_product.cuh"

constexpr int kChunk = 64;
constexpr int kTile = 16;
constexpr int kPitch = kHead + 8;          // rows of 128 fp16 in shared memory: 8 of them meet all banks
constexpr int kSquarePitch = kChunk + 8;   // rows of 64 fp16
constexpr int kWidePitch = kChunk + 4;     // rows of 64 FP32
constexpr bool kAsync = __CUDA_ARCH__ >= 800;
constexpr float kLog2e = 1.4426950408889634f;

// A chunk's rows of `columns` fp16 to shared memory; on sm_80 and newer they are there once the thread's copies were waited
// for and the block has met.
template <int columns, int threads>
__device__ __forceinline__ void stage(unsigned short *to, int to_pitch, const unsigned short *from, int from_pitch) {
    constexpr int kAcross = columns / 8, kEvery = threads / kAcross; // rows at a time
    const int row = threadIdx.x / kAcross, part = threadIdx.x % kAcross * 8;
    from += static_cast<size_t>(row) * from_pitch + part;
    to += row * to_pitch + part;
#pragma unroll
    for (int i = 0; i < kChunk / kEvery; ++i) {
#if __CUDA_ARCH__ >= 800
        copy_async(shared_address(to), reinterpret_cast<const unsigned char *>(from));
#else
        *reinterpret_cast<uint4 *>(to) = read(reinterpret_cast<const uint4 *>(from));
#endif
        to += kEvery * to_pitch;
        from += static_cast<size_t>(kEvery) * from_pitch;
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

// The outputs are fp16: what the fast instructions get wrong is far below its steps.
__device__ __forceinline__ float fast_convolved(float a, float b, float c, float d, float4 taps) {
    const float x = a * taps.x + b * taps.y + c * taps.z + d * taps.w;
    return x * fast_inverse(1.0f + fast_exp2(-kLog2e * x));
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
    const int width = row_width(channels, value_heads), channel = head * kHead + 2 * lane; // it, the next, and those 64 on
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
            y[i] = {fast_convolved(w[0].x, w[1].x, w[2].x, w[3].x, taps[0]),
                    fast_convolved(w[0].y, w[1].y, w[2].y, w[3].y, taps[1]),
                    fast_convolved(w[0].z, w[1].z, w[2].z, w[3].z, taps[2]),
                    fast_convolved(w[0].w, w[1].w, w[2].w, w[3].w, taps[3])};
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
                y[i] = scaled(y[i], factor * fast_inverse_root(squares[i] + eps));
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

constexpr int kHalf = kChunk / 2;

struct PrepareShared { // what overlaps is never alive at once
    unsigned short keys[kChunk * kPitch], values[kChunk * kPitch];
    union {
        unsigned short queries[kChunk * kPitch];
        unsigned short for_keys[kChunk * kSquarePitch]; // inverse of the system, times beta and growth of its columns
    };
    union {
        float system[kChunk * kWidePitch];
        unsigned short for_values[kChunk * kSquarePitch]; // the inverse times beta
    };
    union {
        float weights[kChunk * kWidePitch];
        float inverse[kChunk * kWidePitch]; // parts of it
        float scratch[kChunk * kWidePitch]; // where sums become fp16
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
    stage<kHead, kPrepareThreads>(s.keys, kPitch, own + (key_heads + key_head) * kHead, channels);
    stage<kHead, kPrepareThreads>(s.queries, kPitch, own + key_head * kHead, channels);
    stage<kHead, kPrepareThreads>(s.values, kPitch, own + (2 * key_heads + head) * kHead, channels);
    copies_end();
    if (threadIdx.x < 32) { // running sums of the log decay, two rows a lane, as powers of two
        const float first = kLog2e * read(gates + row + 2 * lane);
        const float pair = first + kLog2e * read(gates + row + 2 * lane + 1);
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
    const int column = 2 * lane; // a row at a time, two columns a lane
    if (!second) {
#pragma unroll 4
        for (int i = part * kTile; i < (part + 1) * kTile; ++i) {
            const float strength = s.beta[i], total = s.total[i];
            float *place = s.system + i * kWidePitch + column;
            // On and above the diagonal the difference is not negative and may overflow: it is selected away.
            const float low = strength * fast_exp2(total - s.total[column]) * place[0];
            const float high = strength * fast_exp2(total - s.total[column + 1]) * place[1];
            place[0] = column < i ? low : 0.0f;
            place[1] = column + 1 < i ? high : 0.0f;
        }
    }
    __syncthreads();

    // The inverse of both halves of the diagonal, a thread a column, from its top to its bottom; the queries meanwhile.
    const int block = threadIdx.x / kHalf, own_column = threadIdx.x % kHalf;
    float inverse[kHalf];
    if (threadIdx.x < kChunk) {
        const float *system = s.system + block * kHalf * (kWidePitch + 1);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            float sum[4] = {};
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 four = *reinterpret_cast<const float4 *>(system + i * kWidePitch + j);
                sum[0] += four.x * inverse[j];
                sum[1] += j + 1 < i ? four.y * inverse[j + 1] : 0.0f;
                sum[2] += j + 2 < i ? four.z * inverse[j + 2] : 0.0f;
                sum[3] += j + 3 < i ? four.w * inverse[j + 3] : 0.0f;
            }
            inverse[i] = (i == own_column ? 1.0f : 0.0f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
        }
    } else if (second) {
        const float last = s.total[kChunk - 1];
#pragma unroll 4
        for (int i = part * kTile; i < (part + 1) * kTile; ++i) {
            const float total = s.total[i], growth = fast_exp2(total);
            const float *place = s.weights + i * kWidePitch + column;
            const float low = fast_exp2(total - s.total[column]) * place[0];
            const float high = fast_exp2(total - s.total[column + 1]) * place[1];
            write(reinterpret_cast<unsigned *>(weights + (row + i) * kChunk) + lane,
                  half_pair(column <= i ? low : 0.0f, column + 1 <= i ? high : 0.0f));
            const uint2 q = *reinterpret_cast<const uint2 *>(s.queries + i * kPitch + 4 * lane);
            const unsigned factor = half_pair(growth, growth);
            write(reinterpret_cast<uint2 *>(grown + (row + i) * kHead) + lane,
                  uint2{multiply_pairs(q.x, factor), multiply_pairs(q.y, factor)});
            if (lane == 0) {
                write(factors + row + i, fast_exp2(last - total));
                write(factors + static_cast<size_t>(value_heads) * padded + row + i, growth);
            }
        }
    }
    __syncthreads();
    // An element of the inverse, for the products below. |element| <= 1: a product of contractions is none greater.
    const auto keep = [&](int i, int j, float value, float beta, float both) {
        s.for_values[i * kSquarePitch + j] = static_cast<unsigned short>(half_bits(value * beta));
        s.for_keys[i * kSquarePitch + j] = static_cast<unsigned short>(half_bits(value * both));
    };
    if (threadIdx.x < kChunk) {
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            s.inverse[(block * kHalf + i) * kWidePitch + block * kHalf + own_column] = inverse[i];
        }
    }
    __syncthreads();
    // Below: - second half's inverse * (system * first half's inverse), four columns a thread.
    const int low_row = kHalf + threadIdx.x / 8, low_column = threadIdx.x % 8 * 4;
    float low[4] = {};
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
        const float left = s.system[low_row * kWidePitch + k];
        const float4 right = *reinterpret_cast<const float4 *>(s.inverse + k * kWidePitch + low_column);
        low[0] += left * right.x, low[1] += left * right.y, low[2] += left * right.z, low[3] += left * right.w;
    }
    *reinterpret_cast<float4 *>(s.inverse + low_row * kWidePitch + low_column) = float4{low[0], low[1], low[2], low[3]};
    __syncthreads(); // the system has done its work
    low[0] = low[1] = low[2] = low[3] = 0;
#pragma unroll
    for (int k = 0; k < kHalf; ++k) {
        const float left = -s.inverse[low_row * kWidePitch + kHalf + k];
        const float4 right = *reinterpret_cast<const float4 *>(s.inverse + (kHalf + k) * kWidePitch + low_column);
        low[0] += left * right.x, low[1] += left * right.y, low[2] += left * right.z, low[3] += left * right.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float beta = s.beta[low_column + j];
        keep(low_row, low_column + j, low[j], beta, beta * fast_exp2(s.total[low_column + j]));
    }
    if (threadIdx.x < kChunk) {
        const int j = threadIdx.x;
        const float beta = s.beta[j], both = beta * fast_exp2(s.total[j]);
#pragma unroll
        for (int i = 0; i < kHalf; ++i) {
            keep(block * kHalf + i, j, inverse[i], beta, both);
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
    float *scratch = s.scratch + part * kTile * kWidePitch;
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
                  uint2{half_pair(four.x, four.y), half_pair(four.z, four.w)});
        }
        __syncwarp();
    }
}

constexpr int kScanThreads = 256;
constexpr int kValues = 32;            // rows of a head's state that a block has
constexpr int kValueTiles = kValues / kTile;
constexpr int kValuePitch = kValues + 8;  // rows of 32 fp16
constexpr int kScratchPitch = kTile + 4;  // rows of 16 FP32

struct ScanShared {
    unsigned short state[kValues * kPitch]; // of the chunk's beginning
    unsigned short update[kChunk * kValuePitch], decayed[kChunk * kValuePitch]; // u, and u as the chunk's end sees it
    float scratch[kScanThreads / 32][kValues * kScratchPitch];                 // a warp's
    // sm_80 and newer: the chunk's operands; sm_70 takes them from where they are.
    unsigned short w[kChunk * kPitch], grown[kChunk * kPitch], keys[kChunk * kPitch], weights[kChunk * kSquarePitch];
};

// The chunks of a lane in order. halves_in, w, grown, u, weights, factors: as above. x and rows: the history moves, too.
// state: FP32 [all_lanes, value_heads, 128 (value), 128 (key)]; out: FP32 [tokens, value_heads, 128].
// Grid: (128 / kValues, value_heads). A warp has 16 rows of the chunk by 16 values, and 16 columns of the state.
extern "C" __global__ void __launch_bounds__(kScanThreads)
    chunks_scan(const float *x, int x_stride, float *rows, float *state, int all_lanes, int lane_index, const int *turns,
                const unsigned short *halves_in, const unsigned short *w, const unsigned short *grown, const float *u,
                const unsigned short *weights, const float *factors, float *out, int chunks, int lead, int tokens,
                int key_heads) {
    DYNAMIC_SHARED(memory);
    ScanShared &s = *reinterpret_cast<ScanShared *>(memory);
    const int head = blockIdx.y, value_heads = gridDim.y, padded = chunks * kChunk, block_value = blockIdx.x * kValues;
    const int channels = (2 * key_heads + value_heads) * kHead, key_head = head / (value_heads / key_heads);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int part = warp % 4, own = part * kTile, side = warp / 4 * kTile, value = block_value + side, column = warp * kTile;
    const size_t first = static_cast<size_t>(head) * padded;
    const unsigned short *keys = halves_in + (key_heads + key_head) * kHead;
    float *scratch = s.scratch[warp];
    {
        const int width = row_width(channels, value_heads);
        keep_history(x, x_stride, rows_of(rows, read(turns + lane_index), all_lanes, lane_index, width), width, channels,
                     tokens, (head * gridDim.x + blockIdx.x) * kScanThreads + threadIdx.x,
                     gridDim.x * gridDim.y * kScanThreads);
    }
    const auto stage_rows = [&](int chunk) { // what meets the state
        if (kAsync && chunk < chunks) {
            const size_t at = first + chunk * kChunk;
            stage<kHead, kScanThreads>(s.w, kPitch, w + at * kHead, kHead);
            stage<kHead, kScanThreads>(s.grown, kPitch, grown + at * kHead, kHead);
        }
        copies_end();
    };
    const auto stage_rest = [&](int chunk) { // what meets the updates
        if (kAsync && chunk < chunks) {
            const size_t at = first + chunk * kChunk;
            stage<kHead, kScanThreads>(s.keys, kPitch, keys + static_cast<size_t>(chunk) * kChunk * channels, channels);
            stage<kChunk, kScanThreads>(s.weights, kSquarePitch, weights + at * kChunk, kChunk);
        }
        copies_end();
    };
    constexpr int kOwn = kTile * kTile / 4 / 32; // float4 of u a lane: row 8 i + lane / 4, quad lane % 4
    float4 known[kOwn];
    float remaining[kOwn], growth;
    const auto load = [&](int chunk) {
        if (chunk < chunks) {
            const size_t at = first + chunk * kChunk;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const size_t row = at + own + i * 8 + lane / 4;
                known[i] = read(reinterpret_cast<const float4 *>(u + row * kHead + value) + lane % 4);
                remaining[i] = read(factors + row);
            }
            growth = read(factors + static_cast<size_t>(value_heads) * padded + at + kChunk - 1);
        }
    };
    stage_rows(0);
    load(0);

    float *place = state + ((static_cast<size_t>(lane_index) * value_heads + head) * kHead + block_value) * kHead + column;
    SumTile now[kValueTiles];
#pragma unroll
    for (int m = 0; m < kValueTiles; ++m) {
        now[m] = sum_tile(place + m * kTile * kHead, kHead);
    }
    const auto publish = [&] { // this warp's columns of the state as fp16
#pragma unroll
        for (int m = 0; m < kValueTiles; ++m) {
            store_tile<From::kShared>(scratch + m * kTile * kScratchPitch, now[m], kScratchPitch);
        }
        __syncwarp();
        const float4 *from = reinterpret_cast<const float4 *>(scratch + lane * kScratchPitch); // a lane a row
        uint4 *to = reinterpret_cast<uint4 *>(s.state + lane * kPitch + column);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 a = from[2 * i], b = from[2 * i + 1];
            to[i] = uint4{halves(a.x, a.y), halves(a.z, a.w), halves(b.x, b.y), halves(b.z, b.w)};
        }
        __syncwarp();
    };
    publish();
    copies_wait();
    __syncthreads();
    stage_rest(0);

    // A chunk's operands are asked for as soon as their place is free.
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const size_t at = first + chunk * kChunk + own; // this warp's first row
        SumTile meant = {}, answer = {}; // W S^T, and the outputs
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
            const HalfTile b = right_tile<From::kShared, Order::kColumns>(s.state + side * kPitch + k * kTile, kPitch);
            multiply_tiles<Order::kRows, Order::kColumns>(meant, a, b);
            multiply_tiles<Order::kRows, Order::kColumns>(answer, q, b);
        }
        store_tile<From::kShared>(scratch, meant, kScratchPitch);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int row = i * 8 + lane / 4, quad = lane % 4;
            const float4 m = *reinterpret_cast<const float4 *>(scratch + row * kScratchPitch + 4 * quad);
            const float4 v = {known[i].x - m.x, known[i].y - m.y, known[i].z - m.z, known[i].w - m.w};
            const float4 d = scaled(v, remaining[i]);
            const int to = (own + row) * kValuePitch + side + 4 * quad;
            *reinterpret_cast<uint2 *>(s.update + to) = uint2{halves(v.x, v.y), halves(v.z, v.w)};
            *reinterpret_cast<uint2 *>(s.decayed + to) = uint2{halves(d.x, d.y), halves(d.z, d.w)};
        }
        const float grows = growth;
        copies_wait();
        __syncthreads();
        stage_rows(chunk + 1);
        load(chunk + 1);

#pragma unroll
        for (int m = 0; m < kValueTiles; ++m) {
            now[m].scale(grows);
        }
#pragma unroll
        for (int k = 0; k < kChunk / kTile; ++k) {
            HalfTile b;
            if (kAsync) {
                b = right_tile<From::kShared, Order::kRows>(s.keys + k * kTile * kPitch + column, kPitch);
            } else {
                const size_t key_row = static_cast<size_t>(chunk * kChunk + k * kTile);
                b = right_tile<From::kGlobal, Order::kRows>(keys + key_row * channels + column, channels);
            }
#pragma unroll
            for (int m = 0; m < kValueTiles; ++m) {
                const HalfTile a =
                    left_tile<From::kShared, Order::kColumns>(s.decayed + k * kTile * kValuePitch + m * kTile, kValuePitch);
                multiply_tiles<Order::kColumns, Order::kRows>(now[m], a, b);
            }
        }
#pragma unroll
        for (int k = 0; k < kChunk / kTile; ++k) {
            if (k <= part) {
                HalfTile a;
                if (kAsync) {
                    a = left_tile<From::kShared, Order::kRows>(s.weights + own * kSquarePitch + k * kTile, kSquarePitch);
                } else {
                    a = left_tile<From::kGlobal, Order::kRows>(weights + at * kChunk + k * kTile, kChunk);
                }
                const HalfTile b =
                    right_tile<From::kShared, Order::kRows>(s.update + k * kTile * kValuePitch + side, kValuePitch);
                multiply_tiles<Order::kRows, Order::kRows>(answer, a, b);
            }
        }
        const int token = chunk * kChunk + own - lead;
        if (token >= 0 && token + kTile <= tokens) {
            store_tile<From::kGlobal>(out + (static_cast<size_t>(token) * value_heads + head) * kHead + value, answer,
                                      value_heads * kHead);
        } else {
            store_tile<From::kShared>(scratch, answer, kScratchPitch);
            __syncwarp();
            for (int i = lane / kTile; i < kTile; i += 2) {
                if (token + i >= 0 && token + i < tokens) {
                    write(out + (static_cast<size_t>(token + i) * value_heads + head) * kHead + value + lane % kTile,
                          scratch[i * kScratchPitch + lane % kTile]);
                }
            }
            __syncwarp();
        }
        publish();
        copies_wait();
        __syncthreads();
        stage_rest(chunk + 1);
    }
#pragma unroll
    for (int m = 0; m < kValueTiles; ++m) {
        store_tile<From::kGlobal>(place + m * kTile * kHead, now[m], kHead);
    }
}
