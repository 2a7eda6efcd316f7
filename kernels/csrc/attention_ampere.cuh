// Decode attention's walk over a segment on sm_80 and newer: m16n8k16, and pages copied to shared memory ahead of their use.
//
// A block's four warps score 16 positions of a page each, meet for the largest score, write the weights, meet, and add the
// weighted values of one block of 64 dimensions each. A warp copies the keys and the values that it alone uses, and asks for
// the next page's as soon as it has read this page's, so that no meeting of the block ever stops the memory.
#pragma once
#include "ampere.cuh"
#include "attention_tiles.cuh"

constexpr int kDecodeWarps = 4;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kOwnPositions = kPage / kDecodeWarps; // that a warp scores
constexpr int kWeightHalves = kPage + 8;            // of a row of weights: rows begin 4 banks apart
constexpr float kWeightLog = 6.0f;                  // weights are times 2^6, to stay clear of subnormals after their scales
template <class Cache, int kTiles> // a multiprocessor should hold
constexpr int kDecodeBlocks = Cache::kScaled ? (kTiles > 3 ? 2 : 3) : kTiles > 1 ? 2 : 3;

template <class Cache, int kTiles> struct AmpereWalk {
    static constexpr int kRows = kTiles * kTileRows;
    static constexpr int kSub = kBlock / Cache::kPiece / 4; // pieces of a lane: 16 dimensions of a position, or 16 positions
    static constexpr int kCopies = 8 * kSub;                // 512 bytes each: a warp's part of a page's keys, or of its values
    static constexpr int kPart = kCopies * 512;

    // Shared memory: each warp's keys, each warp's values, and its scales; then what the block shares.
    unsigned char *keys, *values, *scales; // of this warp
    unsigned short *turned;                // [block][position], scales of the page's values
    unsigned short *queries, *weights;     // rows of kRowHalves, rows of kWeightHalves
    float *peaks;                          // [pair of rows][warp][2]
    float *offsets;                        // [block][row], what a word's offset adds to a score, with its sign turned
    int warp, g, q;                        // the lane is 4 g + q
    float total[kTiles][4];                // scores: [0], [1] of position 2 g and rows 2 q, 2 q + 1; [2], [3] of 2 g + 1
    float sum[4][kTiles][4] = {};          // [0], [1] of dimension 16 m + g of the warp's block and those rows; [2], [3] of + 8
    float peak[kTiles][2], mass[kTiles][2] = {}, shrink[kTiles][2]; // of rows 2 q, 2 q + 1; masses of the lane's positions
    uint2 value_scale;                                              // of position `lane` of the warp's, four blocks

    __device__ __forceinline__ explicit AmpereWalk(unsigned char *memory) {
        const int lane = threadIdx.x % 32;
        warp = threadIdx.x / 32, g = lane / 4, q = lane % 4;
        keys = memory + warp * kPart;
        values = memory + (kDecodeWarps + warp) * kPart;
        unsigned char *next = memory + 2 * kDecodeWarps * kPart;
        scales = next + warp * 16 * kOwnPositions;
        next += kDecodeWarps * 16 * kOwnPositions;
        turned = reinterpret_cast<unsigned short *>(next);
        queries = turned + kBlocks * kPage;
        weights = queries + kRows * kRowHalves;
        peaks = reinterpret_cast<float *>(weights + kRows * kWeightHalves);
        offsets = peaks + kRows * kDecodeWarps;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            peak[tile][0] = peak[tile][1] = kNothing;
        }
    }

    // Pieces lie in rows of eight; within a row they are turned so that lanes of all quarters of a block meet all banks.
    __device__ static int key_turn(int quarter) { return (quarter & 1) | (quarter & 2) << 1; }
    __device__ static int value_turn(int quarter) { return quarter << 1; }

    // `page_keys`: the kv head's tile; the scales are of its 64 positions.
    __device__ __forceinline__ void copy_keys(const unsigned char *page_keys, const unsigned char *key_scales,
                                              const unsigned char *value_scales) {
        const int lane = 4 * g + q;
        const unsigned char *from = page_keys + warp * kPart + lane * 16;
#pragma unroll
        for (int n = 0; n < kCopies; ++n) { // eight positions, a piece of each block
            const int quarter = n % (kCopies / 2) / kSub;
            copy_async(shared_address(keys + n * 512 + lane / 8 * 128 + (lane % 8 ^ key_turn(quarter)) * 16), from + n * 512);
        }
        if (Cache::kScaled && lane < 16) { // 128 bytes of either
            const unsigned char *own = lane < 8 ? key_scales : value_scales;
            copy_async(shared_address(scales + lane * 16), own + warp * 8 * kOwnPositions + lane % 8 * 16);
        }
    }

    __device__ __forceinline__ void copy_values(const unsigned char *page_values) {
        const int lane = 4 * g + q;
        const unsigned char *from = page_values + warp * kBlock * 16 + lane * 16;
#pragma unroll
        for (int n = 0; n < kCopies; ++n) { // a piece of 32 dimensions
            const int quarter = n / 2 / kSub;
            copy_async(shared_address(values + n * 512 + (lane ^ value_turn(quarter)) * 16),
                       from + n / 2 * kDim * 16 + n % 2 * 512);
        }
    }

    // Words are multiplied as they stand, 128 above what they mean: that times the sum of a query's block is known beforehand.
    __device__ __forceinline__ void find_offsets() {
        for (int index = threadIdx.x; index < kBlocks * kRows; index += kDecodeThreads) {
            const int block = index / kRows, row = index % kRows;
            float total = 0; // in one order for every row: a token may stand in any of them
#pragma unroll
            for (int chunk = 0; chunk < kBlock / 8; ++chunk) {
                const uint4 &v = chunk_at(queries, row * kRowHalves + block * kBlock + chunk * 8);
                const unsigned pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    total += half_value(pairs[i / 2] >> i % 2 * 16 & 0xFFFF);
                }
            }
            offsets[index] = total * (-Cache::kRawOffset / Cache::kRawUnit);
        }
    }

    // Scores of the warp's 16 positions, in units of log 2.
    __device__ __forceinline__ void score(float scale) {
        uint4 scale_words = {};
        if (Cache::kScaled) {
            scale_words = *reinterpret_cast<const uint4 *>(scales + g * 16);
            value_scale = *reinterpret_cast<const uint2 *>(scales + 8 * kOwnPositions + (4 * g + q) % 16 * 8);
        }
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            uint4 pieces[2][kSub];
#pragma unroll
            for (int n = 0; n < 2 * kSub; ++n) {
                const int piece = (g / 4 * 4 + q) * kSub + n % kSub, place = (2 * g + n / kSub) % 8 ^ key_turn(q);
                pieces[n / kSub][n % kSub] = *reinterpret_cast<const uint4 *>(keys + piece * 512 + block * 128 + place * 16);
            }
            float own[kTiles][4] = {};
            if (Cache::kScaled) {
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const float2 offset = *reinterpret_cast<const float2 *>(offsets + (block * kTiles + tile) * 8 + 2 * q);
                    own[tile][0] = own[tile][2] = offset.x;
                    own[tile][1] = own[tile][3] = offset.y;
                }
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                unsigned a[2][4];
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    Cache::raw_quad(pieces[0], 2 * pair + step, a[step][0], a[step][2]);
                    Cache::raw_quad(pieces[1], 2 * pair + step, a[step][1], a[step][3]);
                }
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const uint4 &b =
                        chunk_at(queries, (tile * kTileRows + g) * kRowHalves + block * kBlock + q * 16 + pair * 8);
                    multiply_16x8(own[tile], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
                    multiply_16x8(own[tile], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
                }
            }
            const unsigned first = block < 2 ? scale_words.x : scale_words.y, second = block < 2 ? scale_words.z : scale_words.w;
            const float factors[2] = {Cache::kScaled ? half_value(first >> block % 2 * 16 & 0xFFFF) * scale : scale,
                                      Cache::kScaled ? half_value(second >> block % 2 * 16 & 0xFFFF) * scale : scale};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float part = own[tile][i] * factors[i / 2];
                    total[tile][i] = block ? total[tile][i] + part : part;
                }
            }
        }
    }

    // Hides what lies behind a row's last position; `position`: the first one of the page.
    __device__ __forceinline__ void hide(const int *limits, int position) {
        const float kHidden = __uint_as_float(0xFF800000u); // minus infinity
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int own = position + warp * kOwnPositions + 2 * g + i / 2;
                total[tile][i] = own > limits[tile * kTileRows + 2 * q + i % 2] ? kHidden : total[tile][i];
            }
        }
    }

    // From the page's scores to weights that all warps know. The block meets twice.
    __device__ __forceinline__ void softmax() {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float2 most = {fmaxf(total[tile][0], total[tile][2]), fmaxf(total[tile][1], total[tile][3])};
#pragma unroll
            for (int step = 4; step < 32; step *= 2) {
                most.x = fmaxf(most.x, __shfl_xor_sync(kAll, most.x, step));
                most.y = fmaxf(most.y, __shfl_xor_sync(kAll, most.y, step));
            }
            if (g == 0) {
                *reinterpret_cast<float2 *>(peaks + ((tile * 4 + q) * kDecodeWarps + warp) * 2) = most;
            }
        }
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const float4 *all = reinterpret_cast<const float4 *>(peaks + (tile * 4 + q) * kDecodeWarps * 2);
            const float4 x = all[0], y = all[1];
            const float most[2] = {fmaxf(fmaxf(x.x, x.z), fmaxf(y.x, y.z)), fmaxf(fmaxf(x.y, x.w), fmaxf(y.y, y.w))};
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float now = fmaxf(peak[tile][i], most[i]), base = now - kWeightLog;
                shrink[tile][i] = fast_exp2(peak[tile][i] - now);
                peak[tile][i] = now;
                const float first = fast_exp2(total[tile][i] - base), second = fast_exp2(total[tile][2 + i] - base);
                mass[tile][i] = mass[tile][i] * shrink[tile][i] + (first + second);
                *reinterpret_cast<unsigned *>(weights + (tile * kTileRows + 2 * q + i) * kWeightHalves +
                                              warp * kOwnPositions + 2 * g) = half_pair(first, second);
            }
        }
        if (Cache::kScaled && g < 4) {
            unsigned short *to = turned + warp * kOwnPositions + 4 * g + q;
            to[0] = static_cast<unsigned short>(value_scale.x);
            to[kPage] = static_cast<unsigned short>(value_scale.x >> 16);
            to[2 * kPage] = static_cast<unsigned short>(value_scale.y);
            to[3 * kPage] = static_cast<unsigned short>(value_scale.y >> 16);
        }
        __syncthreads();
    }

    // Adds the weighted values of the page that begins at `position`; `end`: behind the last position of any row. `last`:
    // some row does not see the whole page, and what stands behind the last position that it sees may be no number.
    __device__ __forceinline__ void weigh(bool last, const int *limits, int position, int end) {
        unsigned b[kTiles][8];
        unsigned factors[8];
        if (Cache::kScaled) {
            const uint4 low = chunk_at(turned, warp * kPage + q * 16), high = chunk_at(turned, warp * kPage + q * 16 + 8);
            const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int pair = 0; pair < 8; ++pair) {
                factors[pair] = words[pair];
            }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            const int from = (tile * kTileRows + g) * kWeightHalves + q * 16;
            const uint4 low = chunk_at(weights, from), high = chunk_at(weights, from + 8);
            const unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (int pair = 0; pair < 8; ++pair) {
                b[tile][pair] = Cache::kScaled ? multiply_pairs(words[pair], factors[pair]) : words[pair];
            }
        }
        if (Cache::kScaled && last) { // a hidden position's scale, too
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const int visible = limits[tile * kTileRows + g] - position - q * 16; // the last of the lane's 16
#pragma unroll
                for (int pair = 0; pair < 8; ++pair) {
                    b[tile][pair] &= visible > 2 * pair ? ~0u : visible == 2 * pair ? 0xFFFFu : 0u;
                }
            }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float offset[4] = {}; // of the words, as for scores: minus 128 times the sum of a row's weights
            if (Cache::kScaled) {
                const unsigned word = 0x80808080u; // two times -128 / kRawUnit
#pragma unroll
                for (int step = 0; step < 4; ++step) {
                    multiply_16x8(offset, word, word, word, word, b[tile][2 * step], b[tile][2 * step + 1]);
                }
            }
#pragma unroll
            for (int m = 0; m < 4; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[m][tile][i] = sum[m][tile][i] * shrink[tile][i % 2] + offset[i % 2];
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            uint4 pieces[2][kSub];
#pragma unroll
            for (int n = 0; n < 2 * kSub; ++n) {
                const int dimension = m * 16 + n / kSub * 8 + g;
                uint4 &piece = pieces[n / kSub][n % kSub];
                piece = *reinterpret_cast<const uint4 *>(values + (q * kSub + n % kSub) * 1024 +
                                                         (dimension ^ value_turn(q)) * 16);
                if (!Cache::kScaled && last) {
                    const int own = end - position - q * 16 - n % kSub * 8; // of the piece's positions
                    unsigned *pairs = reinterpret_cast<unsigned *>(&piece);
#pragma unroll
                    for (int pair = 0; pair < 4; ++pair) {
                        pairs[pair] &= own > 2 * pair + 1 ? ~0u : own > 2 * pair ? 0xFFFFu : 0u;
                    }
                }
            }
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                unsigned a[4];
                Cache::raw_quad(pieces[0], step, a[0], a[2]);
                Cache::raw_quad(pieces[1], step, a[1], a[3]);
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    multiply_16x8(sum[m][tile], a[0], a[1], a[2], a[3], b[tile][2 * step], b[tile][2 * step + 1]);
                }
            }
        }
    }

    // The masses of all positions of the segment, to all lanes.
    __device__ __forceinline__ void add_masses() {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int step = 4; step < 32; step *= 2) {
                    mass[tile][i] += __shfl_xor_sync(kAll, mass[tile][i], step);
                }
                if (g == 0) {
                    peaks[((tile * 4 + q) * kDecodeWarps + warp) * 2 + i] = mass[tile][i];
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float *all = peaks + (tile * 4 + q) * kDecodeWarps * 2 + i;
                mass[tile][i] = (all[0] + all[2]) + (all[4] + all[6]);
            }
        }
    }

    // Eight rows of the warp's block of dimensions, as averages, in 16 bytes a lane. `to`: of a row, or null.
    template <class Place> __device__ __forceinline__ void store(int tile, Place to) {
        constexpr int kPitch = kBlock + 8;
        unsigned short *stage = reinterpret_cast<unsigned short *>(keys);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float own = mass[tile][i % 2], inverse = own > 0 ? Cache::kRawUnit / own : own; // 0: sees nothing here; NaN stays
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                stage[(2 * q + i % 2) * kPitch + m * 16 + i / 2 * 8 + g] =
                    static_cast<unsigned short>(half_bits(sum[m][tile][i] * inverse));
            }
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = half * 4 + g / 2, chunk = g % 2 * 4 + q;
            if (unsigned short *place = to(tile * kTileRows + row)) {
                write(reinterpret_cast<uint4 *>(place + warp * kBlock) + chunk, chunk_at(stage, row * kPitch + chunk * 8));
            }
        }
    }
};

template <class Cache, int kTiles>
__device__ void attend(const unsigned short *query, const void *keys, const unsigned short *key_scales,
                       const void *values, const unsigned short *value_scales, int pages, const int *tables,
                       int table_stride, const int *starts, const int *counts, const int *firsts,
                       unsigned short *partial, float2 *stats, int q_heads, int passes, int pass_tokens, float scale) {
    constexpr int kRows = kTiles * kTileRows;
    DYNAMIC_SHARED(memory);
    __shared__ int limits[kRows], heads[kRows]; // last position that a row sees; its head of `query`, or -1
    __shared__ int table[kSegmentPages];

    const int kv_heads = gridDim.x, kv_head = blockIdx.x, group = q_heads / kv_heads;
    const int sequence = blockIdx.y / passes, first_token = blockIdx.y % passes * pass_tokens;
    const int max_segments = gridDim.z, segment = max_segments - 1 - blockIdx.z; // the last ones are the longest
    const int tokens = min(read(counts + sequence) - first_token, pass_tokens);
    const int start = read(starts + sequence) + first_token; // position of the first token
    const int first_row = read(firsts + sequence) + first_token;
    const int begin = segment_begin(segment);
    const int end = min(segment_begin(segment + 1), start + tokens); // of the positions that some token sees
    if (tokens <= 0 || begin >= end) {
        take_over();
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
    }
    __syncthreads();

    AmpereWalk<Cache, kTiles> walk(memory);
    const auto tile_of = [&](int page) { return static_cast<size_t>(table[page]) * kv_heads + kv_head; };
    constexpr size_t kTileBytes = kPage * kDim / Cache::kPiece * 16, kScaleBytes = kPage * kBlocks * 2;
    const auto copy_keys = [&](int page) {
        if (page < page_count) {
            walk.copy_keys(static_cast<const unsigned char *>(keys) + tile_of(page) * kTileBytes,
                           reinterpret_cast<const unsigned char *>(key_scales) + tile_of(page) * kScaleBytes,
                           reinterpret_cast<const unsigned char *>(value_scales) + tile_of(page) * kScaleBytes);
        }
        commit_copies(); // of nothing, too: waits count groups
    };
    const auto copy_values = [&](int page) {
        if (page < page_count) {
            walk.copy_values(static_cast<const unsigned char *>(values) + tile_of(page) * kTileBytes);
        }
        commit_copies();
    };
    // The launch before writes queries, and keys and values of this round's tokens. Older pages need not wait for it.
    const bool older = begin + kPage <= start - first_token;
    if (!older) {
        take_over();
    }
    copy_keys(0);
    copy_values(0);
    if (older) {
        take_over();
    }
    for (int index = threadIdx.x; index < kRows * (kDim / 8); index += kDecodeThreads) {
        const int row = index / (kDim / 8), chunk = index % (kDim / 8);
        uint4 halves = {};
        if (heads[row] >= 0) {
            halves = read(reinterpret_cast<const uint4 *>(query) + static_cast<size_t>(heads[row]) * (kDim / 8) + chunk);
        }
        *reinterpret_cast<uint4 *>(walk.queries + row * kRowHalves + chunk * 8) = halves;
    }
    __syncthreads();
    if (Cache::kScaled) {
        walk.find_offsets();
        __syncthreads();
    }

    // Copies come in the order keys 0, values 0, keys 1, values 1 ...: of two groups under way, the older one is next.
    for (int page = -1; page < page_count; ++page) {
        const int position = begin + page * kPage;
        if (page >= 0) {
            wait_copies<1>();
            __syncwarp(); // the copies of the other lanes, too
            walk.weigh(position + kPage > start + 1, limits, position, end);
            __syncwarp(); // all lanes have read them
            copy_values(page + 1);
        }
        if (page + 1 < page_count) {
            wait_copies<1>();
            __syncwarp();
            walk.score(scale * Cache::kRawUnit);
            __syncwarp();
            copy_keys(page + 2);
            if (position + 2 * kPage > start + 1) {
                walk.hide(limits, position + kPage);
            }
            walk.softmax();
        }
    }

    walk.add_masses();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = heads[tile * kTileRows + 2 * walk.q + i];
            if (walk.warp == 0 && walk.g == 0 && head >= 0) {
                write(stats + static_cast<size_t>(head) * max_segments + segment, float2{walk.peak[tile][i], walk.mass[tile][i]});
            }
        }
        walk.store(tile, [&](int row) -> unsigned short * {
            return heads[row] < 0 ? nullptr
                                  : partial + (static_cast<size_t>(heads[row]) * max_segments + segment) * kDim;
        });
    }
}
