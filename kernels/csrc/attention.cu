// Decode attention over the paged cache: a few query tokens of a few sequences, split over positions.
//
// A block owns one segment of positions of one sequence and kv head, and walks it a page (64 positions) at a time: its
// eight warps score eight positions each, meet for the softmax, and then add weighted values of 32 dimensions each. The
// query rows of a kv head (tokens x heads of its group) are the rows of the tensor-core product. A second kernel merges
// the segments in their order. Segments begin at fixed positions and a row's arithmetic never sees another row, so a
// token's bits depend on its query and its context alone. docs/kernels/attention.md.
#include "attention_tiles.cuh"

constexpr int kMaxSegments = 2560;
constexpr int kFewRowsBlocks = __CUDA_ARCH__ >= 800 ? 2 : 3; // a multiprocessor should hold: what registers allow
constexpr int kSegmentPages = 8;      // pages of the longest segment
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNothing = -1e30f;    // below every score, and finite: the difference of two is no NaN

// query: fp16 [rows, q_heads, 256]. Sequence s: tokens starts[s] .. starts[s] + counts[s] - 1, rows firsts[s] onwards,
// pages tables[s * table_stride ...]. partial: fp16 [rows, q_heads, max_segments, 256], the attention to each segment
// alone; stats: FP32 pairs [rows, q_heads, max_segments], the largest score (in units of log 2) and the sum of the
// weights relative to it. Grid: (kv heads, sequences * passes, max_segments).
template <class Cache, int kTiles>
__device__ void attend(const unsigned short *query, const void *keys, const unsigned short *key_scales,
                       const void *values, const unsigned short *value_scales, int pages, const int *tables,
                       int table_stride, const int *starts, const int *counts, const int *firsts,
                       unsigned short *partial, float2 *stats, int q_heads, int passes, int pass_tokens, float scale) {
    constexpr int kRows = kTiles * kTileRows;
    DYNAMIC_SHARED(memory);
    unsigned short *queries = reinterpret_cast<unsigned short *>(memory);
    unsigned short *weights[2] = {queries + kRows * kRowHalves, queries + 2 * kRows * kRowHalves}; // scores at first
    __shared__ float shrink[kRows], peaks[kRows];
    __shared__ int limits[kRows], heads[kRows]; // last position that a row sees; its head of `query`, or -1
    __shared__ int table[kSegmentPages];
    const float kHidden = __uint_as_float(0xFF800000u); // minus infinity

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int kv_heads = gridDim.x, kv_head = blockIdx.x, group = q_heads / kv_heads;
    take_over();
    const int sequence = blockIdx.y / passes, first_token = blockIdx.y % passes * pass_tokens;
    const int max_segments = gridDim.z, segment = max_segments - 1 - blockIdx.z; // the last ones are the longest
    const int tokens = min(read(counts + sequence) - first_token, pass_tokens);
    const int start = read(starts + sequence) + first_token; // position of the first token
    const int first_row = read(firsts + sequence) + first_token;
    const int begin = segment_begin(segment);
    const int end = min(segment_begin(segment + 1), start + tokens); // of the positions that some token sees
    if (tokens <= 0 || begin >= end) {
        return;
    }
    const int page_count = (end - begin + kPage - 1) / kPage;
    if (threadIdx.x < page_count) {
        const int page = read(tables + static_cast<size_t>(sequence) * table_stride + begin / kPage + threadIdx.x);
        table[threadIdx.x] = min(max(page, 0), pages - 1);
    }
    if (threadIdx.x < kRows) {
        const int token = threadIdx.x / group;
        limits[threadIdx.x] = start + token;
        heads[threadIdx.x] = token < tokens ? (first_row + token) * q_heads + kv_head * group + threadIdx.x % group : -1;
        peaks[threadIdx.x] = kNothing;
    }
    __syncthreads();

    const size_t tile_pieces = kPage * kDim / Cache::kPiece;
    uint4 key[Cache::kPieces], value[Cache::kPieces], value_scale = {};
    unsigned key_scale = 0;
    const auto tile_of = [&](int page) { return static_cast<size_t>(table[page]) * kv_heads + kv_head; };
    const auto load_keys = [&](int page) {
        const uint4 *pool = static_cast<const uint4 *>(keys) + tile_of(page) * tile_pieces;
#pragma unroll
        for (int n = 0; n < Cache::kPieces; ++n) {
            key[n] = stream(pool + Arch::template key_piece<Cache>(warp, lane, n));
        }
        if (Cache::kScaled) {
            key_scale = Arch::key_scales(key_scales + tile_of(page) * kPage * kBlocks, warp, lane);
        }
    };
    const auto load_values = [&](int page) {
        const uint4 *pool = static_cast<const uint4 *>(values) + tile_of(page) * tile_pieces;
#pragma unroll
        for (int n = 0; n < Cache::kPieces; ++n) {
            value[n] = stream(pool + Arch::template value_piece<Cache>(warp, lane, n));
        }
        const int left = end - begin - page * kPage;
        if (!Cache::kScaled && left < kPage) { // what stands behind the last token may be no number
#pragma unroll
            for (int n = 0; n < Cache::kPieces; ++n) {
                unsigned *halves = reinterpret_cast<unsigned *>(&value[n]);
                const int own = left - Arch::template value_position<Cache>(lane, n);
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    halves[pair] &= own > 2 * pair + 1 ? ~0u : own > 2 * pair ? 0xFFFFu : 0u;
                }
            }
        }
    };
    const auto load_value_scales = [&](int page) { // positions 2 lane and 2 lane + 1, four blocks each
        if (Cache::kScaled) {
            value_scale = stream(reinterpret_cast<const uint4 *>(value_scales + tile_of(page) * kPage * kBlocks) + lane);
        }
    };

    load_keys(0);
    load_values(0);
    load_value_scales(0);
    for (int index = threadIdx.x; index < kRows * (kDim / 8); index += kThreads) {
        const int row = index / (kDim / 8), chunk = index % (kDim / 8);
        uint4 halves = {};
        if (heads[row] >= 0) {
            halves = read(reinterpret_cast<const uint4 *>(query) + static_cast<size_t>(heads[row]) * (kDim / 8) + chunk);
        }
        *reinterpret_cast<uint4 *>(queries + query_chunk(row, chunk / 8, chunk % 8)) = halves;
    }
    __syncthreads();

    float sum[kTiles][8] = {};
    float mass[kTiles] = {}; // this lane's share of it, of the rows warp, warp + 8, ...
    Arch::template score<Cache, kTiles>(key, key_scale, queries, reinterpret_cast<float *>(weights[0]), warp, lane);
    if (page_count > 1) {
        load_keys(1);
    }
    __syncthreads();
    // The softmax of a page stands beside the scores of the next one: neither waits for the other.
    for (int page = 0; page < page_count; ++page) {
        unsigned short *now = page % 2 ? weights[1] : weights[0], *next = page % 2 ? weights[0] : weights[1];
        const int position = begin + page * kPage;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            const int row = warp + n * kTileRows;
            const float *own = reinterpret_cast<float *>(now) + row * (kRowHalves / 2) + 2 * lane;
            float a = own[0], b = own[1];
            if (Arch::kPartials == 2) {
                a += own[kPage];
                b += own[kPage + 1];
            }
            const int visible = limits[row] - position - 2 * lane; // below 0: none, 0: the first of the two
            a = visible >= 0 ? a * scale : kHidden;
            b = visible >= 1 ? b * scale : kHidden;
            const float before = peaks[row], peak = fmaxf(before, warp_max(fmaxf(a, b)));
            const float factor = exp2f(before - peak);
            a = exp2f(a - peak);
            b = exp2f(b - peak);
            mass[n] = mass[n] * factor + (a + b);
            __syncwarp(); // all lanes have read the row's scores and its peak
            if (lane == 0) {
                shrink[row] = factor;
                peaks[row] = peak;
            }
            unsigned short *to = now + row * kRowHalves + 2 * lane; // over the row's scores, which this warp has read
            if (Cache::kScaled) {
                const unsigned scales[4] = {value_scale.x, value_scale.y, value_scale.z, value_scale.w};
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    const float first = half_value(scales[block / 2] >> 16 * (block % 2) & 0xFFFF) * kWeightUnit;
                    const float second = half_value(scales[2 + block / 2] >> 16 * (block % 2) & 0xFFFF) * kWeightUnit;
                    // A hidden position's scale may be no number: select, do not multiply by zero.
                    *reinterpret_cast<unsigned *>(to + block * kPage) =
                        half_pair(visible >= 0 ? a * first : 0.0f, visible >= 1 ? b * second : 0.0f);
                }
            } else {
                *reinterpret_cast<unsigned *>(to) = half_pair(a, b);
            }
        }
        if (page + 1 < page_count) {
            load_value_scales(page + 1);
            Arch::template score<Cache, kTiles>(key, key_scale, queries, reinterpret_cast<float *>(next), warp, lane);
        }
        if (page + 2 < page_count) {
            load_keys(page + 2);
        }
        __syncthreads();
        Arch::template weigh<Cache, kTiles>(value, now, shrink, sum, warp, lane);
        if (page + 1 < page_count) {
            load_values(page + 1);
        }
        __syncthreads();
    }

#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
        const int row = warp + n * kTileRows;
        const float total = warp_sum(mass[n]);
        if (lane == 0) {
            shrink[row] = total > 0 ? Cache::kUnit / total : total; // 0: a row that sees nothing here; NaN stays
            if (heads[row] >= 0) {
                write(stats + static_cast<size_t>(heads[row]) * max_segments + segment, float2{peaks[row], total});
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            int row, dimension;
            const float2 v = Arch::pair(sum[tile], n, warp, lane, row, dimension);
            row += tile * kTileRows;
            if (heads[row] >= 0) {
                const size_t place = static_cast<size_t>(heads[row]) * max_segments + segment;
                write(reinterpret_cast<unsigned *>(partial + place * kDim + dimension),
                      half_pair(v.x * shrink[row], v.y * shrink[row]));
            }
        }
    }
}

constexpr int kMergeWays = 64;          // segments merged side by side
constexpr int kMergeColumns = kDim / 4; // dimensions a block
constexpr int kMergeOwn = 8;            // dimensions a thread
constexpr int kMergeThreads = kMergeWays * kMergeColumns / kMergeOwn;

// out: fp16 [rows, q_heads * 256] = attended, times sigmoid(gate) if gate is not null: element d of head h of row t at
// gate + t * gate_stride + h * gate_head_stride + d. positions: [rows], -1 for a row that is not used.
// Grid: (4 quarters of the dimensions, q_heads, rows).
extern "C" __global__ void __launch_bounds__(kMergeThreads)
    attention_merge(const unsigned short *partial, const float2 *stats, int max_segments, const int *positions,
                    const float *gate, int gate_stride, int gate_head_stride, unsigned short *out) {
    __shared__ float factors[kMaxSegments];
    __shared__ float scratch[kMergeThreads / 32];
    __shared__ float parts[kMergeWays][kMergeColumns + 4];
    take_over();
    const int q_heads = gridDim.y, head = blockIdx.y, row = blockIdx.z;
    const int position = read(positions + row);
    if (position < 0) {
        return;
    }
    const int segments = min(segment_of(position) + 1, max_segments);
    const size_t index = static_cast<size_t>(row) * q_heads + head;
    const float2 *own = stats + index * max_segments;

    float peak = kNothing;
    for (int segment = threadIdx.x; segment < segments; segment += kMergeThreads) {
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
        const float2 s = read(own + segment);
        const float share = exp2f(s.x - peak) * s.y;
        factors[segment] = share;
        mass += share;
    }
    const float inverse = 1.0f / block_sum(mass, scratch); // its barriers make the factors known, too

    const int way = threadIdx.x / (kMergeColumns / kMergeOwn), eight = threadIdx.x % (kMergeColumns / kMergeOwn);
    const uint4 *from = reinterpret_cast<const uint4 *>(partial + index * max_segments * kDim) +
                        blockIdx.x * (kMergeColumns / kMergeOwn) + eight;
    float total[kMergeOwn] = {};
#pragma unroll 8
    for (int segment = way; segment < segments; segment += kMergeWays) {
        const uint4 v = read(from + segment * (kDim / kMergeOwn));
        const float f = factors[segment];
        const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < kMergeOwn; ++i) {
            total[i] += f * half_value(pairs[i / 2] >> 16 * (i % 2) & 0xFFFF);
        }
    }
#pragma unroll
    for (int i = 0; i < kMergeOwn; ++i) {
        parts[way][eight * kMergeOwn + i] = total[i];
    }
    __syncthreads();
    if (threadIdx.x >= kMergeColumns) {
        return;
    }
    float result = parts[0][threadIdx.x];
#pragma unroll
    for (int other = 1; other < kMergeWays; ++other) {
        result += parts[other][threadIdx.x];
    }
    result *= inverse;
    const int dim = blockIdx.x * kMergeColumns + threadIdx.x;
    if (gate) {
        result *= sigmoid(read(gate + static_cast<size_t>(row) * gate_stride + head * gate_head_stride + dim));
    }
    int overflowed = 0; // an average of fp16 values, times a gate below one, fits
    write(out + index * kDim + dim, static_cast<unsigned short>(half_bits(staged(result, overflowed))));
}

#define ATTEND(name, Cache, tiles, blocks)                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads, blocks)                                                     \
        name(const unsigned short *query, const void *keys, const unsigned short *key_scales, const void *values,      \
             const unsigned short *value_scales, int pages, const int *tables, int table_stride, const int *starts,    \
             const int *counts, const int *firsts, unsigned short *partial, float2 *stats, int q_heads, int passes,    \
             int pass_tokens, float scale) {                                                                           \
        attend<Cache, tiles>(query, keys, key_scales, values, value_scales, pages, tables, table_stride, starts,       \
                             counts, firsts, partial, stats, q_heads, passes, pass_tokens, scale * kLog2e);            \
    }

ATTEND(attention_int8_1, Int8Cache, 1, kFewRowsBlocks)
ATTEND(attention_int8_2, Int8Cache, 2, 2)
ATTEND(attention_int8_3, Int8Cache, 3, 2)
ATTEND(attention_int8_4, Int8Cache, 4, 1)
ATTEND(attention_int8_5, Int8Cache, 5, 1)
ATTEND(attention_fp16_1, HalfCache, 1, 1)
ATTEND(attention_fp16_2, HalfCache, 2, 1)
ATTEND(attention_fp16_3, HalfCache, 3, 1)
ATTEND(attention_fp16_4, HalfCache, 4, 1)
ATTEND(attention_fp16_5, HalfCache, 5, 1)
