// Between the projection and attention, in one pass: norm of queries and keys, partial rotary embedding with three
// position axes, and the write into the paged cache. One block a token, one warp a head.
#include "common.cuh"
#include "kvcache.cuh"

constexpr int kHalfTurned = 32; // pairs (j, j + 32) of the first 64 dimensions turn
constexpr int kOwn = 8;         // dimensions a lane holds: 8 lane .. 8 lane + 7

// Multiplied by the 256 x 256 Hadamard matrix (Sylvester's order) over 16: orthonormal, so that products of a turned
// query and a turned key are those of the unturned ones, and outliers of a key are spread over all dimensions.
__device__ __forceinline__ void hadamard(float (&v)[kOwn], int lane) {
#pragma unroll
    for (int step = 1; step < kOwn; step *= 2) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (!(i & step)) {
                const float a = v[i], b = v[i + step];
                v[i] = a + b;
                v[i + step] = a - b;
            }
        }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const float other = __shfl_xor_sync(kAll, v[i], step);
            v[i] = lane & step ? other - v[i] : v[i] + other;
        }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        v[i] *= 0.0625f;
    }
}

struct Int8Store {
    static constexpr bool kTurned = true;

    // 8 lanes hold a block of 64 dimensions: scale = largest / 127 as fp16, words round(v / scale) + 128.
    __device__ static void quantise(const float (&v)[kOwn], unsigned (&words)[2], unsigned &scale_bits) {
        float largest = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const float size = fabsf(v[i]);
            largest = size > largest || size != size ? size : largest; // a NaN stays, unlike in fmaxf
        }
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
            const float other = __shfl_xor_sync(kAll, largest, step);
            largest = other > largest || other != other ? other : largest;
        }
        scale_bits = half_bits(largest / 127.0f);
        const float scale = half_value(scale_bits);
        const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
        words[0] = words[1] = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const float code = fminf(fmaxf(rintf(v[i] * inverse), -127.0f), 127.0f);
            words[i / 4] |= static_cast<unsigned>(static_cast<int>(code) + 128) << 8 * (i % 4);
        }
    }

    __device__ static void key(const float (&v)[kOwn], void *tile, unsigned short *scales, int offset, int lane) {
        unsigned words[2], scale;
        quantise(v, words, scale);
        unsigned char *place = static_cast<unsigned char *>(tile) + key_index<16>(offset, kOwn * lane);
        write(reinterpret_cast<uint2 *>(place), uint2{words[0], words[1]});
        if (lane % 8 == 0) {
            write(scales + offset * kBlocks + lane / 8, static_cast<unsigned short>(scale));
        }
    }

    __device__ static void value(const float (&v)[kOwn], void *tile, unsigned short *scales, int offset, int lane) {
        unsigned words[2], scale;
        quantise(v, words, scale);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            write(static_cast<unsigned char *>(tile) + value_index<16>(offset, kOwn * lane + i),
                  static_cast<unsigned char>(words[i / 4] >> 8 * (i % 4)));
        }
        if (lane % 8 == 0) {
            write(scales + offset * kBlocks + lane / 8, static_cast<unsigned short>(scale));
        }
    }

    static constexpr int kBytes = 1;
};

struct HalfStore {
    static constexpr bool kTurned = false;

    __device__ static void key(const float (&v)[kOwn], void *tile, unsigned short *, int offset, int lane) {
        int none = 0; // counted where the value was staged
        unsigned short *place = static_cast<unsigned short *>(tile) + key_index<8>(offset, kOwn * lane);
        write(reinterpret_cast<uint4 *>(place), uint4{staged_pair(v[0], v[1], none), staged_pair(v[2], v[3], none),
                                                      staged_pair(v[4], v[5], none), staged_pair(v[6], v[7], none)});
    }

    __device__ static void value(const float (&v)[kOwn], void *tile, unsigned short *, int offset, int lane) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            write(static_cast<unsigned short *>(tile) + value_index<8>(offset, kOwn * lane + i),
                  static_cast<unsigned short>(half_bits(v[i])));
        }
    }

    static constexpr int kBytes = 2;
};

// projection: FP32 [T, row_stride]: q_heads x [query 256 | gate 256], kv_heads x 256 keys, kv_heads x 256 values.
// positions: [3, T] (time, height, width); axes: [32], the axis of each pair; cosines, sines: FP32 [table_rows, 32].
// slots: [T], page * 64 + offset; outside of the pool (-1): nothing is written. query: fp16 [T, q_heads, 256].
template <class Store>
__device__ void qkv_rope(const float *projection, int row_stride, const float *query_weight, const float *key_weight,
                         const float *cosines, const float *sines, int table_rows, const int *positions,
                         const int *axes, const int *slots, void *keys, unsigned short *key_scales, void *values,
                         unsigned short *value_scales, int pages, unsigned short *query, int *overflows, int q_heads,
                         int kv_heads, float eps) {
    __shared__ float scratch[32];
    const int token = blockIdx.x, tokens = gridDim.x;
    const int lane = threadIdx.x % 32;
    const int slot = read(slots + token);
    const bool stored = slot >= 0 && slot < pages * kPage;
    const float *row = projection + static_cast<size_t>(token) * row_stride;

    // Asked for before the angles, which take three reads in a row.
    const auto load = [&](float (&v)[kOwn], int head) {
        const int start = head < q_heads ? head * 2 * kDim : (q_heads + head) * kDim;
#pragma unroll
        for (int i = 0; i < kOwn; i += 4) {
            const float4 four = stream(reinterpret_cast<const float4 *>(row + start + kOwn * lane + i));
            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
    };
    int head = threadIdx.x / 32;
    float v[kOwn];
    load(v, head);
    float cosine[kOwn], sine[kOwn];
    if (lane < 2 * kHalfTurned / kOwn) {
        const int place[3] = {read(positions + token), read(positions + tokens + token),
                              read(positions + 2 * tokens + token)};
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int pair = (kOwn * lane + i) % kHalfTurned;
            const int axis = read(axes + pair);
            const int position = axis == 1 ? place[1] : axis == 2 ? place[2] : place[0];
            const bool known = position >= 0 && position < table_rows;
            const size_t entry = static_cast<size_t>(known ? position : 0) * kHalfTurned + pair;
            cosine[i] = known ? read(cosines + entry) : __uint_as_float(0x7FC00000u);
            sine[i] = known ? read(sines + entry) : __uint_as_float(0x7FC00000u);
        }
    }

    int overflowed = 0;
    const int warps = blockDim.x / 32, heads = q_heads + 2 * kv_heads;
    for (; head < heads; head += warps) {
        const bool is_query = head < q_heads, is_value = head >= q_heads + kv_heads;
        if (!is_value) {
            const float *weight = is_query ? query_weight : key_weight;
            float squares = 0;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                squares += v[i] * v[i];
            }
            const float inverse = 1.0f / sqrtf(warp_sum(squares) / kDim + eps);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                v[i] *= inverse * (1.0f + read(weight + kOwn * lane + i));
                const float other = __shfl_xor_sync(kAll, v[i], kHalfTurned / kOwn);
                if (lane < kHalfTurned / kOwn) {
                    v[i] = v[i] * cosine[i] - other * sine[i];
                } else if (lane < 2 * kHalfTurned / kOwn) {
                    v[i] = v[i] * cosine[i] + other * sine[i];
                }
            }
            if (Store::kTurned) {
                hadamard(v, lane);
            }
        }
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            v[i] = staged(v[i], overflowed);
        }
        if (is_query) {
            int none = 0;
            const uint4 packed = {staged_pair(v[0], v[1], none), staged_pair(v[2], v[3], none),
                                  staged_pair(v[4], v[5], none), staged_pair(v[6], v[7], none)};
            write(reinterpret_cast<uint4 *>(query) + (static_cast<size_t>(token) * q_heads + head) * 32 + lane, packed);
        } else if (stored) {
            const int kv_head = (head - q_heads) % kv_heads;
            const size_t tile = static_cast<size_t>(slot / kPage) * kv_heads + kv_head;
            char *pool = static_cast<char *>(is_value ? values : keys) + tile * kPage * kDim * Store::kBytes;
            unsigned short *scales = (is_value ? value_scales : key_scales) + tile * kPage * kBlocks;
            if (is_value) {
                Store::value(v, pool, scales, slot % kPage, lane);
            } else {
                Store::key(v, pool, scales, slot % kPage, lane);
            }
        }
        if (head + warps < heads) {
            load(v, head + warps);
        }
    }
    count_overflows(overflowed, overflows ? overflows + token : nullptr, scratch);
}

#define QKV_ROPE(name, Store)                                                                                          \
    extern "C" __global__ void name(                                                                                   \
        const float *projection, int row_stride, const float *query_weight, const float *key_weight,                   \
        const float *cosines, const float *sines, int table_rows, const int *positions, const int *axes,               \
        const int *slots, void *keys, unsigned short *key_scales, void *values, unsigned short *value_scales,          \
        int pages, unsigned short *query, int *overflows, int q_heads, int kv_heads, float eps) {                      \
        qkv_rope<Store>(projection, row_stride, query_weight, key_weight, cosines, sines, table_rows, positions, axes, \
                        slots, keys, key_scales, values, value_scales, pages, query, overflows, q_heads, kv_heads,     \
                        eps);                                                                                          \
    }

QKV_ROPE(qkv_rope_int8, Int8Store)
QKV_ROPE(qkv_rope_fp16, HalfStore)
