// Between the projection and attention, in one pass: norm of queries and keys, partial rotary embedding with three
// position axes, and the write into the paged cache. A warp takes a head, or of many tokens two.
#include "rope_turn.cuh"

constexpr int kFewThreads = 96;

// projection: FP32 [T, row_stride]: q_heads x [query 256 | gate 256], kv_heads x 256 keys, kv_heads x 256 values.
// positions: [3, T] (time, height, width); axes: [32], the axis of each pair; cosines, sines: FP32 [table_rows, 32].
// slots: [T], page * 64 + offset; outside of the pool (-1): nothing is written. query: fp16 [T, q_heads, 256].
// A block takes a head of a token, values too: two warps half of its results each, a third the angles meanwhile. Grid: (T, heads).
template <class Store>
__device__ __forceinline__ void turn_head(int token, int tokens, const float *projection, int row_stride,
                                          const float *query_weight, const float *key_weight, const float *cosines,
                                          const float *sines, int table_rows, const int *positions, const int *axes,
                                          const int *slots, void *keys, unsigned short *key_scales, void *values,
                                          unsigned short *value_scales, int pages, unsigned short *query,
                                          int *overflows, int q_heads, int kv_heads, float eps) {
    __shared__ __align__(16) float turns[2][kHalfTurned];
    const int lane = threadIdx.x % 32, half = threadIdx.x / 32, head = blockIdx.y;
    const bool is_query = head < q_heads, is_value = head >= q_heads + kv_heads;
    if (half == 2) {
        if (!is_value) {
            const Place place(token, tokens, positions, axes);
            const Angle angle(place, cosines, sines, table_rows);
            turns[0][lane] = angle.cosine;
            turns[1][lane] = angle.sine;
        }
        take_over();
        __syncthreads();
        return;
    }
    const int start = is_query ? head * 2 * kDim : (q_heads + head) * kDim;
    const float4 *from = reinterpret_cast<const float4 *>(projection + static_cast<size_t>(token) * row_stride + start) + lane;
    const float4 *own_weight = reinterpret_cast<const float4 *>(is_query ? query_weight : key_weight) + lane;
    const float4 weights[2] = {read(own_weight), read(own_weight + kDim / 8)};
    const int slot = read_here(slots + token);
    take_over();
    const float4 in[2] = {stream(from), stream(from + kDim / 8)};
    float v[kOwn] = {in[0].x, in[0].y, in[0].z, in[0].w, in[1].x, in[1].y, in[1].z, in[1].w}, own[kHalfOwn];
    float squares = 0, factor = 1.0f;
    if (!is_value) {
        const float w[kOwn] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w,
                               weights[1].x, weights[1].y, weights[1].z, weights[1].w};
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
            squares = fmaf(v[j], v[j], squares);
            v[j] = weighted(v[j], w[j]);
        }
        float other[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            other[j] = __shfl_xor_sync(kAll, v[j], kHalfTurned / 4);
        }
        factor = norm_factor<Store>(warp_sum(squares), eps);
        __syncthreads();
        const float4 cosine = reinterpret_cast<const float4 *>(turns[0])[lane % (kHalfTurned / 4)];
        const float4 sine = reinterpret_cast<const float4 *>(turns[1])[lane % (kHalfTurned / 4)];
        const float cosines[4] = {cosine.x, cosine.y, cosine.z, cosine.w}, sines[4] = {sine.x, sine.y, sine.z, sine.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float turned = turn(v[j], other[j], cosines[j], lane < kHalfTurned / 4 ? -sines[j] : sines[j]);
            v[j] = lane < 2 * kHalfTurned / 4 ? turned : v[j];
        }
    } else {
        __syncthreads();
    }
    if (Store::kTurned && !is_value) {
        hadamard_half(v, half, lane, own);
    } else {
#pragma unroll
        for (int i = 0; i < kHalfOwn; ++i) {
            own[i] = half ? v[i + kHalfOwn] : v[i];
        }
    }
    scale_all(own, factor);
    const int overflowed = staged_all(own);
    if (is_query) {
        write(reinterpret_cast<uint2 *>(query) + (static_cast<size_t>(token) * q_heads + head) * (kDim / 4) + half * (kDim / 8) + lane,
              packed(own, 0));
    } else if (slot >= 0 && slot < pages * kPage) {
        const size_t tile = static_cast<size_t>(slot / kPage) * kv_heads + head - q_heads - (is_value ? kv_heads : 0);
        char *pool = static_cast<char *>(is_value ? values : keys) + tile * kPage * kDim * Store::kBytes;
        unsigned short *scales = (is_value ? value_scales : key_scales) + tile * kPage * kBlocks;
        Store::store(own, half, is_value, pool, scales, slot % kPage, lane);
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
    const Place place(token, tokens, positions, axes);
    const int slot = read_here(slots + token);
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
        const float own_weights[4] = {weights[g].x, weights[g].y, weights[g].z, weights[g].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            v[4 * g + i] = weighted(four[i], own_weights[i]);
            squares[g % 2] = fmaf(four[i], four[i], squares[g % 2]);
        }
    }
    float sum = squares[0] + squares[1];
#pragma unroll
    for (int step = 8; step; step /= 2) {
        sum += __shfl_xor_sync(kAll, sum, step);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float other = __shfl_xor_sync(kAll, v[i], kHalfTurned / 4);
        v[i] = turn(v[i], other, cosine[i], sine[i]);
    }
    if (Store::kTurned) {
        hadamard_pair(v, part);
    }
    scale_all(v, norm_factor<Store>(sum, eps));
    const int overflowed = staged_all(v);
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
            Store::store(v, 0, true, static_cast<char *>(values) + tile * kPage * kDim * Store::kBytes, scales, own % kPage, lane);
        }
    }
    __syncthreads();
    if (whole) {
        const size_t tile = static_cast<size_t>(begin / kPage) * kv_heads + kv_head;
        Store::store_run(rows, static_cast<char *>(values) + tile * kPage * kDim * Store::kBytes, begin % kPage);
    }
}

#define QKV_ROPE(name, Store)                                                                                          \
    extern "C" __global__ void __launch_bounds__(kFewThreads) name(                                                    \
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
