// A page's keys and values as fp16, and against a few query rows by m8n8k4: scores of the page's 64 positions, and the sum of
// its values under weights. Eight warps work together.
#pragma once
#include "common.cuh"
#include "kvcache.cuh"
#include "volta.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 8;
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kNothing = -1e30f;    // below every score, and finite: the difference of two is no NaN
constexpr int kRowHalves = kDim + 8;  // of a row of queries or weights in shared memory: rows begin 4 banks apart
constexpr float kWeightUnit = 64.0f;  // of weights times int8 value scales (at most 516), to stay clear of subnormals

// int8: word = value / scale + 128. The byte under 0x64 is the fp16 number 1024 + word.
struct Int8Cache {
    static constexpr int kPiece = 16;   // elements of 16 bytes
    static constexpr int kPieces = 4;   // pieces a lane loads of a page's keys, and of its values
    static constexpr int kBlocksOfWeights = kBlocks;
    static constexpr bool kScaled = true;
    static constexpr float kUnit = 1.0f / kWeightUnit;
    static constexpr float kRawUnit = 1 << 24; // of what `raw_quad` gives,
    static constexpr float kRawOffset = 128;   // and how many of its smallest steps are 0

    // Four elements in a row as two fp16 pairs.
    template <int kCount>
    __device__ static void quad(const uint4 (&pieces)[kCount], int index, unsigned &low, unsigned &high) {
        const uint4 &p = pieces[index / 4];
        const unsigned word = index % 4 == 0 ? p.x : index % 4 == 1 ? p.y : index % 4 == 2 ? p.z : p.w;
        low = subtract_pairs(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u);
        high = subtract_pairs(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u);
    }

    // The words themselves as fp16, whose smallest number is 2^-24: (value + kRawOffset) / kRawUnit.
    template <int kCount>
    __device__ static void raw_quad(const uint4 (&pieces)[kCount], int index, unsigned &low, unsigned &high) {
        const uint4 &p = pieces[index / 4];
        const unsigned word = index % 4 == 0 ? p.x : index % 4 == 1 ? p.y : index % 4 == 2 ? p.z : p.w;
        low = __byte_perm(word, 0, 0x4140);
        high = __byte_perm(word, 0, 0x4342);
    }
};

struct HalfCache {
    static constexpr int kPiece = 8;
    static constexpr int kPieces = 8;
    static constexpr int kBlocksOfWeights = 1;
    static constexpr bool kScaled = false;
    static constexpr float kUnit = 1.0f;
    static constexpr float kRawUnit = 1.0f, kRawOffset = 0;

    template <int kCount>
    __device__ static void quad(const uint4 (&pieces)[kCount], int index, unsigned &low, unsigned &high) {
        const uint4 &p = pieces[index / 2];
        low = index % 2 ? p.z : p.x;
        high = index % 2 ? p.w : p.y;
    }

    template <int kCount>
    __device__ static void raw_quad(const uint4 (&pieces)[kCount], int index, unsigned &low, unsigned &high) {
        quad(pieces, index, low, high);
    }
};

// Where eight fp16 numbers, chunk `chunk` (0..7) of block `block` of 64, stand in a row of queries: odd blocks are turned
// by half, so that lanes that read the same chunk of neighbouring blocks meet different banks.
__device__ __forceinline__ int query_chunk(int row, int block, int chunk) {
    return row * kRowHalves + block * kBlock + ((chunk + 4 * (block & 1)) & 7) * 8;
}

__device__ __forceinline__ const uint4 &chunk_at(const unsigned short *halves, int index) {
    return *reinterpret_cast<const uint4 *>(halves + index);
}

// m8n8k4: the four quad-pairs of a warp take the four blocks of 64 dimensions of the warp's 8 positions, and their sums
// are added in pairs; for values, 8 dimensions each.
struct Volta {
    __device__ static int block(int lane) { return lane / 4 % 4; }
    __device__ static int column(int lane) { return lane % 4 + (lane < 16 ? 0 : 4); }

    template <class Cache> __device__ static int key_piece(int warp, int lane, int n) {
        constexpr int kAcross = kBlock / Cache::kPiece;
        return ((warp * kAcross + n) * kBlocks + block(lane)) * 8 + column(lane);
    }
    __device__ static unsigned key_scales(const unsigned short *scales, int warp, int lane) {
        return stream(scales + (warp * 8 + column(lane)) * kBlocks + block(lane));
    }
    template <class Cache> __device__ static int value_piece(int warp, int lane, int n) {
        return n * kDim + warp * 32 + block(lane) * 8 + column(lane);
    }
    template <class Cache> __device__ static int value_position(int lane, int n) { return n * Cache::kPiece; }

    template <class Cache, int kTiles>
    __device__ static void score(const uint4 (&keys)[Cache::kPieces], unsigned scale, const unsigned short *queries,
                                 float *scores, int warp, int lane) {
        float sum[kTiles][8] = {};
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            unsigned b[4];
            Cache::quad(keys, 2 * chunk, b[0], b[1]);
            Cache::quad(keys, 2 * chunk + 1, b[2], b[3]);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const uint4 &a = chunk_at(queries, query_chunk(tile * kTileRows + column(lane), block(lane), chunk));
                multiply_accumulate(sum[tile], a.x, a.y, b[0], b[1]);
                multiply_accumulate(sum[tile], a.z, a.w, b[2], b[3]);
            }
        }
        float factor[4]; // of the columns that this lane's sums belong to
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int col = (i & 2) * 2 + (lane & 2) + (i & 1);
            const int owner = col % 4 + col / 4 * 16 + block(lane) * 4;
            factor[i] = Cache::kScaled ? half_value(__shfl_sync(kAll, scale, owner)) : 1.0f;
        }
        const bool upper = lane & 4, last = lane & 8;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float v[8], four[4], two[2];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[i] = sum[tile][i] * factor[(i & 4) / 2 + (i & 1)];
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) { // blocks 0 + 1 and 2 + 3: one lane keeps the left columns, one the right
                const float other = __shfl_xor_sync(kAll, upper ? v[i] : v[i + 4], 4);
                four[i] = (upper ? v[i + 4] : v[i]) + other;
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float other = __shfl_xor_sync(kAll, last ? four[i] : four[i + 2], 8);
                two[i] = (last ? four[i + 2] : four[i]) + other;
            }
            const int row = tile * kTileRows + (lane & 1) + (last ? 2 : 0) + (lane < 16 ? 0 : 4);
            const int position = warp * 8 + (upper ? 4 : 0) + (lane & 2);
            *reinterpret_cast<float2 *>(scores + row * (kRowHalves / 2) + position) = float2{two[0], two[1]};
        }
    }

    template <class Cache, int kTiles>
    __device__ static void weigh(const uint4 (&values)[Cache::kPieces], const unsigned short *weights,
                                 const float *shrink, float (&sum)[kTiles][8], int warp, int lane) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum[tile][i] *= shrink[tile * kTileRows + row(lane, i)];
            }
        }
        const int part = Cache::kBlocksOfWeights > 1 ? warp / 2 * kPage : 0;
#pragma unroll
        for (int chunk = 0; chunk < 8; ++chunk) {
            unsigned b[4];
            Cache::quad(values, 2 * chunk, b[0], b[1]);
            Cache::quad(values, 2 * chunk + 1, b[2], b[3]);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const int own = (tile * kTileRows + column(lane)) * kRowHalves + part + chunk * 8;
                const uint4 &a = chunk_at(weights, own);
                multiply_accumulate(sum[tile], a.x, a.y, b[0], b[1]);
                multiply_accumulate(sum[tile], a.z, a.w, b[2], b[3]);
            }
        }
    }

    // Row of the tile that sum[i] of `weigh` stands for.
    __device__ static int row(int lane, int i) { return (lane & 1) + (i & 2) + (lane < 16 ? 0 : 4); }

    // Pair n (0..3) of the sums of a tile: two dimensions in a row, `dimension` the first, of one row.
    __device__ static float2 pair(const float (&sum)[8], int n, int warp, int lane, int &own_row, int &dimension) {
        own_row = row(lane, 2 * n);
        dimension = warp * 32 + block(lane) * 8 + (n & 2) * 2 + (lane & 2);
        return {sum[2 * n], sum[2 * n + 1]};
    }
};
