// Heads on their way into the paged cache: int8 words with a scale of 64 dimensions each, or fp16.
#pragma once
#include "common.cuh"
#include "kvcache.cuh"

constexpr int kThreads = 128;
constexpr int kRun = 16;        // positions that stand side by side in a page, of an int8 value; two such runs of fp16
constexpr int kOwn = 8;         // dimensions a lane holds: 4 lane .. 4 lane + 3, and those 128 further on
constexpr int kHalfOwn = 4;     // one of these groups, where two warps share a head
constexpr int kPairOwn = 16;    // of many tokens, where half a warp holds a head: 4 part .. 4 part + 3 of each 64

__device__ __forceinline__ constexpr int dimension(int lane, int i) { return i / 4 * (kDim / 2) + 4 * lane + i % 4; }

struct Int8Store {
    static constexpr bool kTurned = true;
    static constexpr int kBytes = 1;
    static constexpr float kRounding = 12582912.0f + 128; // 1.5 * 2^23: the sum's last bit is worth 1

    // 16 lanes hold a block of 64 dimensions in each group of four values: scale = largest / 127 as fp16, words round(v / scale)
    // + 128.
    template <int kGroups>
    __device__ static void quantise(const float (&v)[4 * kGroups], unsigned (&words)[kGroups], unsigned (&scale_bits)[kGroups]) {
        unsigned largest[kGroups]; // as bits, whose order is that of sizes, a NaN above all
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            unsigned sizes[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sizes[i] = __float_as_uint(v[4 * group + i]) & 0x7FFFFFFFu;
            }
            largest[group] = max(max(sizes[0], sizes[1]), max(sizes[2], sizes[3]));
        }
#pragma unroll
        for (int step = 1; step < kBlock / 4; step *= 2) {
#pragma unroll
            for (int group = 0; group < kGroups; ++group) {
                largest[group] = max(largest[group], __shfl_xor_sync(kAll, largest[group], step));
            }
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            scale_bits[group] = half_bits(__uint_as_float(largest[group]) * (1.0f / 127.0f));
            const float scale = half_value(scale_bits[group]);
            const float inverse = scale > 0 ? fast_inverse(scale) : 0.0f;
            unsigned codes[4]; // + 128 in the lowest byte, rounded by the addition
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float code = fminf(fmaxf(v[4 * group + i] * inverse, -127.0f), 127.0f);
                codes[i] = __float_as_uint(code + kRounding);
            }
            words[group] = __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
        }
    }

    template <int kGroups>
    __device__ static void store_scales(unsigned short *scales, const unsigned (&bits)[kGroups], int first, int offset, int lane) {
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            if (lane % (kBlock / 4) == 0) {
                write(scales + offset * kBlocks + dimension(lane, 4 * (first + group)) / kBlock,
                      static_cast<unsigned short>(bits[group]));
            }
        }
    }

    // A lane's groups from `first` on into a tile of keys or of values, at position `offset` of its page.
    template <int kCount>
    __device__ static void store(const float (&v)[kCount], int first, bool is_value, void *tile, unsigned short *scales,
                                 int offset, int lane) {
        unsigned words[kCount / 4], scale[kCount / 4];
        quantise(v, words, scale);
        unsigned char *bytes = static_cast<unsigned char *>(tile);
#pragma unroll
        for (int group = 0; group < kCount / 4; ++group) {
            const int dim = dimension(lane, 4 * (first + group));
            if (is_value) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    write(bytes + value_index<16>(offset, dim + i), static_cast<unsigned char>(words[group] >> 8 * i));
                }
            } else {
                write(reinterpret_cast<unsigned *>(bytes + key_index<16>(offset, dim)), words[group]);
            }
        }
        store_scales(scales, scale, first, offset, lane);
    }

    // A key that half a warp holds: lane `part` dimensions 64 g + 4 part .. + 3. Called by the whole warp; `own`: whose is stored.
    __device__ static void store_key(const float (&v)[kPairOwn], bool own, void *tile, unsigned short *scales, int offset, int part) {
        unsigned words[kBlocks], scale[kBlocks];
        quantise(v, words, scale);
        if (!own) {
            return;
        }
        unsigned char *bytes = static_cast<unsigned char *>(tile);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            write(reinterpret_cast<unsigned *>(bytes + key_index<16>(offset, block * kBlock + 4 * part)), words[block]);
            if (part == 0) {
                write(scales + offset * kBlocks + block, static_cast<unsigned short>(scale[block]));
            }
        }
    }

    // Values of a token on their way to whole pieces: a row of `Row` in shared memory, scales at once.
    using Row = unsigned[kDim / 4];
    __device__ static void put(const float (&v)[kOwn], Row &row, unsigned short *scales, int offset, int lane) {
        unsigned words[2], scale[2];
        quantise(v, words, scale);
        row[lane] = words[0];
        row[32 + lane] = words[1];
        store_scales(scales, scale, 0, offset, lane);
    }

    // A run of sixteen positions at `offset`: 8 bytes a piece and thread, as there are 64 words of four dimensions.
    __device__ static void store_run(const Row (&rows)[kRun], void *tile, int offset) {
        const int quad = threadIdx.x % (kDim / 4), part = threadIdx.x / (kDim / 4) * 8;
        unsigned low[4], high[4]; // [four positions: first and last]: of dimensions 0 1 and 2 3, two positions side by side
        unsigned char *to = static_cast<unsigned char *>(tile) + value_index<16>(offset, 4 * quad) + part;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned a = rows[part + 2 * i][quad], b = rows[part + 2 * i + 1][quad];
            low[i] = __byte_perm(a, b, 0x5140);
            high[i] = __byte_perm(a, b, 0x7362);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const unsigned(&pairs)[4] = i < 2 ? low : high;
            const unsigned chosen = i % 2 ? 0x7632 : 0x5410;
            write(reinterpret_cast<uint2 *>(to + 16 * i),
                  uint2{__byte_perm(pairs[0], pairs[1], chosen), __byte_perm(pairs[2], pairs[3], chosen)});
        }
    }
};

template <int kCount> __device__ __forceinline__ uint2 packed(const float (&v)[kCount], int group) {
    return {half_pair(v[4 * group], v[4 * group + 1]), half_pair(v[4 * group + 2], v[4 * group + 3])};
}

struct HalfStore {
    static constexpr bool kTurned = false;
    static constexpr int kBytes = 2;

    template <int kCount>
    __device__ static void store(const float (&v)[kCount], int first, bool is_value, void *tile, unsigned short *, int offset,
                                 int lane) {
        unsigned short *halves = static_cast<unsigned short *>(tile);
#pragma unroll
        for (int group = 0; group < kCount / 4; ++group) {
            const int dim = dimension(lane, 4 * (first + group));
            if (is_value) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    write(halves + value_index<8>(offset, dim + i), static_cast<unsigned short>(half_bits(v[4 * group + i])));
                }
            } else {
                write(reinterpret_cast<uint2 *>(halves + key_index<8>(offset, dim)), packed(v, group));
            }
        }
    }

    __device__ static void store_key(const float (&v)[kPairOwn], bool own, void *tile, unsigned short *, int offset, int part) {
        unsigned short *halves = static_cast<unsigned short *>(tile);
#pragma unroll
        for (int group = 0; own && group < kPairOwn / 4; ++group) {
            write(reinterpret_cast<uint2 *>(halves + key_index<8>(offset, kDim / 4 * group + 4 * part)), packed(v, group));
        }
    }

    using Row = unsigned[kDim / 2];
    __device__ static void put(const float (&v)[kOwn], Row &row, unsigned short *, int, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint2 words = packed(v, half);
            row[64 * half + 2 * lane] = words.x;
            row[64 * half + 2 * lane + 1] = words.y;
        }
    }

    // A run of sixteen positions at `offset`, two pieces a dimension: two dimensions a thread.
    __device__ static void store_run(const Row (&rows)[kRun], void *tile, int offset) {
        const int pair = threadIdx.x;
        unsigned short *halves = static_cast<unsigned short *>(tile);
#pragma unroll
        for (int part = 0; part < kRun; part += 8) {
            unsigned words[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned a = rows[part + 2 * i][pair], b = rows[part + 2 * i + 1][pair];
                words[0][i] = __byte_perm(a, b, 0x5410);
                words[1][i] = __byte_perm(a, b, 0x7632);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                write(reinterpret_cast<uint4 *>(halves + value_index<8>(offset + part, 2 * pair + i)),
                      uint4{words[i][0], words[i][1], words[i][2], words[i][3]});
            }
        }
    }
};
