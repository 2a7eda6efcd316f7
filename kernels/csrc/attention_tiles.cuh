// A page of keys and values against a few query rows, in two forms of the tensor-core product: scores of the page's 64
// positions, and the sum of its values under weights. Eight warps work together; attention.cu says how they meet.
#pragma once
#include "ampere.cuh"
#include "common.cuh"
#include "kvcache.cuh"
#include "volta.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileRows = 8;
constexpr int kRowHalves = kDim + 8;  // of a row of queries or weights in shared memory: rows begin 4 banks apart
constexpr float kWeightUnit = 64.0f;  // of weights times int8 value scales (at most 516), to stay clear of subnormals

// int8: word = value / scale + 128. The byte under 0x64 is the fp16 number 1024 + word.
struct Int8Cache {
    static constexpr int kPiece = 16;   // elements of 16 bytes
    static constexpr int kPieces = 4;   // pieces a lane loads of a page's keys, and of its values
    static constexpr int kBlocksOfWeights = kBlocks;
    static constexpr bool kScaled = true;
    static constexpr float kUnit = 1.0f / kWeightUnit;

    // Four elements in a row as two fp16 pairs.
    __device__ static void quad(const uint4 (&pieces)[kPieces], int index, unsigned &low, unsigned &high) {
        const uint4 &p = pieces[index / 4];
        const unsigned word = index % 4 == 0 ? p.x : index % 4 == 1 ? p.y : index % 4 == 2 ? p.z : p.w;
        low = subtract_pairs(__byte_perm(word, 0x64646464u, 0x4140), 0x64806480u);
        high = subtract_pairs(__byte_perm(word, 0x64646464u, 0x4342), 0x64806480u);
    }
};

struct HalfCache {
    static constexpr int kPiece = 8;
    static constexpr int kPieces = 8;
    static constexpr int kBlocksOfWeights = 1;
    static constexpr bool kScaled = false;
    static constexpr float kUnit = 1.0f;

    __device__ static void quad(const uint4 (&pieces)[kPieces], int index, unsigned &low, unsigned &high) {
        const uint4 &p = pieces[index / 2];
        low = index % 2 ? p.z : p.x;
        high = index % 2 ? p.w : p.y;
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
    static constexpr int kPartials = 1; // parts of a score that different warps hold

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

// m16n8k16: 16 positions (then 16 dimensions) by 8 query rows. Two warps share 16 positions, each with half of the
// dimensions. Lane (g, q) holds positions g and g + 8 and, of each block, dimensions 16 q .. 16 q + 15, the order of the
// summed index being free.
struct Ampere {
    static constexpr int kPartials = 2;

    template <class Cache> __device__ static int key_piece(int warp, int lane, int n) {
        constexpr int kAcross = kBlock / Cache::kPiece, kSub = kAcross / 4;
        const int outer = n / kSub, piece = lane % 4 * kSub + n % kSub;
        const int eight = warp / 2 * 2 + outer % 2, block = warp % 2 * 2 + outer / 2;
        return ((eight * kAcross + piece) * kBlocks + block) * 8 + lane / 4;
    }
    // Two blocks of position g in the low word's place; those of g + 8 are fetched by the lane above (see score).
    __device__ static unsigned key_scales(const unsigned short *scales, int warp, int lane) {
        const int position = warp / 2 * 16 + lane / 4 + (lane & 1) * 8;
        return stream(reinterpret_cast<const unsigned *>(scales + position * kBlocks + warp % 2 * 2));
    }
    template <class Cache> __device__ static int value_piece(int warp, int lane, int n) {
        constexpr int kSub = kBlock / Cache::kPiece / 4;
        return (lane % 4 * kSub + n % kSub) * kDim + warp * 32 + n / kSub * 8 + lane / 4;
    }
    template <class Cache> __device__ static int value_position(int lane, int n) {
        constexpr int kSub = kBlock / Cache::kPiece / 4;
        return (lane % 4 * kSub + n % kSub) * Cache::kPiece;
    }

    template <class Cache, int kTiles>
    __device__ static void score(const uint4 (&keys)[Cache::kPieces], unsigned scale, const unsigned short *queries,
                                 float *scores, int warp, int lane) {
        const int g = lane / 4, q = lane % 4, half = warp % 2;
        float total[kTiles][4] = {};
        const unsigned scale_low = __shfl_sync(kAll, scale, lane & ~1), scale_high = __shfl_sync(kAll, scale, lane | 1);
#pragma unroll
        for (int own = 0; own < 2; ++own) { // the two blocks of this warp
            const int block = half * 2 + own;
            float sum[kTiles][4] = {};
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                unsigned a[2][4];
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    Cache::quad(keys, own * 8 + pair * 2 + step, a[step][0], a[step][2]);
                    Cache::quad(keys, own * 8 + 4 + pair * 2 + step, a[step][1], a[step][3]);
                }
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const uint4 &b = chunk_at(queries, query_chunk(tile * kTileRows + g, block, 2 * q + pair));
                    multiply_16x8(sum[tile], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
                    multiply_16x8(sum[tile], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
                }
            }
            const float low = Cache::kScaled ? half_value(scale_low >> 16 * own & 0xFFFF) : 1.0f;
            const float high = Cache::kScaled ? half_value(scale_high >> 16 * own & 0xFFFF) : 1.0f;
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                total[tile][0] += sum[tile][0] * low;
                total[tile][1] += sum[tile][1] * low;
                total[tile][2] += sum[tile][2] * high;
                total[tile][3] += sum[tile][3] * high;
            }
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = tile * kTileRows + 2 * q + i % 2, position = warp / 2 * 16 + g + i / 2 * 8;
                scores[row * (kRowHalves / 2) + half * kPage + position] = total[tile][i];
            }
        }
    }

    template <class Cache, int kTiles>
    __device__ static void weigh(const uint4 (&values)[Cache::kPieces], const unsigned short *weights,
                                 const float *shrink, float (&sum)[kTiles][8], int warp, int lane) {
        const int g = lane / 4, q = lane % 4;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sum[tile][i] *= shrink[tile * kTileRows + row(lane, i)];
            }
        }
        const int part = Cache::kBlocksOfWeights > 1 ? warp / 2 * kPage : 0;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            uint4 b[kTiles];
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                b[tile] = chunk_at(weights, (tile * kTileRows + g) * kRowHalves + part + (2 * q + pair) * 8);
            }
#pragma unroll
            for (int side = 0; side < 2; ++side) {
                unsigned a[2][4];
#pragma unroll
                for (int step = 0; step < 2; ++step) {
                    Cache::quad(values, side * 8 + pair * 2 + step, a[step][0], a[step][2]);
                    Cache::quad(values, side * 8 + 4 + pair * 2 + step, a[step][1], a[step][3]);
                }
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    float *own = sum[tile] + 4 * side;
                    multiply_16x8(own, a[0][0], a[0][1], a[0][2], a[0][3], b[tile].x, b[tile].y);
                    multiply_16x8(own, a[1][0], a[1][1], a[1][2], a[1][3], b[tile].z, b[tile].w);
                }
            }
        }
    }

    __device__ static int row(int lane, int i) { return 2 * (lane % 4) + (i & 1); }

    // A lane's two sums are of two rows: lanes of neighbouring dimensions swap, and each has one row.
    __device__ static float2 pair(const float (&sum)[8], int n, int warp, int lane, int &own_row, int &dimension) {
        const bool odd = lane & 4;
        const float other = __shfl_xor_sync(kAll, odd ? sum[2 * n] : sum[2 * n + 1], 4);
        own_row = 2 * (lane % 4) + odd;
        dimension = warp * 32 + n * 8 + (lane / 4 & ~1);
        return odd ? float2{other, sum[2 * n + 1]} : float2{sum[2 * n], other};
    }
};

#if __CUDA_ARCH__ >= 800
using Arch = Ampere;
#else
using Arch = Volta;
#endif
