// Decode attention over the paged cache: a few query tokens of a few sequences, split over positions.
//
// A block owns one segment of positions of one sequence and kv head, and walks it a page (64 positions) at a time: its
// warps score some of the page's positions each, meet for the softmax, and then add weighted values of some dimensions each.
// The query rows of a kv head (tokens x heads of its group) are the rows of the tensor-core product. A second kernel merges
// the segments in their order. Segments begin at fixed positions and a row's arithmetic never sees another row, so a
// token's bits depend on its query and its context alone. docs/kernels/attention.md.
#if __CUDA_ARCH__ >= 800
#include "attention_ampere.cuh"
#else
#include "attention_volta.cuh"
#endif

constexpr int kMaxSegments = 2560;

constexpr int kMergeWays = 64;          // segments merged side by side
constexpr int kMergeColumns = kDim / 4; // dimensions a block
constexpr int kMergeOwn = 8;            // dimensions a thread
constexpr int kMergeAhead = 6;          // segments of a way that are asked for first
constexpr int kMergeThreads = kMergeWays * kMergeColumns / kMergeOwn;

// out: fp16 [rows, q_heads * 256] = attended, times sigmoid(gate) if gate is not null: element d of head h of row t at
// gate + t * gate_stride + h * gate_head_stride + d. positions: [rows], -1 for a row that is not used.
// Grid: (4 quarters of the dimensions, q_heads, rows).
extern "C" __global__ void __launch_bounds__(kMergeThreads)
    attention_merge(const unsigned short *partial, const float2 *stats, int max_segments, const int *positions,
                    const float *gate, int gate_stride, int gate_head_stride, unsigned short *out) {
    __shared__ float factors[kMaxSegments];
    __shared__ float scratch[kMergeThreads / 32];
    __shared__ float parts[kMergeThreads / 32][kMergeColumns + 4];
    const int q_heads = gridDim.y, head = blockIdx.y, row = blockIdx.z;
    const int way = threadIdx.x / (kMergeColumns / kMergeOwn), eight = threadIdx.x % (kMergeColumns / kMergeOwn);
    const size_t index = static_cast<size_t>(row) * q_heads + head;
    const float2 *own = stats + index * max_segments;
    const uint4 *from = reinterpret_cast<const uint4 *>(partial + index * max_segments * kDim) +
                        blockIdx.x * (kMergeColumns / kMergeOwn) + eight;
    const int position = read(positions + row);
    const int dim = blockIdx.x * kMergeColumns + threadIdx.x;
    float opening = 0;
    if (gate && threadIdx.x < kMergeColumns) {
        opening = read(gate + static_cast<size_t>(row) * gate_stride + head * gate_head_stride + dim);
    }
    take_over(); // positions and gates are older than the results
    if (position < 0) {
        return;
    }
    const int segments = min(segment_of(position) + 1, max_segments);
    // The first results are asked for before their factors are known: one wait for memory less.
    float2 stat = {kNothing, 0};
    if (threadIdx.x < segments) {
        stat = read(own + threadIdx.x);
    }
    uint4 ahead[kMergeAhead] = {};
#pragma unroll
    for (int i = 0; i < kMergeAhead; ++i) {
        if (way + i * kMergeWays < segments) {
            ahead[i] = read(from + (way + i * kMergeWays) * (kDim / kMergeOwn));
        }
    }

    float peak = stat.x;
    for (int segment = threadIdx.x + kMergeThreads; segment < segments; segment += kMergeThreads) {
        peak = fmaxf(peak, read(own + segment).x);
    }
    peak = warp_max(peak);
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = peak;
    }
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kMergeThreads / 32; ++warp) {
        peak = fmaxf(peak, scratch[warp]);
    }
    float mass = 0;
    for (int segment = threadIdx.x; segment < segments; segment += kMergeThreads) {
        const float2 s = segment == threadIdx.x ? stat : read(own + segment);
        const float share = exp2f(s.x - peak) * s.y;
        factors[segment] = share;
        mass += share;
    }
    const float inverse = 1.0f / block_sum(mass, scratch); // its barriers make the factors known, too

    float total[kMergeOwn] = {};
    const auto add = [&](const uint4 &v, float f) {
        const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < kMergeOwn; ++i) {
            total[i] += f * half_value(pairs[i / 2] >> 16 * (i % 2) & 0xFFFF);
        }
    };
#pragma unroll
    for (int i = 0; i < kMergeAhead; ++i) {
        if (way + i * kMergeWays < segments) {
            add(ahead[i], factors[way + i * kMergeWays]);
        }
    }
#pragma unroll 4
    for (int segment = way + kMergeAhead * kMergeWays; segment < segments; segment += kMergeWays) {
        add(read(from + segment * (kDim / kMergeOwn)), factors[segment]);
    }
#pragma unroll
    for (int i = 0; i < kMergeOwn; ++i) { // the four ways of a warp, then the warps
        total[i] += __shfl_xor_sync(kAll, total[i], 8);
        total[i] += __shfl_xor_sync(kAll, total[i], 16);
        if (threadIdx.x % 32 < kMergeColumns / kMergeOwn) {
            parts[threadIdx.x / 32][eight * kMergeOwn + i] = total[i];
        }
    }
    __syncthreads();
    if (threadIdx.x >= kMergeColumns) {
        return;
    }
    float result = parts[0][threadIdx.x];
#pragma unroll
    for (int other = 1; other < kMergeThreads / 32; ++other) {
        result += parts[other][threadIdx.x];
    }
    result *= inverse;
    if (gate) {
        result *= sigmoid(opening);
    }
    int overflowed = 0; // an average of fp16 values, times a gate below one, fits
    write(out + index * kDim + dim, static_cast<unsigned short>(half_bits(staged(result, overflowed))));
}

// query: fp16 [rows, q_heads, 256]. Sequence s: tokens starts[s] .. starts[s] + counts[s] - 1, rows firsts[s] onwards,
// pages tables[s * table_stride ...]. partial: fp16 [rows, q_heads, max_segments, 256], the attention to each segment
// alone; stats: FP32 pairs [rows, q_heads, max_segments], the largest score (in units of log 2) and the sum of the
// weights relative to it, in a unit that all segments share. Grid: (kv heads, sequences * passes, max_segments).
#define ATTEND(name, Cache, tiles)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocks<Cache, tiles>)                       \
        name(const unsigned short *query, const void *keys, const unsigned short *key_scales, const void *values,      \
             const unsigned short *value_scales, int pages, const int *tables, int table_stride, const int *starts,    \
             const int *counts, const int *firsts, unsigned short *partial, float2 *stats, int q_heads, int passes,    \
             int pass_tokens, float scale) {                                                                           \
        attend<Cache, tiles>(query, keys, key_scales, values, value_scales, pages, tables, table_stride, starts,       \
                             counts, firsts, partial, stats, q_heads, passes, pass_tokens, scale * kLog2e);            \
    }

ATTEND(attention_int8_1, Int8Cache, 1)
ATTEND(attention_int8_2, Int8Cache, 2)
ATTEND(attention_int8_3, Int8Cache, 3)
ATTEND(attention_int8_4, Int8Cache, 4)
ATTEND(attention_int8_5, Int8Cache, 5)
ATTEND(attention_fp16_1, HalfCache, 1)
ATTEND(attention_fp16_2, HalfCache, 2)
ATTEND(attention_fp16_3, HalfCache, 3)
ATTEND(attention_fp16_4, HalfCache, 4)
ATTEND(attention_fp16_5, HalfCache, 5)
