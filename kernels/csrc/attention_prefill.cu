// Attention of a prompt's tokens over the paged cache, for cards without m16n8k16 (on newer ones torch has better).
//
// A block owns a few tokens of all query heads of a kv head, 64 rows, and walks the pages up to its last token. Its eight
// warps score eight positions each, meet, do the softmax of eight rows each, meet, and add the values of 32 dimensions each,
// straight from the pages' pieces: they are decoded in registers, once for all 64 rows. Sums and softmax are FP32, weights
// fp16. A token's bits depend on its query and its context alone. docs/kernels/attention.md.
#include "attention_tiles.cuh"

template <class Cache> constexpr int kRowTiles = Cache::kScaled ? 8 : 7; // what registers allow: pieces of fp16 take twice as many
template <class Cache> constexpr int kQueryRows = kRowTiles<Cache> * kTileRows;
constexpr int kScorePitch = kPage + 4;  // FP32
constexpr int kWeightPitch = kPage + 8; // fp16: eight rows meet all banks

template <class Cache> struct PrefillShared {
    unsigned short queries[kQueryRows<Cache> * kRowHalves];
    float scores[2][kQueryRows<Cache> * kScorePitch];
    unsigned short weights[kQueryRows<Cache> * kWeightPitch];
    unsigned short scales[kBlocks * kPage]; // of the page's values
    float shrink[kQueryRows<Cache>];
    int heads[kQueryRows<Cache>]; // of `query`, -1 for a row without one
};

// A piece's elements 4 index .. 4 index + 3 as fp16 pairs, times the scales.
template <class Cache>
__device__ __forceinline__ void decoded(const uint4 (&pieces)[Cache::kPieces], int index, unsigned low_scale,
                                        unsigned high_scale, unsigned &low, unsigned &high) {
    Cache::quad(pieces, index, low, high);
    if (Cache::kScaled) {
        low = multiply_pairs(low, low_scale);
        high = multiply_pairs(high, high_scale);
    }
}

// Scores of this warp's eight positions for all rows. The quad-pairs of m8n8k4 take a block of dimensions each, and their
// sums are added in pairs.
template <class Cache>
__device__ __forceinline__ void score_page(const uint4 (&keys)[Cache::kPieces], unsigned scale,
                                           const unsigned short *queries, float *scores, int warp, int lane) {
    float sum[kRowTiles<Cache>][8] = {};
    const unsigned both = scale | scale << 16;
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
        unsigned b[4];
        decoded<Cache>(keys, 2 * chunk, both, both, b[0], b[1]);
        decoded<Cache>(keys, 2 * chunk + 1, both, both, b[2], b[3]);
#pragma unroll
        for (int tile = 0; tile < kRowTiles<Cache>; ++tile) {
            const uint4 &a = chunk_at(queries, query_chunk(tile * kTileRows + Volta::column(lane), Volta::block(lane), chunk));
            multiply_accumulate(sum[tile], a.x, a.y, b[0], b[1]);
            multiply_accumulate(sum[tile], a.z, a.w, b[2], b[3]);
        }
    }
    const bool upper = lane & 4, last = lane & 8;
#pragma unroll
    for (int tile = 0; tile < kRowTiles<Cache>; ++tile) {
        float four[4], two[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) { // blocks 0 + 1 and 2 + 3: one lane keeps the left columns, one the right
            const float other = __shfl_xor_sync(kAll, upper ? sum[tile][i] : sum[tile][i + 4], 4);
            four[i] = (upper ? sum[tile][i + 4] : sum[tile][i]) + other;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float other = __shfl_xor_sync(kAll, last ? four[i] : four[i + 2], 8);
            two[i] = (last ? four[i + 2] : four[i]) + other;
        }
        const int row = tile * kTileRows + (lane & 1) + (last ? 2 : 0) + (lane < 16 ? 0 : 4);
        const int position = warp * 8 + (upper ? 4 : 0) + (lane & 2);
        *reinterpret_cast<float2 *>(scores + row * kScorePitch + position) = float2{two[0], two[1]};
    }
}

// The softmax of eight rows of a page, four lanes a row, 16 positions a lane: position 16 i + 4 (lane % 4) + j.
__device__ __forceinline__ void weigh_scores(const float *scores, unsigned short *weights, float *shrink, float &peak,
                                             float &mass, int limit, bool masked, float scale, int warp, int lane) {
    const int row = warp * kTileRows + lane / 4, first = lane % 4 * 4;
    const float hidden = __uint_as_float(0xFF800000u); // minus infinity
    float s[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float4 four = *reinterpret_cast<const float4 *>(scores + row * kScorePitch + i * 16 + first);
        s[i][0] = four.x, s[i][1] = four.y, s[i][2] = four.z, s[i][3] = four.w;
    }
    if (masked) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                s[i][j] = i * 16 + first + j <= limit ? s[i][j] : hidden;
            }
        }
    }
    float largest = s[0][0];
#pragma unroll
    for (int n = 1; n < 16; ++n) {
        largest = fmaxf(largest, s[n / 4][n % 4]);
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAll, largest, 2));
    const float before = peak;
    peak = fmaxf(before, largest * scale);
    const float factor = exp2f(before - peak);
    float total = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[i][j] = exp2f(s[i][j] * scale - peak);
            total += s[i][j];
        }
        *reinterpret_cast<uint2 *>(weights + row * kWeightPitch + i * 16 + first) =
            uint2{half_pair(s[i][0], s[i][1]), half_pair(s[i][2], s[i][3])};
    }
    mass = mass * factor + total;
    if (lane % 4 == 0) {
        shrink[row] = factor;
    }
}

// Adds the page's values of this warp's 32 dimensions under the weights.
template <class Cache>
__device__ __forceinline__ void add_values(const uint4 (&values)[Cache::kPieces], const PrefillShared<Cache> &s,
                                           float (&sum)[kRowTiles<Cache>][8], int warp, int lane) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles<Cache>; ++tile) {
        const float low = s.shrink[tile * kTileRows + Volta::row(lane, 0)];
        const float high = s.shrink[tile * kTileRows + Volta::row(lane, 2)];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sum[tile][i] *= i & 2 ? high : low;
        }
    }
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
        uint4 scale = {};
        if (Cache::kScaled) {
            scale = chunk_at(s.scales, warp / 2 * kPage + chunk * 8);
        }
        unsigned b[4];
        decoded<Cache>(values, 2 * chunk, scale.x, scale.y, b[0], b[1]);
        decoded<Cache>(values, 2 * chunk + 1, scale.z, scale.w, b[2], b[3]);
#pragma unroll
        for (int tile = 0; tile < kRowTiles<Cache>; ++tile) {
            const uint4 &a = chunk_at(s.weights, (tile * kTileRows + Volta::column(lane)) * kWeightPitch + chunk * 8);
            multiply_accumulate(sum[tile], a.x, a.y, b[0], b[1]);
            multiply_accumulate(sum[tile], a.z, a.w, b[2], b[3]);
        }
    }
}

// query: fp16 [tokens, q_heads, 256], of positions start .. start + tokens - 1 of the sequence whose pages are at `table`.
// out: fp16 [tokens, q_heads * 256] = attended, times sigmoid(gate) if gate is not null: element d of head h of token t at
// gate + t * gate_stride + h * gate_head_stride + d. Grid: (kv heads, tokens / block_tokens rounded up).
template <class Cache>
__device__ void attend_prompt(const unsigned short *query, const void *keys, const unsigned short *key_scales,
                              const void *values, const unsigned short *value_scales, int pages, const int *table,
                              int start, int tokens, const float *gate, int gate_stride, int gate_head_stride,
                              unsigned short *out, int q_heads, int block_tokens, float scale) {
    DYNAMIC_SHARED(memory);
    PrefillShared<Cache> &s = *reinterpret_cast<PrefillShared<Cache> *>(memory);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int kv_heads = gridDim.x, kv_head = blockIdx.x, group = q_heads / kv_heads;
    const int first = (gridDim.y - 1 - blockIdx.y) * block_tokens; // the last tokens have the longest way
    const int own_tokens = min(block_tokens, tokens - first);
    const int end = start + first + own_tokens; // of the positions that some token sees
    const int page_count = (end + kPage - 1) / kPage;
    if (threadIdx.x < kQueryRows<Cache>) {
        const int token = threadIdx.x / group;
        s.heads[threadIdx.x] = token < own_tokens ? (first + token) * q_heads + kv_head * group + threadIdx.x % group : -1;
    }
    __syncthreads();

    const size_t tile_pieces = kPage * kDim / Cache::kPiece;
    uint4 key[Cache::kPieces], value[Cache::kPieces];
    unsigned key_scale = 0;
    uint2 value_scale = {}; // four blocks of position threadIdx.x
    const auto tile_of = [&](int page) {
        const int found = min(max(read(table + page), 0), pages - 1);
        return static_cast<size_t>(found) * kv_heads + kv_head;
    };
    const auto load_keys = [&](size_t tile) {
        const uint4 *pool = static_cast<const uint4 *>(keys) + tile * tile_pieces;
#pragma unroll
        for (int n = 0; n < Cache::kPieces; ++n) {
            key[n] = read(pool + Volta::key_piece<Cache>(warp, lane, n));
        }
        if (Cache::kScaled) {
            key_scale = read(key_scales + tile * kPage * kBlocks +
                             (warp * 8 + Volta::column(lane)) * kBlocks + Volta::block(lane));
        }
    };
    const auto load_values = [&](size_t tile, int page) {
        const uint4 *pool = static_cast<const uint4 *>(values) + tile * tile_pieces;
        const int left = end - page * kPage;
#pragma unroll
        for (int n = 0; n < Cache::kPieces; ++n) {
            value[n] = read(pool + Volta::value_piece<Cache>(warp, lane, n));
        }
        if (!Cache::kScaled && left < kPage) { // what stands behind the last token may be no number
#pragma unroll
            for (int n = 0; n < Cache::kPieces; ++n) {
                unsigned *pairs = reinterpret_cast<unsigned *>(&value[n]);
                const int own = left - Volta::value_position<Cache>(lane, n);
#pragma unroll
                for (int pair = 0; pair < 4; ++pair) {
                    pairs[pair] &= own > 2 * pair + 1 ? ~0u : own > 2 * pair ? 0xFFFFu : 0u;
                }
            }
        }
        if (Cache::kScaled && threadIdx.x < kPage) {
            value_scale = uint2{0, 0};
            if (static_cast<int>(threadIdx.x) < left) {
                value_scale = read(reinterpret_cast<const uint2 *>(value_scales + tile * kPage * kBlocks) + threadIdx.x);
            }
        }
    };

    size_t tile = tile_of(0), next_tile = tile_of(min(1, page_count - 1));
    load_keys(tile);
    load_values(tile, 0);
    for (int index = threadIdx.x; index < kQueryRows<Cache> * (kDim / 8); index += kThreads) {
        const int row = index / (kDim / 8), chunk = index % (kDim / 8);
        uint4 eight = {};
        if (s.heads[row] >= 0) {
            eight = read(reinterpret_cast<const uint4 *>(query) + static_cast<size_t>(s.heads[row]) * (kDim / 8) + chunk);
        }
        *reinterpret_cast<uint4 *>(s.queries + query_chunk(row, chunk / 8, chunk % 8)) = eight;
    }
    __syncthreads();

    float sum[kRowTiles<Cache>][8] = {};
    float peak = kNothing, mass = 0; // of row warp * 8 + lane / 4; the mass of this lane's positions
    const int limit = start + first + (warp * kTileRows + lane / 4) / group;
    score_page<Cache>(key, key_scale, s.queries, s.scores[0], warp, lane);
    if (page_count > 1) {
        load_keys(next_tile);
    }
    __syncthreads();
    // The softmax of a page stands beside the scores of the next one: neither waits for the other.
#pragma unroll 1
    for (int page = 0; page < page_count; ++page) {
        const int begin = page * kPage;
        if (warp < kRowTiles<Cache>) {
            weigh_scores(s.scores[page % 2], s.weights, s.shrink, peak, mass, limit - begin, begin + kPage > start + first,
                         scale, warp, lane);
        }
        if (Cache::kScaled && threadIdx.x < kPage) {
            const unsigned pairs[2] = {value_scale.x, value_scale.y};
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
                s.scales[block * kPage + threadIdx.x] = static_cast<unsigned short>(pairs[block / 2] >> 16 * (block % 2));
            }
        }
        if (page + 1 < page_count) {
            score_page<Cache>(key, key_scale, s.queries, s.scores[(page + 1) % 2], warp, lane);
        }
        tile = next_tile;
        if (page + 2 < page_count) {
            next_tile = tile_of(page + 2);
            load_keys(next_tile);
        }
        __syncthreads();
        add_values<Cache>(value, s, sum, warp, lane);
        if (page + 1 < page_count) {
            load_values(tile, page + 1);
        }
        __syncthreads();
    }

    mass += __shfl_xor_sync(kAll, mass, 1);
    mass += __shfl_xor_sync(kAll, mass, 2);
    if (lane % 4 == 0 && warp < kRowTiles<Cache>) {
        s.shrink[warp * kTileRows + lane / 4] = 1.0f / mass;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 4 * kRowTiles<Cache>; ++n) {
        int row, dimension;
        float2 v = Volta::pair(sum[n / 4], n % 4, warp, lane, row, dimension);
        row += n / 4 * kTileRows;
        const int head = s.heads[row];
        if (head >= 0) {
            v = {v.x * s.shrink[row], v.y * s.shrink[row]};
            if (gate) {
                const float2 g = read(reinterpret_cast<const float2 *>(
                    gate + static_cast<size_t>(head / q_heads) * gate_stride + head % q_heads * gate_head_stride + dimension));
                v = {v.x * sigmoid(g.x), v.y * sigmoid(g.y)};
            }
            int overflowed = 0; // an average of fp16 values, times a gate below one, fits
            write(reinterpret_cast<unsigned *>(out + static_cast<size_t>(head) * kDim + dimension),
                  staged_pair(v.x, v.y, overflowed));
        }
    }
}

#define ATTEND(name, Cache)                                                                                            \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                                          \
        name(const unsigned short *query, const void *keys, const unsigned short *key_scales, const void *values,      \
             const unsigned short *value_scales, int pages, const int *table, int start, int tokens,                   \
             const float *gate, int gate_stride, int gate_head_stride, unsigned short *out, int q_heads,               \
             int block_tokens, float scale) {                                                                          \
        attend_prompt<Cache>(query, keys, key_scales, values, value_scales, pages, table, start, tokens, gate,         \
                             gate_stride, gate_head_stride, out, q_heads, block_tokens, scale * kLog2e);               \
    }

ATTEND(attention_prefill_int8, Int8Cache)
ATTEND(attention_prefill_fp16, HalfCache)
