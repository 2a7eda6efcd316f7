// Delta chunks, the second kernel: what of every chunk and head is known before its state.
#pragma once
#include "chunks.cuh"

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
