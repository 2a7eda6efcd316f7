// Between the projection and attention, in one pass: norm of queries and keys, partial rotary embedding with three
// position axes, and the write into the paged cache. A warp takes a head at a time, or of many tokens two.
#include "rope_store.cuh"

constexpr int kHalfTurned = 32; // pairs (j, j + 32) of the first 64 dimensions turn
#if __CUDA_ARCH__ >= 900
constexpr bool kOverlaps = true; // the projection is asked for behind the launch before
#else
constexpr bool kOverlaps = false;
#endif

// Multiplied by the 256 x 256 Hadamard matrix (Sylvester's order). Over 16 it is orthonormal: products of a turned query
// and a turned key are those of the unturned ones, and outliers of a key are spread over all dimensions.
constexpr float kTurnScale = 0.0625f;

__device__ __forceinline__ void butterfly(float &a, float &b) {
    const float low = a;
    a = low + b;
    b = low - b;
}

__device__ __forceinline__ void hadamard(float (&v)[kOwn], int lane) {
#pragma unroll
    for (int step = 1; step < kOwn; step *= 2) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (!(i & step)) {
                butterfly(v[i], v[i + step]);
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

// The same steps in the same order on two heads side by side, lanes 0 .. 15 and 16 .. 31: what was a step between lanes 16 apart
// is one in a lane.
__device__ __forceinline__ void hadamard_pair(float (&v)[kPairOwn], int part) {
#pragma unroll
    for (int step = 1; step < kPairOwn; step *= step == 2 ? 4 : 2) {
#pragma unroll
        for (int i = 0; i < kPairOwn; ++i) {
            if (!(i & step)) {
                butterfly(v[i], v[i + step]);
            }
        }
    }
#pragma unroll
    for (int step = 1; step < 16; step *= 2) {
        const float sign = part & step ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kPairOwn; ++i) {
            const float other = __shfl_xor_sync(kAll, v[i], step);
            v[i] = fmaf(v[i], sign, other);
        }
    }
#pragma unroll
    for (int i = 0; i < kPairOwn; ++i) {
        if (!(i & 4)) {
            butterfly(v[i], v[i + 4]);
        }
    }
}

// What fits fp16, in place; how many did not.
template <int kCount> __device__ __forceinline__ int staged_all(float (&v)[kCount]) {
    float largest = 0; // a NaN is passed over, and stays
    int overflowed = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        largest = fmaxf(largest, fabsf(v[i]));
    }
    if (largest > kLargestHalf) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            v[i] = staged(v[i], overflowed);
        }
    }
    return overflowed;
}

// Where a token stands: lane i has read its position on axis i, and the axis of pair i. Where launches overlap, that is older than
// the projection, which the launch before writes.
struct Place {
    int axis, position, slot;
    __device__ __forceinline__ Place(int token, int tokens, const int *positions, const int *axes, const int *slots)
        : axis(read_here(axes + threadIdx.x % 32)), position(read_here(positions + min(static_cast<int>(threadIdx.x % 32), 2) * tokens + token)),
          slot(read_here(slots + token)) {}
};

// The angle of pair `lane`, as the tables have it: NaN where they do not.
struct Angle {
    float cosine, sine;
    bool known;
    __device__ __forceinline__ Angle(const Place &place, const float *cosines, const float *sines, int table_rows) {
        const int position = __shfl_sync(kAll, place.position, place.axis == 1 ? 1 : place.axis == 2 ? 2 : 0);
        known = position >= 0 && position < table_rows;
        const size_t at = static_cast<size_t>(known ? position : 0) * kHalfTurned + threadIdx.x % 32;
        cosine = read(cosines + at);
        sine = read(sines + at);
    }
    // Of the four dimensions from `first` on, the sine with its sign.
    __device__ __forceinline__ void spread(int first, bool lower, float (&cosines)[4], float (&sines)[4]) const {
        const float missing = __uint_as_float(0x7FC00000u);
        const float own_cosine = known ? cosine : missing, own_sine = known ? sine : missing;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int pair = (first + i) % kHalfTurned;
            cosines[i] = __shfl_sync(kAll, own_cosine, pair);
            const float turn = __shfl_sync(kAll, own_sine, pair);
            sines[i] = lower ? -turn : turn;
        }
    }
};

// A product that goes into sums as it is, rounded: whether it is fused with one must not be the compiler's choice, which would not
// be the same in both forms below.
__device__ __forceinline__ float normed(float v, float inverse, float weight) {
    return __fmul_rn(v, inverse * (1.0f + weight));
}

// projection: FP32 [T, row_stride]: q_heads x [query 256 | gate 256], kv_heads x 256 keys, kv_heads x 256 values.
// positions: [3, T] (time, height, width); axes: [32], the axis of each pair; cosines, sines: FP32 [table_rows, 32].
// slots: [T], page * 64 + offset; outside of the pool (-1): nothing is written. query: fp16 [T, q_heads, 256].
// A warp takes a head of a token, values too. Grid: (T, heads / warps rounded up).
template <class Store>
__device__ __forceinline__ void turn_head(int token, int tokens, const float *projection, int row_stride,
                                          const float *query_weight, const float *key_weight, const float *cosines,
                                          const float *sines, int table_rows, const int *positions, const int *axes,
                                          const int *slots, void *keys, unsigned short *key_scales, void *values,
                                          unsigned short *value_scales, int pages, unsigned short *query,
                                          int *overflows, int q_heads, int kv_heads, float eps) {
    const int lane = threadIdx.x % 32, head = blockIdx.y * (kThreads / 32) + threadIdx.x / 32;
    const int start = head < q_heads ? head * 2 * kDim : (q_heads + head) * kDim;
    const float4 *from = reinterpret_cast<const float4 *>(projection + static_cast<size_t>(token) * row_stride + start) + lane;
    const bool is_query = head < q_heads, is_value = head >= q_heads + kv_heads;
    float4 in[2];
    const auto load = [&]() {
        in[0] = stream(from);
        in[1] = stream(from + kDim / 8);
    };
    const Place place(token, tokens, positions, axes, slots);
    if (head >= q_heads + 2 * kv_heads) {
        take_over();
        return;
    }
    if (!kOverlaps) {
        load();
    }
    const float4 *own_weight = reinterpret_cast<const float4 *>(is_query ? query_weight : key_weight) + lane;
    const float4 weights[2] = {read(own_weight), read(own_weight + kDim / 8)};
    const Angle angle(place, cosines, sines, table_rows);
    take_over();
    if (kOverlaps) {
        load();
    }
    __syncwarp();
    float cosine[4], sine[4]; // of the first four dimensions of this lane, if they turn
    angle.spread(4 * lane, lane < kHalfTurned / 4, cosine, sine);
    float v[kOwn] = {in[0].x, in[0].y, in[0].z, in[0].w, in[1].x, in[1].y, in[1].z, in[1].w};
    if (!is_value) {
        const float w[kOwn] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w,
                               weights[1].x, weights[1].y, weights[1].z, weights[1].w};
        float squares = 0;
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            squares = fmaf(v[j], v[j], squares);
        }
        float inverse = fast_inverse_root(warp_sum(squares) / kDim + eps);
        inverse *= Store::kTurned ? kTurnScale : 1.0f; // a power of two: where it is applied does not matter
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            v[j] = normed(v[j], inverse, w[j]);
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
    const int overflowed = staged_all(v), slot = place.slot;
    if (is_query) {
        uint2 *to = reinterpret_cast<uint2 *>(query) + (static_cast<size_t>(token) * q_heads + head) * (kDim / 4) + lane;
        write(to, packed(v, 0));
        write(to + kDim / 8, packed(v, 1));
    } else if (slot >= 0 && slot < pages * kPage) {
        const size_t tile = static_cast<size_t>(slot / kPage) * kv_heads + (head - q_heads) % kv_heads;
        char *pool = static_cast<char *>(is_value ? values : keys) + tile * kPage * kDim * Store::kBytes;
        unsigned short *scales = (is_value ? value_scales : key_scales) + tile * kPage * kBlocks;
        Store::store(v, is_value, pool, scales, slot % kPage, lane);
    }
    count_overflows(overflowed, overflows ? overflows + token : nullptr);
}

// Two heads a warp, half a warp each, queries and keys alone: of the exchanges between lanes, what is the same for both counts
// once, and a fifth is none. The same bits. Grid: (blocks before the first token's and T, heads / (2 warps) rounded up).
template <class Store>
__device__ __forceinline__ void turn_pair(int token, int tokens, const float *projection, int row_stride,
                                          const float *query_weight, const float *key_weight, const float *cosines,
                                          const float *sines, int table_rows, const int *positions, const int *axes,
                                          const int *slots, void *keys, unsigned short *key_scales, int pages,
                                          unsigned short *query, int *overflows, int q_heads, int kv_heads, float eps) {
    constexpr int kGroups = kPairOwn / 4;
    const int lane = threadIdx.x % 32, part = lane % 16, heads = q_heads + kv_heads;
    const int first = 2 * (blockIdx.y * (kThreads / 32) + threadIdx.x / 32), wanted = first + lane / 16;
    const int head = min(wanted, heads - 1);
    const bool own = wanted < heads, is_query = head < q_heads;
    const int start = is_query ? head * 2 * kDim : (q_heads + head) * kDim;
    const float4 *from = reinterpret_cast<const float4 *>(projection + static_cast<size_t>(token) * row_stride + start) + part;
    const float4 *own_weight = reinterpret_cast<const float4 *>(is_query ? query_weight : key_weight) + part;
    float4 in[kGroups], weights[kGroups];
    const auto load = [&]() {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            in[g] = stream(from + 16 * g);
        }
    };
    const Place place(token, tokens, positions, axes, slots);
    if (first >= heads) {
        take_over();
        return;
    }
    if (!kOverlaps) {
        load();
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        weights[g] = read(own_weight + 16 * g);
    }
    const Angle angle(place, cosines, sines, table_rows);
    take_over();
    if (kOverlaps) {
        load();
    }
    __syncwarp();
    float cosine[4], sine[4];
    angle.spread(4 * part, part < kHalfTurned / 4, cosine, sine);
    float v[kPairOwn], squares[2] = {0, 0}; // of what two lanes of a warp of one head hold
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const float four[4] = {in[g].x, in[g].y, in[g].z, in[g].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[4 * g + i] = four[i];
            squares[g % 2] = fmaf(four[i], four[i], squares[g % 2]);
        }
    }
    float sum = squares[0] + squares[1];
#pragma unroll
    for (int step = 8; step; step /= 2) {
        sum += __shfl_xor_sync(kAll, sum, step);
    }
    float inverse = fast_inverse_root(sum / kDim + eps);
    inverse *= Store::kTurned ? kTurnScale : 1.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
        const float four[4] = {weights[g].x, weights[g].y, weights[g].z, weights[g].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[4 * g + i] = normed(v[4 * g + i], inverse, four[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(kAll, v[i], kHalfTurned / 4);
        v[i] = fmaf(v[i], cosine[i], __fmul_rn(other, sine[i]));
    }
    if (Store::kTurned) {
        hadamard_pair(v, part);
    }
    const int overflowed = staged_all(v), slot = place.slot;
    if (own && is_query) {
        uint2 *to = reinterpret_cast<uint2 *>(query) + (static_cast<size_t>(token) * q_heads + head) * (kDim / 4) + part;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
            write(to + 16 * g, packed(v, g));
        }
    }
    const bool stored = slot >= 0 && slot < pages * kPage;
    if (stored && first + 1 >= q_heads) { // the whole warp: keys exchange their largest
        const size_t tile = static_cast<size_t>(slot / kPage) * kv_heads + max(head - q_heads, 0);
        Store::store_key(v, own && !is_query, static_cast<char *>(keys) + tile * kPage * kDim * Store::kBytes,
                         key_scales + tile * kPage * kBlocks, slot % kPage, part);
    }
    count_overflows(own ? overflowed : 0, overflows ? overflows + token : nullptr);
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
        turn_head<Store>(blockIdx.x, gridDim.x, projection, row_stride, query_weight, key_weight, cosines, sines,      \
                         table_rows, positions, axes, slots, keys, key_scales, values, value_scales, pages, query,     \
                         overflows, q_heads, kv_heads, eps);                                                           \
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
        turn_pair<Store>(token, tokens, projection, row_stride, query_weight, key_weight, cosines, sines, table_rows,  \
                         positions, axes, slots, keys, key_scales, pages, query, overflows, q_heads, kv_heads, eps);   \
    }

QKV_ROPE_MANY(qkv_rope_many_int8, Int8Store)
QKV_ROPE_MANY(qkv_rope_many_fp16, HalfStore)
