// Rows of which a small top-k leaves few ids: the first keys of many, and what is drawn from a list of at most kListed ids.
//
// A key is a logit's bits, made to ascend with its value, above the complement of its id: no two are equal, and their order
// is that of the cut (by value, then by id). Sums over a list are added one after the other.
#pragma once
#include "sampling.cuh"

using Key = unsigned long long; // 0: none
constexpr int kNone = 0x7FFFFFFF;
constexpr int kMostInside = 2048; // keys of a slice that may come into question

__device__ __forceinline__ Key key_of(float value, int id) {
    return static_cast<Key>(ascending(value)) << 32 | ~static_cast<unsigned>(id);
}
__device__ __forceinline__ int id_of(Key key) { return static_cast<int>(~static_cast<unsigned>(key)); }
__device__ __forceinline__ float value_of_key(Key key) { return value_of(static_cast<unsigned>(key >> 32)); }

template <int kInside> struct Contest {
    Key largest[kThreads], inside[kInside], bound;
    int count;
};

// The first k of the keys that a block's threads hold: `take(rank, key)` for each, by whichever thread. `largest`: of this
// thread's keys, 0: it has none; `own(visit)` visits them all. At least k keys are no smaller than the k-th of the largest
// ones, and they are all held by k threads: kInside must be k times what a thread holds. Returns how many were taken. The
// places inside come in any order, the ranks do not hang on it.
template <int kInside, class Own, class Take>
__device__ __forceinline__ int first_keys(Contest<kInside> &contest, int k, Key largest, Own own, Take take) {
    contest.largest[threadIdx.x] = largest;
    if (threadIdx.x == 0) {
        contest.count = 0;
        contest.bound = 1;
    }
    __syncthreads();
    int rank = 0;
#pragma unroll 8
    for (int other = 0; other < kThreads; ++other) {
        rank += contest.largest[other] > largest;
    }
    if (rank == k - 1 && largest) {
        contest.bound = largest;
    }
    __syncthreads();
    if (rank < k && largest) {
        own([&](Key key) {
            if (key >= contest.bound) {
                contest.inside[atomicAdd(&contest.count, 1)] = key;
            }
        });
    }
    __syncthreads();
    const int count = contest.count;
    for (int place = threadIdx.x; place < count; place += kThreads) {
        const Key key = contest.inside[place];
        int before = 0;
        for (int other = 0; other < count; ++other) {
            before += contest.inside[other] > key;
        }
        if (before < k) {
            take(before, key);
        }
    }
    return min(count, k);
}

struct List {
    const int *ids;
    const double *weights, *sums;
    double total;
    int size;

    __device__ __forceinline__ List(const Rows &rows, int row)
        : ids(rows.list_ids + row * kListed), weights(rows.list_weights + row * kListed),
          sums(rows.list_sums + row * kListed), size(read(rows.list_size + row)) {
        total = size > 0 ? read(sums + size - 1) : 1.0;
    }

    // Of an id, 0 if it is not in the list. Whole warps call it.
    __device__ __forceinline__ double probability(int id) const {
        double found = 0;
        for (int place = threadIdx.x % 32; place < size; place += 32) {
            found = read(ids + place) == id ? read(weights + place) : found;
        }
        return warp_total(found) / total;
    }
    // The same, by a thread alone.
    __device__ __forceinline__ double chance(int id) const {
        double found = 0;
        for (int place = 0; place < size; ++place) {
            found = read(ids + place) == id ? read(weights + place) : found;
        }
        return found / total;
    }
};

// The first place of `size` whose running sum exceeds the goal; if rounding put the goal at the total, that which reaches it.
// Whole warps call it; -1: there is no mass at all.
template <class Sum> __device__ __forceinline__ int place_of(int size, double goal, double total, Sum sum) {
    int last = -1;
    for (int first = 0; first < size; first += 32) {
        const int place = first + threadIdx.x % 32;
        const double upto = place < size ? sum(place) : 0.0;
        const unsigned over = __ballot_sync(kAll, place < size && upto > goal);
        if (over) {
            return first + __ffs(over) - 1;
        }
        const unsigned all = __ballot_sync(kAll, place < size && upto >= total && total > 0);
        last = last < 0 && all ? first + __ffs(all) - 1 : last;
    }
    return last;
}

__device__ __forceinline__ int drawn_from(const List &list, double random) {
    const int place = place_of(list.size, random * list.total, list.total, [&](int at) { return read(list.sums + at); });
    return place < 0 ? -1 : read(list.ids + place);
}

// A draft that was certain.
struct Certain {
    int draft;
    __device__ __forceinline__ double chance(int id) const { return id == draft ? 1.0 : 0.0; }
};

// From what remains of a target after its draft was refused: max(p - q, 0), q by the draft's own list or a certain draft. -1:
// nothing remains. rest: FP64 [kListed] of shared memory. All threads call it.
template <class Source>
__device__ __forceinline__ int drawn_from_rest(const List &target, const Source &source, double random, double *rest) {
    const int place = threadIdx.x;
    if (place < target.size) {
        const double p = read(target.weights + place) / target.total, q = source.chance(read(target.ids + place));
        rest[place] = p > q ? p - q : 0.0;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int at = 1; at < target.size; ++at) {
            rest[at] += rest[at - 1];
        }
    }
    __syncthreads();
    const double total = target.size > 0 ? rest[target.size - 1] : 0.0;
    const int found = place_of(target.size, random * total, total, [&](int at) { return rest[at]; });
    return found < 0 ? -1 : read(target.ids + found);
}
