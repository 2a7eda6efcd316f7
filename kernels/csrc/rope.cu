// Between the projection and attention, in one pass: norm of queries and keys, partial rotary embedding with three
// position axes, and the write into the paged cache. A warp takes a head at a time.
#include "common.cuh"
#include "kvcache.cuh"

constexpr int kThreads = 128;
constexpr int kHalfTurned = 32; // pairs (j, j + 32) of the first 64 dimensions turn
#if __CUDA_ARCH__ >= 900
constexpr bool kOverlaps = true; // the projection is asked for behind the launch before
#else
constexpr bool kOverlaps = false;
#endif
constexpr int kRun = 16;        // positions that stand side by side in a page, of an int8 value; two such runs of fp16
constexpr int kMany = 2;        // heads a warp, of many tokens
constexpr int kOwn = 8;         // dimensions a lane holds: 4 lane .. 4 lane + 3, and those 128 further on

__device__ __forceinline__ constexpr int dimension(int lane, int i) { return i / 4 * (kDim / 2) + 4 * lane + i % 4; }

// Multiplied by the 256 x 256 Hadamard matrix (Sylvester's order). Over 16 it is orthonormal: products of a turned query
// and a turned key are those of the unturned ones, and outliers of a key are spread over all dimensions.
constexpr float kTurnScale = 0.0625f;

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
        const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const float other = __shfl_xor_sync(kAll, v[i], step);
            v[i] = fmaf(v[i], sign, other);
        }
    }
}

struct Int8Store {
    static constexpr bool kTurned = true;
    static constexpr int kBytes = 1;
    static constexpr float kRounding = 12582912.0f + 128; // 1.5 * 2^23: the sum's last bit is worth 1

    // 16 lanes hold a block of 64 dimensions in each half: scale = largest / 127 as fp16, words round(v / scale) + 128.
    __device__ static void quantise(const float (&v)[kOwn], unsigned (&words)[2], unsigned (&scale_bits)[2]) {
        float largest[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            largest[half] = 0;
#pragma unroll
            for (int i = 4 * half; i < 4 * half + 4; ++i) {
                const float size = fabsf(v[i]);
                largest[half] = size > largest[half] || size != size ? size : largest[half]; // a NaN stays, unlike in fmaxf
            }
        }
#pragma unroll
        for (int step = 1; step < kBlock / 4; step *= 2) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float other = __shfl_xor_sync(kAll, largest[half], step);
                largest[half] = other > largest[half] || other != other ? other : largest[half];
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            scale_bits[half] = half_bits(largest[half] * (1.0f / 127.0f));
            const float scale = half_value(scale_bits[half]);
            const float inverse = scale > 0 ? fast_inverse(scale) : 0.0f;
            unsigned codes[4]; // + 128 in the lowest byte, rounded by the addition
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float code = fminf(fmaxf(v[4 * half + i] * inverse, -127.0f), 127.0f);
                codes[i] = __float_as_uint(code + kRounding);
            }
            words[half] = __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410);
        }
    }

    __device__ static void store_scales(unsigned short *scales, const unsigned (&bits)[2], int offset, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (lane % (kBlock / 4) == 0) {
                write(scales + offset * kBlocks + dimension(lane, 4 * half) / kBlock, static_cast<unsigned short>(bits[half]));
            }
        }
    }

    // Into a tile of keys or of values, at position `offset` of its page.
    __device__ static void store(const float (&v)[kOwn], bool is_value, void *tile, unsigned short *scales, int offset,
                                 int lane) {
        unsigned words[2], scale[2];
        quantise(v, words, scale);
        unsigned char *bytes = static_cast<unsigned char *>(tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (is_value) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    write(bytes + value_index<16>(offset, dimension(lane, 4 * half + i)),
                          static_cast<unsigned char>(words[half] >> 8 * i));
                }
            } else {
                write(reinterpret_cast<unsigned *>(bytes + key_index<16>(offset, dimension(lane, 4 * half))), words[half]);
            }
        }
        store_scales(scales, scale, offset, lane);
    }

    // Values of a token on their way to whole pieces: a row of `Row` in shared memory, scales at once.
    using Row = unsigned[kDim / 4];
    __device__ static void put(const float (&v)[kOwn], Row &row, unsigned short *scales, int offset, int lane) {
        unsigned words[2], scale[2];
        quantise(v, words, scale);
        row[lane] = words[0];
        row[32 + lane] = words[1];
        store_scales(scales, scale, offset, lane);
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

__device__ __forceinline__ uint2 packed(const float (&v)[kOwn], int half) {
    return {half_pair(v[4 * half], v[4 * half + 1]), half_pair(v[4 * half + 2], v[4 * half + 3])};
}

struct HalfStore {
    static constexpr bool kTurned = false;
    static constexpr int kBytes = 2;

    __device__ static void store(const float (&v)[kOwn], bool is_value, void *tile, unsigned short *, int offset,
                                 int lane) {
        unsigned short *halves = static_cast<unsigned short *>(tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (is_value) {
#pragma unroll
                for (int i = 4 * half; i < 4 * half + 4; ++i) {
                    write(halves + value_index<8>(offset, dimension(lane, i)), static_cast<unsigned short>(half_bits(v[i])));
                }
            } else {
                write(reinterpret_cast<uint2 *>(halves + key_index<8>(offset, dimension(lane, 4 * half))), packed(v, half));
            }
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

// What fits fp16, in place; how many did not.
__device__ __forceinline__ int staged_all(float (&v)[kOwn]) {
    float largest = 0; // a NaN is passed over, and stays
    int overflowed = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        largest = fmaxf(largest, fabsf(v[i]));
    }
    if (largest > kLargestHalf) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            v[i] = staged(v[i], overflowed);
        }
    }
    return overflowed;
}

// projection: FP32 [T, row_stride]: q_heads x [query 256 | gate 256], kv_heads x 256 keys, kv_heads x 256 values.
// positions: [3, T] (time, height, width); axes: [32], the axis of each pair; cosines, sines: FP32 [table_rows, 32].
// slots: [T], page * 64 + offset; outside of the pool (-1): nothing is written. query: fp16 [T, q_heads, 256].
// A warp takes kEach of a token's heads, those of values too or not, which it asks for at once. Grid: (blocks before the first token's and T, heads /
// (warps * kEach) rounded up).
template <class Store, int kEach, bool kValues>
__device__ __forceinline__ void turn_heads(int token, int tokens, const float *projection, int row_stride,
                                           const float *query_weight, const float *key_weight, const float *cosines,
                                           const float *sines, int table_rows, const int *positions, const int *axes,
                                           const int *slots, void *keys, unsigned short *key_scales, void *values,
                                           unsigned short *value_scales, int pages, unsigned short *query,
                                           int *overflows, int q_heads, int kv_heads, float eps) {
    const int lane = threadIdx.x % 32, step = kThreads / 32, heads = q_heads + (kValues ? 2 : 1) * kv_heads;
    const int first = blockIdx.y * step * kEach + threadIdx.x / 32;
    const float *row = projection + static_cast<size_t>(token) * row_stride;

    float4 in[kEach][2];
    const auto load = [&]() {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int head = min(first + i * step, heads - 1);
            const int start = head < q_heads ? head * 2 * kDim : (q_heads + head) * kDim;
            const float4 *from = reinterpret_cast<const float4 *>(row + start) + lane;
            in[i][0] = stream(from);
            in[i][1] = stream(from + kDim / 8);
        }
    };
    float4 weights[2];
    const auto load_weights = [&](int head) {
        const float4 *from = reinterpret_cast<const float4 *>(head < q_heads ? query_weight : key_weight) + lane;
        weights[0] = read(from);
        weights[1] = read(from + kDim / 8);
    };
    // The angle of pair `lane`: where on its axis (lane i has read that of axis i), and what the tables say there. Where
    // launches overlap, that is older than the projection, which the launch before writes.
    const int axis = read_here(axes + lane);
    const int place = read_here(positions + min(lane, 2) * tokens + token);
    const int slot = read_here(slots + token);
    if (first >= heads) {
        take_over();
        return;
    }
    if (!kOverlaps) {
        load();
    }
    load_weights(first);
    const bool stored = slot >= 0 && slot < pages * kPage;
    const int position = __shfl_sync(kAll, place, axis == 1 ? 1 : axis == 2 ? 2 : 0);
    const bool known = position >= 0 && position < table_rows;
    const size_t angle = static_cast<size_t>(known ? position : 0) * kHalfTurned + lane;
    const float read_cosine = read(cosines + angle), read_sine = read(sines + angle);
    take_over();
    if (kOverlaps) {
        load();
    }
    __syncwarp();
    const float own_cosine = known ? read_cosine : __uint_as_float(0x7FC00000u);
    const float own_sine = known ? read_sine : __uint_as_float(0x7FC00000u);
    float cosine[4], sine[4]; // of the first four dimensions of this lane, if they turn
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int pair = (4 * lane + i) % kHalfTurned;
        cosine[i] = __shfl_sync(kAll, own_cosine, pair);
        const float turn = __shfl_sync(kAll, own_sine, pair);
        sine[i] = lane < kHalfTurned / 4 ? -turn : turn;
    }

    int overflowed = 0;
#pragma unroll 1
    for (int i = 0; i < kEach; ++i) {
        const int head = first + i * step;
        if (head >= heads) {
            break;
        }
        float v[kOwn] = {in[0][0].x, in[0][0].y, in[0][0].z, in[0][0].w, in[0][1].x, in[0][1].y, in[0][1].z, in[0][1].w};
#pragma unroll
        for (int next = 1; next < kEach; ++next) { // the loop stays one: its code is long
            in[next - 1][0] = in[next][0];
            in[next - 1][1] = in[next][1];
        }
        const bool is_query = head < q_heads, is_value = kValues && head >= q_heads + kv_heads;
        if (!is_value) {
            if (i > 0 && head >= q_heads && head - step < q_heads) {
                load_weights(head); // the first key
            }
            const float w[kOwn] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w,
                                   weights[1].x, weights[1].y, weights[1].z, weights[1].w};
            float squares = 0;
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                squares += v[j] * v[j];
            }
            float inverse = fast_inverse_root(warp_sum(squares) / kDim + eps);
            inverse *= Store::kTurned ? kTurnScale : 1.0f; // a power of two: where it is applied does not matter
#pragma unroll
            for (int j = 0; j < kOwn; ++j) {
                v[j] *= inverse * (1.0f + w[j]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float other = __shfl_xor_sync(kAll, v[j], kHalfTurned / 4);
                if (lane < 2 * kHalfTurned / 4) { // which product is fused must not be the compiler's choice
                    v[j] = fmaf(v[j], cosine[j], __fmul_rn(other, sine[j]));
                }
            }
            if (Store::kTurned) {
                hadamard(v, lane);
            }
        }
        overflowed += staged_all(v);
        if (is_query) {
            uint2 *to = reinterpret_cast<uint2 *>(query) + (static_cast<size_t>(token) * q_heads + head) * (kDim / 4) + lane;
            write(to, packed(v, 0));
            write(to + kDim / 8, packed(v, 1));
        } else if (stored) {
            const int kv_head = (head - q_heads) % kv_heads;
            const size_t tile = static_cast<size_t>(slot / kPage) * kv_heads + kv_head;
            char *pool = static_cast<char *>(is_value ? values : keys) + tile * kPage * kDim * Store::kBytes;
            unsigned short *scales = (is_value ? value_scales : key_scales) + tile * kPage * kBlocks;
            Store::store(v, is_value, pool, scales, slot % kPage, lane);
        }
    }
    count_overflows(overflowed, overflows ? overflows + token : nullptr);
}

// Values of kRun tokens of a head, which stand side by side in a page: written a piece of 16 bytes at a time, not a byte. Where
// the tokens' slots are not a whole run (the ends of a chunk, padding), element by element.
template <class Store>
__device__ __forceinline__ void store_values(int first, int tokens, int kv_head, const float *projection, int row_stride,
                                             const int *slots, void *values, unsigned short *value_scales, int pages,
                                             int *overflows, int q_heads, int kv_heads) {
    constexpr int kWarps = kThreads / 32, kEach = kRun / kWarps;
    __shared__ typename Store::Row rows[kRun];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int at = first + lane % kRun; // lane i knows the slot of token i
    int slot = at >= 0 && at < tokens ? read_here(slots + at) : -1;
    slot = slot >= 0 && slot < pages * kPage ? slot : -1;
    const int begin = __shfl_sync(kAll, slot, 0);
    const bool whole = begin >= 0 && begin % kRun == 0 && __ballot_sync(kAll, slot == begin + lane % kRun) == kAll;
    take_over();
    float4 in[kEach][2];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int token = min(max(first + warp * kEach + i, 0), tokens - 1);
        const float *row = projection + static_cast<size_t>(token) * row_stride + (2 * q_heads + kv_heads + kv_head) * kDim;
        in[i][0] = stream(reinterpret_cast<const float4 *>(row) + lane);
        in[i][1] = stream(reinterpret_cast<const float4 *>(row) + lane + kDim / 8);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int token = first + warp * kEach + i, own = __shfl_sync(kAll, slot, warp * kEach + i);
        if (token < 0 || token >= tokens) {
            continue;
        }
        float v[kOwn] = {in[i][0].x, in[i][0].y, in[i][0].z, in[i][0].w, in[i][1].x, in[i][1].y, in[i][1].z, in[i][1].w};
        count_overflows(staged_all(v), overflows ? overflows + token : nullptr);
        if (own < 0) {
            continue;
        }
        const size_t tile = static_cast<size_t>(own / kPage) * kv_heads + kv_head;
        unsigned short *scales = value_scales + tile * kPage * kBlocks;
        if (whole) {
            Store::put(v, rows[warp * kEach + i], scales, own % kPage, lane);
        } else {
            Store::store(v, true, static_cast<char *>(values) + tile * kPage * kDim * Store::kBytes, scales, own % kPage, lane);
        }
    }
    __syncthreads();
    if (whole) {
        const size_t tile = static_cast<size_t>(begin / kPage) * kv_heads + kv_head;
        Store::store_run(rows, static_cast<char *>(values) + tile * kPage * kDim * Store::kBytes, begin % kPage);
    }
}

#define QKV_ROPE(name, Store)                                                                                          \
    extern "C" __global__ void __launch_bounds__(kThreads) name(                                                       \
        const float *projection, int row_stride, const float *query_weight, const float *key_weight,                   \
        const float *cosines, const float *sines, int table_rows, const int *positions, const int *axes,               \
        const int *slots, void *keys, unsigned short *key_scales, void *values, unsigned short *value_scales,          \
        int pages, unsigned short *query, int *overflows, int q_heads, int kv_heads, float eps) {                      \
        turn_heads<Store, 1, true>(blockIdx.x, gridDim.x, projection, row_stride, query_weight,                        \
                          key_weight, cosines, sines, table_rows, positions, axes, slots, keys, key_scales, values,    \
                          value_scales, pages, query, overflows, q_heads, kv_heads, eps);                              \
    }

QKV_ROPE(qkv_rope_int8, Int8Store)
QKV_ROPE(qkv_rope_fp16, HalfStore)

// The same for many tokens, with blocks of their own for values, which come first: as many runs as kRun tokens from any place in
// a run on may touch, (T + 2 kRun - 2) / kRun, each kv_heads times. Grid: (those and T, parts of the other heads).
#define QKV_ROPE_MANY(name, Store)                                                                                     \
    extern "C" __global__ void __launch_bounds__(kThreads) name(                                                       \
        const float *projection, int row_stride, const float *query_weight, const float *key_weight,                   \
        const float *cosines, const float *sines, int table_rows, const int *positions, const int *axes,               \
        const int *slots, void *keys, unsigned short *key_scales, void *values, unsigned short *value_scales,          \
        int pages, unsigned short *query, int *overflows, int q_heads, int kv_heads, float eps, int tokens) {          \
        const int runs = gridDim.x - tokens, token = blockIdx.x - runs;                                                \
        if (token < 0) {                                                                                               \
            if (blockIdx.y > 0) {                                                                                      \
                take_over();                                                                                           \
                return;                                                                                                \
            }                                                                                                          \
            const int skipped = max(read_here(slots), 0) % kRun;                                                       \
            store_values<Store>(static_cast<int>(blockIdx.x) / kv_heads * kRun - skipped, tokens,                      \
                                blockIdx.x % kv_heads, projection, row_stride, slots, values, value_scales, pages,     \
                                overflows, q_heads, kv_heads);                                                         \
            return;                                                                                                    \
        }                                                                                                              \
        turn_heads<Store, kMany, false>(token, tokens, projection, row_stride, query_weight, key_weight,               \
                          cosines, sines, table_rows, positions, axes, slots, keys, key_scales, values, value_scales,  \
                          pages, query, overflows, q_heads, kv_heads, eps);                                            \
    }

QKV_ROPE_MANY(qkv_rope_many_int8, Int8Store)
QKV_ROPE_MANY(qkv_rope_many_fp16, HalfStore)
