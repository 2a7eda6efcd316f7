// What the kernels of sampling share: the slices of a vocabulary, penalties, order and weight of logits, sums over a block.
#pragma once
#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSlices = 32;
constexpr int kDigits = 16;
constexpr int kPasses = 8;
constexpr int kMaxDrafts = 5;
constexpr int kAtOnce = 4; // logits that a thread asks for side by side
constexpr int kAllTies = 0x7FFFFFFF;
constexpr int kListed = 64; // the largest top-k whose rows become short lists
enum { kSample = 0, kDraft = 1, kAccept = 2, kResidual = 3 }; // what a random number is for

// What each lane asked for. FP64 [lanes]: temperature, top_p, min_p; FP32: repetition, presence, frequency.
struct Wishes {
    const double *temperature, *top_p, *min_p;
    const int *top_k;
    const float *repetition, *presence, *frequency;
};

// A distribution a row: adjusted logits FP32 [rows, vocabulary], and what describes the cut.
struct Rows {
    float *logits;
    float *slice_peak;       // [rows, kSlices]
    int *slice_best;         // [rows, kSlices], -1 if a logit of the slice is not finite
    int *digit_counts;       // [rows, 2, kSlices, kDigits], of even and of odd passes
    double *digit_masses;    // likewise
    unsigned *prefix;        // [rows, kPasses + 1]: the digits found before each pass, at the top of the word
    int *above;              // [rows, kPasses + 1]: values that are larger for certain
    double *mass_above;      // [rows, kPasses + 1]
    double *limit;           // [rows]: the mass to reach
    unsigned *floor;         // [rows]: the cut by top-k, and how many equal to it are inside
    int *floor_ties;         // [rows]
    unsigned *cut;           // [rows]: the last cut
    int *ties;               // [rows]: how many equal to it are inside
    int *slice_equal;        // [rows, kSlices]: values equal to the cut
    double *slice_mass;      // [rows, kSlices]: mass inside the cut
    int *list_ids;           // [rows, kListed]: what a short list holds, ids ascending
    double *list_weights;    // [rows, kListed]
    double *list_sums;       // [rows, kListed]: running sums of the weights
    int *list_size;          // [rows]
};

// Whether a lane's rows become short lists, which nothing but its own top-k says; `most`: kListed, or 0 where there are none.
__device__ __forceinline__ bool is_listed(const Wishes &wishes, int lane, int most) {
    const int top_k = most ? read(wishes.top_k + lane) : 0;
    return top_k > 0 && top_k <= most && read(wishes.temperature + lane) > 0;
}

// What a lane's penalties make of the logits of a row, whose token would follow the `drafts` that stand before it.
struct Penalties {
    const unsigned char *seen;  // [vocabulary] of the lane
    const float *answer_counts; // likewise
    float repetition, presence, frequency;
    int drafts[kMaxDrafts];

    __device__ __forceinline__ Penalties(const Wishes &wishes, int lane, const int *drafted, int row,
                                         const unsigned char *all_seen, const float *all_counts, int vocabulary)
        : seen(all_seen + static_cast<size_t>(lane) * vocabulary),
          answer_counts(all_counts + static_cast<size_t>(lane) * vocabulary),
          repetition(read(wishes.repetition + lane)), presence(read(wishes.presence + lane)),
          frequency(read(wishes.frequency + lane)) {
#pragma unroll
        for (int i = 0; i < kMaxDrafts; ++i) {
            drafts[i] = read(drafted + row * kMaxDrafts + i);
        }
    }

    __device__ __forceinline__ bool any() const {
        return repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
    }
    __device__ __forceinline__ float on(float value, int id) const {
        float count = read(answer_counts + id);
        bool known = read(seen + id) != 0;
#pragma unroll
        for (int i = 0; i < kMaxDrafts; ++i) {
            if (drafts[i] == id) {
                known = true;
                count += 1.0f;
            }
        }
        if (repetition != 1.0f && known) {
            value = value > 0 ? value / repetition : value * repetition;
        }
        // Separate roundings, as the reference has them: no fused multiply-add.
        if (presence != 0.0f) {
            value = value - (count > 0 ? presence : 0.0f);
        }
        if (frequency != 0.0f) {
            value = __fsub_rn(value, __fmul_rn(frequency, count));
        }
        return value;
    }
};

__device__ __forceinline__ bool is_sound(float value, bool open) {
    return fabsf(value) <= 3.4028234e38f || (open && value < 0);
}

__device__ __forceinline__ unsigned ascending(float value) {
    const unsigned bits = __float_as_uint(value + 0.0f); // minus zero equals zero
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(unsigned key) {
    return __uint_as_float(key >> 31 ? key & 0x7FFFFFFFu : ~key);
}
__device__ __forceinline__ double weight(float value, float peak, double temperature) {
    return exp((static_cast<double>(value) - static_cast<double>(peak)) / temperature);
}

__device__ __forceinline__ double warp_total(double value) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        value += __shfl_xor_sync(kAll, value, step);
    }
    return value;
}
__device__ __forceinline__ double block_total(double value, double *scratch) {
    value = warp_total(value);
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = value;
    }
    __syncthreads();
    double total = scratch[0];
    for (int warp = 1; warp < kWarps; ++warp) {
        total += scratch[warp];
    }
    return total;
}

// The set bits of the threads before this one in the block, and those of all.
__device__ __forceinline__ int rank_in_block(bool flag, int *scratch, int &all) {
    const unsigned votes = __ballot_sync(kAll, flag);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads();
    if (lane == 0) {
        scratch[warp] = __popc(votes);
    }
    __syncthreads();
    int rank = __popc(votes & ((1u << lane) - 1));
    all = 0;
    for (int other = 0; other < kWarps; ++other) {
        rank += other < warp ? scratch[other] : 0;
        all += scratch[other];
    }
    return rank;
}

// Largest logit of a row and its lowest id (-1: not all finite): a lane takes a slice. Whole warps call it.
__device__ __forceinline__ float row_peak(const Rows &rows, int row, int &best) {
    static_assert(kSlices == 32, "a slice a lane");
    const int lane = threadIdx.x % 32;
    float peak = read(rows.slice_peak + row * kSlices + lane);
    best = read(rows.slice_best + row * kSlices + lane);
    const bool finite = __ballot_sync(kAll, best == -1) == 0;
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(kAll, peak, step);
        const int id = __shfl_xor_sync(kAll, best, step);
        if (other > peak || (other == peak && id < best)) {
            peak = other;
            best = id;
        }
    }
    best = finite ? best : -1;
    return peak;
}

// A row's distribution as a block sees it.
struct View {
    const float *logits;
    double temperature, min_p, total;
    float peak;
    unsigned cut;
    int ties, vocabulary;

    __device__ __forceinline__ bool inside(float value, int rank) const { // rank: ids before it that equal the cut
        const unsigned key = ascending(value);
        return key > cut || (key == cut && rank < ties);
    }
    __device__ __forceinline__ double at(float value, int rank) const {
        const double w = inside(value, rank) ? weight(value, peak, temperature) : 0.0;
        return w >= min_p ? w : 0.0;
    }
    // Weights of kAtOnce ids of a slice, kThreads apart from `id` on: 0 outside of the cut and behind `end`. `rank` counts
    // the slice's ids before them that equal the cut. All threads call it together.
    __device__ __forceinline__ void weigh(double (&weights)[kAtOnce], const float (&values)[kAtOnce], int id, int end,
                                          int &rank, int *scratch) const {
        bool kept[kAtOnce], any = false;
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const bool there = id + n * kThreads < end;
            int own = 0;
            if (ties != kAllTies) {
                int all;
                own = rank + rank_in_block(there && ascending(values[n]) == cut, scratch, all);
                rank += all;
            }
            kept[n] = there && inside(values[n], own);
            any |= kept[n];
            weights[n] = 0.0;
        }
        if (any) { // side by side: one's steps wait for one another
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const double w = weight(values[n], peak, temperature);
                weights[n] = kept[n] && w >= min_p ? w : 0.0;
            }
        }
    }
    __device__ __forceinline__ void load(float (&values)[kAtOnce], int id, int end) const {
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            values[n] = id + n * kThreads < end ? read(logits + id + n * kThreads) : 0.0f;
        }
    }
};

// Where nothing was cut: cut 0 and all ties. Sums the masses of the slices if `summed`. Whole warps call it.
__device__ __forceinline__ View view_of(const Rows &rows, const Wishes &wishes, int row, int lane, int vocabulary,
                                        bool summed) {
    View view;
    int best;
    view.logits = rows.logits + static_cast<size_t>(row) * vocabulary;
    view.temperature = read(wishes.temperature + lane);
    view.min_p = read(wishes.min_p + lane);
    view.peak = row_peak(rows, row, best);
    view.cut = read(rows.cut + row);
    view.ties = read(rows.ties + row);
    view.vocabulary = vocabulary;
    view.total = summed ? warp_total(read(rows.slice_mass + row * kSlices + threadIdx.x % 32)) : 0.0;
    return view;
}

// Walks a slice in the order of ids: `visit(id, weights)` of kAtOnce ids, kThreads apart, until it returns true. All threads
// call it together.
template <class Visit>
__device__ __forceinline__ void walk(const View &view, int begin, int end, int rank, int *scratch, Visit visit) {
    for (int id = begin + threadIdx.x; id - static_cast<int>(threadIdx.x) < end; id += kAtOnce * kThreads) {
        float values[kAtOnce];
        double weights[kAtOnce];
        view.load(values, id, end);
        view.weigh(weights, values, id, end, rank, scratch);
        if (visit(id, weights)) {
            return;
        }
    }
}
__device__ __forceinline__ double added(double sum, const double (&values)[kAtOnce]) {
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
        sum += values[n];
    }
    return sum;
}

__device__ __forceinline__ int rank_before(const Rows &rows, const View &view, int row, int slice) {
    if (view.ties == kAllTies) {
        return 0;
    }
    const int lane = threadIdx.x % 32;
    return static_cast<int>(warp_total(lane < slice ? read(rows.slice_equal + row * kSlices + lane) : 0));
}
