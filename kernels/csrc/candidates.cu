// The few logits of a rank's share of the vocabulary that can decide a token: the first kCandidates in the order of value
// after penalties, then of id. Put together over the ranks they hold whatever a greedy or a top-k draw can give.
//
// A tournament: every kSorted keys are sorted by a block, which passes its first kCandidates on. A key is an adjusted logit's
// bits, made to ascend with its value, above the complement of its place, so that no two are equal and nothing hangs on
// timing. The logits that travel are the raw ones: what samples them adjusts them again. docs/kernels/sampling.md.
#include "sampling.cuh"

constexpr int kCandidates = 64;
constexpr int kSorted = 1024;
using Key = unsigned long long;                    // 0: no candidate
constexpr unsigned kBroken = 0xFFFFFFFFu;          // above every number: a logit that is not finite must be seen

// Sorts kSorted keys in shared memory, the largest first (bitonic; Batcher, 1968). All threads call it.
__device__ __forceinline__ void sort_keys(Key *keys) {
    for (int size = 2; size <= kSorted; size *= 2) {
        for (int stride = size / 2; stride; stride /= 2) {
            __syncthreads();
            for (int pair = threadIdx.x; pair < kSorted / 2; pair += kThreads) {
                const int low = 2 * pair - (pair & (stride - 1)), high = low + stride;
                const Key a = keys[low], b = keys[high];
                if ((a < b) == ((low & size) == 0)) {
                    keys[low] = b;
                    keys[high] = a;
                }
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void pass_on(const Key *keys, Key *out) {
    if (threadIdx.x < kCandidates) {
        write(out + (static_cast<size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * kCandidates + threadIdx.x,
              keys[threadIdx.x]);
    }
}

__device__ __forceinline__ int id_of(const int *ids, int first, int place) { return ids ? read(ids + place) : first + place; }

// logits: FP32 [rows, count], rows logits_stride apart, of the ids `ids` [count], or first .. first + count - 1 if null;
// those from `vocabulary` on cannot be drawn. lanes, drafted, seen, answer_counts, bias, open, wishes as in sampling.cu.
// out: [rows, blocks, kCandidates]. Grid: (count / kSorted, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    candidates_first(const float *logits, int logits_stride, int count, const int *ids, int first, const int *lanes,
                     const int *drafted, const unsigned char *seen, const float *answer_counts, const float *bias,
                     int open, Wishes wishes, int vocabulary, Key *out) {
    __shared__ Key keys[kSorted];
    const int row = blockIdx.y, lane = read(lanes + row);
    for (int slot = threadIdx.x; slot < kSorted; slot += kThreads) {
        keys[slot] = 0;
    }
    if (lane >= 0) {
        const Penalties penalties(wishes, lane, drafted, row, seen, answer_counts, vocabulary);
        for (int slot = threadIdx.x; slot < kSorted; slot += kThreads) {
            const int place = blockIdx.x * kSorted + slot;
            const int id = place < count ? id_of(ids, first, place) : -1;
            if (id < 0 || id >= vocabulary) {
                continue;
            }
            float value = read(logits + static_cast<size_t>(row) * logits_stride + place);
            const bool sound = is_sound(value, open);
            if (bias) {
                value = value + read(bias + static_cast<size_t>(lane) * vocabulary + id);
            }
            if (penalties.any()) {
                value = penalties.on(value, id);
            }
            keys[slot] = static_cast<Key>(sound ? ascending(value) : kBroken) << 32 | ~static_cast<unsigned>(place);
        }
    }
    sort_keys(keys);
    pass_on(keys, out);
}

// in: [rows, count]; out as above. Grid: (count / kSorted, rows).
extern "C" __global__ void __launch_bounds__(kThreads) candidates_narrow(const Key *in, int count, Key *out) {
    __shared__ Key keys[kSorted];
    for (int slot = threadIdx.x; slot < kSorted; slot += kThreads) {
        const int place = blockIdx.x * kSorted + slot;
        keys[slot] = place < count ? read(in + static_cast<size_t>(blockIdx.y) * count + place) : 0;
    }
    sort_keys(keys);
    pass_on(keys, out);
}

// in: [rows, count], count at most kSorted. out: FP32 [rows, 2, kCandidates], logits (NaN for one that is not finite), then
// their ids (-1: none), which FP32 holds exactly below 2^24. Grid: (rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    candidates_last(const Key *in, int count, const float *logits, int logits_stride, const int *ids, int first,
                    float *out) {
    __shared__ Key keys[kSorted];
    const int row = blockIdx.x;
    for (int slot = threadIdx.x; slot < kSorted; slot += kThreads) {
        keys[slot] = slot < count ? read(in + static_cast<size_t>(row) * count + slot) : 0;
    }
    sort_keys(keys);
    if (threadIdx.x < kCandidates) {
        const Key key = keys[threadIdx.x];
        float value = __uint_as_float(0xFF800000u), id = -1.0f;
        if (key) {
            const int place = static_cast<int>(~static_cast<unsigned>(key));
            value = key >> 32 == kBroken ? __uint_as_float(0x7FC00000u)
                                         : read(logits + static_cast<size_t>(row) * logits_stride + place);
            id = static_cast<float>(id_of(ids, first, place));
        }
        float *own = out + static_cast<size_t>(row) * 2 * kCandidates + threadIdx.x;
        write(own, value);
        write(own + kCandidates, id);
    }
}

// gathered: FP32 [rows, ranks, 2, kCandidates]. out: FP32 [rows, columns], rows out_stride apart: the candidates at their
// ids, minus infinity elsewhere. Grid: (kSlices, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    candidates_spread(const float *gathered, int ranks, float *out, int out_stride, int columns) {
    const int row = blockIdx.y;
    const int size = (columns + kSlices - 1) / kSlices, begin = blockIdx.x * size, end = min(columns, begin + size);
    float *own = out + static_cast<size_t>(row) * out_stride;
    for (int id = begin + threadIdx.x; id < end; id += kThreads) {
        write(own + id, __uint_as_float(0xFF800000u));
    }
    __syncthreads(); // of this block's own part of the row
    for (int entry = threadIdx.x; entry < ranks * kCandidates; entry += kThreads) {
        const float *from = gathered + (static_cast<size_t>(row) * ranks + entry / kCandidates) * 2 * kCandidates +
                            entry % kCandidates;
        const int id = static_cast<int>(read(from + kCandidates));
        if (id >= begin && id < end) {
            write(own + id, read(from));
        }
    }
}
