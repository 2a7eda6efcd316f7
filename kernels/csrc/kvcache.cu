// The paged cache to keys and values in a row, fp16, for attention over whole prompts.
#include "common.cuh"
#include "kvcache.cuh"

constexpr int kThreads = 256;

__device__ __forceinline__ unsigned decoded_pair(unsigned low, unsigned high, float scale) {
    // A word times an fp16 scale fits fp16 wherever the value did.
    int overflowed = 0;
    return staged_pair((static_cast<int>(low) - 128) * scale, (static_cast<int>(high) - 128) * scale, overflowed);
}

struct Int8Pool {
    static constexpr int kPiece = 16;

    // The eight elements at dimension `dim`, a multiple of 8, of a position.
    __device__ static uint4 key(const void *tile, const unsigned short *scales, int position, int dim) {
        const unsigned char *words = static_cast<const unsigned char *>(tile) + key_index<kPiece>(position, dim);
        const uint2 eight = read(reinterpret_cast<const uint2 *>(words));
        const float scale = half_value(read(scales + position * kBlocks + dim / kBlock));
        const unsigned w[2] = {eight.x, eight.y};
        unsigned out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = decoded_pair(w[i / 2] >> 16 * (i % 2) & 255, w[i / 2] >> (16 * (i % 2) + 8) & 255, scale);
        }
        return {out[0], out[1], out[2], out[3]};
    }
    __device__ static uint4 value(const void *tile, const unsigned short *scales, int position, int dim) {
        const unsigned char *words = static_cast<const unsigned char *>(tile);
        const float scale = half_value(read(scales + position * kBlocks + dim / kBlock));
        unsigned out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = decoded_pair(read(words + value_index<kPiece>(position, dim + 2 * i)),
                                  read(words + value_index<kPiece>(position, dim + 2 * i + 1)), scale);
        }
        return {out[0], out[1], out[2], out[3]};
    }
    __device__ static size_t bytes(size_t elements) { return elements; }
};

struct HalfPool {
    static constexpr int kPiece = 8;

    __device__ static uint4 key(const void *tile, const unsigned short *, int position, int dim) {
        const unsigned short *halves = static_cast<const unsigned short *>(tile) + key_index<kPiece>(position, dim);
        return read(reinterpret_cast<const uint4 *>(halves));
    }
    __device__ static uint4 value(const void *tile, const unsigned short *, int position, int dim) {
        const unsigned short *halves = static_cast<const unsigned short *>(tile);
        unsigned out[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            out[i] = read(halves + value_index<kPiece>(position, dim + 2 * i)) |
                     static_cast<unsigned>(read(halves + value_index<kPiece>(position, dim + 2 * i + 1))) << 16;
        }
        return {out[0], out[1], out[2], out[3]};
    }
    __device__ static size_t bytes(size_t elements) { return 2 * elements; }
};

// key_out, value_out: fp16 [kv_heads, length, 256], the first `length` positions of the sequence with this table.
// Grid: (pages, kv_heads).
template <class Pool>
__device__ void gather(const void *keys, const unsigned short *key_scales, const void *values,
                       const unsigned short *value_scales, int pages, const int *table, int length,
                       unsigned short *key_out, unsigned short *value_out) {
    const int head = blockIdx.y, kv_heads = gridDim.y;
    const int page = min(max(read(table + blockIdx.x), 0), pages - 1);
    const size_t tile = static_cast<size_t>(page) * kv_heads + head;
    const size_t skipped = Pool::bytes(tile * kPage * kDim);
    const char *key_tile = static_cast<const char *>(keys) + skipped;
    const char *value_tile = static_cast<const char *>(values) + skipped;
    const unsigned short *own_key_scales = key_scales + tile * kPage * kBlocks;
    const unsigned short *own_value_scales = value_scales + tile * kPage * kBlocks;
    for (int index = threadIdx.x; index < kPage * kDim / 8; index += kThreads) {
        const int offset = index / (kDim / 8), dim = index % (kDim / 8) * 8;
        const int position = blockIdx.x * kPage + offset;
        if (position < length) {
            const size_t to = (static_cast<size_t>(head) * length + position) * (kDim / 8) + dim / 8;
            write(reinterpret_cast<uint4 *>(key_out) + to, Pool::key(key_tile, own_key_scales, offset, dim));
            write(reinterpret_cast<uint4 *>(value_out) + to, Pool::value(value_tile, own_value_scales, offset, dim));
        }
    }
}

#define GATHER(name, Pool)                                                                                             \
    extern "C" __global__ void __launch_bounds__(kThreads)                                                             \
        name(const void *keys, const unsigned short *key_scales, const void *values,                                   \
             const unsigned short *value_scales, int pages, const int *table, int length, unsigned short *key_out,     \
             unsigned short *value_out) {                                                                              \
        gather<Pool>(keys, key_scales, values, value_scales, pages, table, length, key_out, value_out);                \
    }

GATHER(gather_int8, Int8Pool)
GATHER(gather_fp16, HalfPool)
