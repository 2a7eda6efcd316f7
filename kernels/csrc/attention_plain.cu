// Attention over the paged cache in the plain way: no segments, no tensor cores, no fp16 between. `--attention plain`.
//
// A block owns one query head of one row and walks all of its positions in order, a page at a time: its warps score the
// positions in FP32, it meets, and each thread adds the weighted values of its own dimension. Words become numbers by the
// cache's definition, so it shares with the fast kernels where elements stand (kvcache.cuh) and nothing else. Slow: every
// query head of every row reads the cache for itself. docs/kernels/attention.md.
#include "common.cuh"
#include "kvcache.cuh"

constexpr int kThreads = kDim; // a dimension each
constexpr int kWarps = kThreads / 32;
constexpr int kOwn = kDim / 32; // dimensions of a lane in scoring
constexpr float kLog2e = 1.4426950408889634f;

struct Int8Pool {
    static constexpr int kPiece = 16;
    __device__ static float element(const void *tile, int index, const unsigned short *scales, int position, int dim) {
        const int word = read(static_cast<const unsigned char *>(tile) + index);
        return static_cast<float>(word - 128) * half_value(read(scales + position * kBlocks + dim / kBlock));
    }
    __device__ static size_t bytes(size_t elements) { return elements; }
};

struct HalfPool {
    static constexpr int kPiece = 8;
    __device__ static float element(const void *tile, int index, const unsigned short *, int, int) {
        return half_value(read(static_cast<const unsigned short *>(tile) + index));
    }
    __device__ static size_t bytes(size_t elements) { return 2 * elements; }
};

// Which sequence a row is of, and where it stands; starts null: one sequence whose first row stands at `start`.
struct Place {
    int sequence, position;
};
__device__ __forceinline__ Place place_of(int row, const int *starts, const int *counts, const int *firsts,
                                          int sequences, int start) {
    if (!starts) {
        return {0, start + row};
    }
    for (int sequence = 0; sequence < sequences; ++sequence) {
        const int token = row - read(firsts + sequence);
        if (token >= 0 && token < read(counts + sequence)) {
            return {sequence, read(starts + sequence) + token};
        }
    }
    return {0, -1};
}

// query: fp16 [rows, q_heads, 256]; tables, starts, counts, firsts as in attention.cu; positions: [rows], -1 for a row
// that is not used, or null: all are. out: fp16 [rows, q_heads * 256], times sigmoid(gate) if gate is not null.
// Grid: (rows, q_heads).
template <class Pool>
__device__ __forceinline__ void attend_plainly(const unsigned short *query, const void *keys,
                                               const unsigned short *key_scales, const void *values,
                                               const unsigned short *value_scales, int pages, int kv_heads,
                                               const int *tables, int table_stride, const int *starts,
                                               const int *counts, const int *firsts, int sequences, int start,
                                               const int *positions, const float *gate, int gate_stride,
                                               int gate_head_stride, unsigned short *out, float scale) {
    __shared__ float scores[kPage];
    __shared__ float weights[kPage];
    const int row = blockIdx.x, head = blockIdx.y, q_heads = gridDim.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = threadIdx.x;
    const Place at = place_of(row, starts, counts, firsts, sequences, start);
    if (at.position < 0 || (positions && read(positions + row) < 0)) {
        return;
    }
    const size_t index = static_cast<size_t>(row) * q_heads + head;
    const int *table = tables + static_cast<size_t>(at.sequence) * table_stride;
    float own[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        own[i] = half_value(read(query + index * kDim + lane * kOwn + i)) * (scale * kLog2e);
    }
    float peak = __uint_as_float(0xFF800000u), mass = 0, total = 0; // of the positions so far; total: of this dimension
    for (int page = 0; page <= at.position / kPage; ++page) {
        const int held = min(kPage, at.position + 1 - page * kPage);
        const size_t tile = static_cast<size_t>(min(max(read(table + page), 0), pages - 1)) * kv_heads +
                            head / (q_heads / kv_heads);
        const char *key_tile = static_cast<const char *>(keys) + Pool::bytes(tile * kPage * kDim);
        const char *value_tile = static_cast<const char *>(values) + Pool::bytes(tile * kPage * kDim);
        const unsigned short *own_key_scales = key_scales + tile * kPage * kBlocks;
        const unsigned short *own_value_scales = value_scales + tile * kPage * kBlocks;
        for (int position = warp; position < held; position += kWarps) {
            float score = 0;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const int place = lane * kOwn + i;
                score += own[i] * Pool::element(key_tile, key_index<Pool::kPiece>(position, place), own_key_scales,
                                                position, place);
            }
            score = warp_sum(score);
            if (lane == 0) {
                scores[position] = score;
            }
        }
        __syncthreads();
        float next = peak;
        for (int position = 0; position < held; ++position) {
            next = fmaxf(next, scores[position]);
        }
        if (threadIdx.x < held) {
            weights[threadIdx.x] = exp2f(scores[threadIdx.x] - next);
        }
        __syncthreads();
        const float kept = exp2f(peak - next);
        peak = next;
        mass *= kept;
        total *= kept;
        for (int position = 0; position < held; ++position) {
            mass += weights[position];
            total += weights[position] * Pool::element(value_tile, value_index<Pool::kPiece>(position, dim),
                                                       own_value_scales, position, dim);
        }
    }
    float result = total / mass;
    if (gate) {
        result *= sigmoid(read(gate + static_cast<size_t>(row) * gate_stride + head * gate_head_stride + dim));
    }
    int overflowed = 0; // an average of fp16 values, times a gate below one, fits
    write(out + index * kDim + dim, static_cast<unsigned short>(half_bits(staged(result, overflowed))));
}

#define ATTEND_PLAINLY(name, Pool)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        name(const unsigned short *query, const void *keys, const unsigned short *key_scales, const void *values,      \
             const unsigned short *value_scales, int pages, int kv_heads, const int *tables, int table_stride,         \
             const int *starts, const int *counts, const int *firsts, int sequences, int start, const int *positions,  \
             const float *gate, int gate_stride, int gate_head_stride, unsigned short *out, float scale) {             \
        attend_plainly<Pool>(query, keys, key_scales, values, value_scales, pages, kv_heads, tables, table_stride,     \
                             starts, counts, firsts, sequences, start, positions, gate, gate_stride, gate_head_stride, \
                             out, scale);                                                                              \
    }

ATTEND_PLAINLY(attention_plain_int8, Int8Pool)
ATTEND_PLAINLY(attention_plain_fp16, HalfPool)
