// Decode attention's walk over a segment on sm_70: keys and values go from memory to registers a page ahead.
#pragma once
#include "attention_tiles.cuh"

constexpr int kDecodeThreads = kThreads;
template <class Cache, int kTiles> // a multiprocessor should hold: what registers allow
constexpr int kDecodeBlocks = !Cache::kScaled || kTiles > 3 ? 1 : kTiles > 1 ? 2 : 3;

// attention.cu has the arguments. A block's eight warps score eight positions of a page each, meet for the softmax of eight
// rows each, meet, and add weighted values of 32 dimensions each.
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
            key[n] = stream(pool + Volta::template key_piece<Cache>(warp, lane, n));
        }
        if (Cache::kScaled) {
            key_scale = Volta::key_scales(key_scales + tile_of(page) * kPage * kBlocks, warp, lane);
        }
    };
    const auto load_values = [&](int page) {
        const uint4 *pool = static_cast<const uint4 *>(values) + tile_of(page) * tile_pieces;
#pragma unroll
        for (int n = 0; n < Cache::kPieces; ++n) {
            value[n] = stream(pool + Volta::template value_piece<Cache>(warp, lane, n));
        }
        const int left = end - begin - page * kPage;
        if (!Cache::kScaled && left < kPage) { // what stands behind the last token may be no number
#pragma unroll
            for (int n = 0; n < Cache::kPieces; ++n) {
                unsigned *halves = reinterpret_cast<unsigned *>(&value[n]);
                const int own = left - Volta::template value_position<Cache>(lane, n);
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
    Volta::template score<Cache, kTiles>(key, key_scale, queries, reinterpret_cast<float *>(weights[0]), warp, lane);
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
            Volta::template score<Cache, kTiles>(key, key_scale, queries, reinterpret_cast<float *>(next), warp, lane);
        }
        if (page + 2 < page_count) {
            load_keys(page + 2);
        }
        __syncthreads();
        Volta::template weigh<Cache, kTiles>(value, now, shrink, sum, warp, lane);
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
            const float2 v = Volta::pair(sum[tile], n, warp, lane, row, dimension);
            row += tile * kTileRows;
            if (heads[row] >= 0) {
                const size_t place = static_cast<size_t>(heads[row]) * max_segments + segment;
                write(reinterpret_cast<unsigned *>(partial + place * kDim + dimension),
                      half_pair(v.x * shrink[row], v.y * shrink[row]));
            }
        }
    }
}
