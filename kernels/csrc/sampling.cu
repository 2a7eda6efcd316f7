// From logits to tokens without the host: penalties, the cut by top-k, top-p and min-p, lossless speculation, the draw.
//
// The vocabulary is cut into kSlices slices of consecutive ids; a block takes one slice of one row. What concerns a whole
// row is put together from the slices in their order by whoever needs it, so nothing depends on timing. Probabilities are
// FP64. The cut is found digit by digit: a logit's bits, made to ascend with its value, are eight digits of four bits,
// and each pass counts and weighs the values of the row that share the digits found so far. docs/kernels/sampling.md.
#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kSlices = 32;
constexpr int kDigits = 16;
constexpr int kPasses = 8;
constexpr int kMaxDrafts = 5;
constexpr int kAllTies = 0x7FFFFFFF;
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
};

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

// logits: FP32 [rows, vocabulary ...], rows logits_stride apart. lanes: [rows], -1: none. drafted: [rows, kMaxDrafts],
// the drafts that stand before the row's token, -1 where there are none. seen: [lanes, vocabulary]; answer_counts: FP32
// likewise; bias: FP32 likewise, or null. Grid: (kSlices, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_adjust(const float *logits, int logits_stride, const int *lanes, const int *drafted,
                    const unsigned char *seen, const float *answer_counts, const float *bias, Wishes wishes, Rows rows,
                    int vocabulary) {
    __shared__ float peaks[kWarps];
    __shared__ int bests[kWarps];
    const int row = blockIdx.y, slice = blockIdx.x, lane = read(lanes + row);
    if (lane < 0) {
        return;
    }
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    const float repetition = read(wishes.repetition + lane), presence = read(wishes.presence + lane);
    const float frequency = read(wishes.frequency + lane);
    const bool penalised = repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
    int drafts[kMaxDrafts];
#pragma unroll
    for (int i = 0; i < kMaxDrafts; ++i) {
        drafts[i] = read(drafted + row * kMaxDrafts + i);
    }
    float peak = __uint_as_float(0xFF800000u);
    int best = 0x7FFFFFFF;
    bool finite = true;
    for (int id = begin + threadIdx.x; id < end; id += kThreads) {
        float value = read(logits + static_cast<size_t>(row) * logits_stride + id);
        finite &= fabsf(value) <= 3.4028234e38f;
        const size_t own = static_cast<size_t>(lane) * vocabulary + id;
        if (bias) {
            value = value + read(bias + own);
        }
        if (penalised) {
            float count = read(answer_counts + own);
            bool known = read(seen + own) != 0;
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
        }
        write(rows.logits + static_cast<size_t>(row) * vocabulary + id, value);
        if (value > peak) {
            peak = value;
            best = id;
        }
    }
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const float other = __shfl_xor_sync(kAll, peak, step);
        const int id = __shfl_xor_sync(kAll, best, step);
        if (other > peak || (other == peak && id < best)) {
            peak = other;
            best = id;
        }
    }
    if (__ballot_sync(kAll, !finite)) {
        best = -1;
    }
    if (threadIdx.x % 32 == 0) {
        peaks[threadIdx.x / 32] = peak;
        bests[threadIdx.x / 32] = best;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        bool all = true;
        for (int warp = 0; warp < kWarps; ++warp) {
            all &= bests[warp] != -1;
            if (warp > 0 && (peaks[warp] > peak || (peaks[warp] == peak && bests[warp] < best))) {
                peak = peaks[warp];
                best = bests[warp];
            }
        }
        write(rows.slice_peak + row * kSlices + slice, peak);
        write(rows.slice_best + row * kSlices + slice, all ? best : -1);
    }
}

// The next digit of the cut, from the counts of all slices; by mass, or by count. Every thread must call it; the result
// is the same in all of them.
struct Step {
    unsigned prefix;
    int above, inside;   // values above the prefix's range, values in it
    double mass_above, all;
};
// Where a digit of a pass stands: a slow block may still read what the pass before has counted.
__device__ __forceinline__ size_t digit_place(int row, int slice, int pass, int digit) {
    return ((static_cast<size_t>(row) * 2 + (pass & 1)) * kSlices + slice) * kDigits + digit;
}

__device__ __forceinline__ Step narrowed(const Rows &rows, int row, int pass, bool by_mass, double limit,
                                         double top_p, int *counts, double *masses) {
    // Called before pass `pass`, with what pass - 1 has counted.
    constexpr int kParts = kThreads / kDigits, kEach = kSlices / kParts; // slices a thread
    __shared__ int part_counts[kParts][kDigits];
    __shared__ double part_masses[kParts][kDigits];
    const int own_digit = threadIdx.x % kDigits, own_part = threadIdx.x / kDigits;
    int part_count = 0;
    double part_mass = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const size_t place = digit_place(row, own_part * kEach + i, pass - 1, own_digit);
        part_count += read(rows.digit_counts + place);
        part_mass += read(rows.digit_masses + place);
    }
    part_counts[own_part][own_digit] = part_count;
    part_masses[own_part][own_digit] = part_mass;
    __syncthreads();
    if (threadIdx.x < kDigits) {
        int count = 0;
        double mass = 0;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            count += part_counts[part][threadIdx.x];
            mass += part_masses[part][threadIdx.x];
        }
        counts[threadIdx.x] = count;
        masses[threadIdx.x] = mass;
    }
    __syncthreads();
    const int before = row * (kPasses + 1) + pass - 1;
    Step step = {read(rows.prefix + before), read(rows.above + before), 0, read(rows.mass_above + before), 0};
    for (int digit = 0; digit < kDigits; ++digit) {
        step.all += masses[digit];
    }
    if (by_mass && limit < 0) { // the first pass tells the mass of all, of which top_p is wanted
        limit = top_p * step.all;
    }
    int digit = kDigits - 1, lowest = kDigits - 1;
    int above = step.above;
    double mass_above = step.mass_above;
    for (; digit >= 0; --digit) {
        if (counts[digit] > 0) {
            lowest = digit;
            step.above = above;
            step.mass_above = mass_above;
            if (by_mass ? mass_above + masses[digit] >= limit : above + counts[digit] >= limit) {
                break;
            }
        }
        above += counts[digit];
        mass_above += masses[digit];
    }
    digit = lowest; // where the limit is reached, or, if it never is, the lowest there is
    step.inside = counts[digit];
    step.prefix |= static_cast<unsigned>(digit) << (4 * (kPasses - pass));
    return step;
}

// The sums over a warp of its lanes' 16 values, each digit's in two lanes: half of the values go to the other half of the
// lanes, again and again.
__device__ __forceinline__ int digit_of_lane() { return threadIdx.x % 32 / 2; }
template <int kHalf, class T> __device__ __forceinline__ void halve(T (&v)[kDigits]) {
    const bool upper = threadIdx.x & (2 * kHalf);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
        const T other = __shfl_xor_sync(kAll, upper ? v[i] : v[i + kHalf], 2 * kHalf);
        v[i] = (upper ? v[i + kHalf] : v[i]) + other;
    }
}
template <class T> __device__ __forceinline__ T digit_sum(T (&v)[kDigits]) {
    halve<8>(v);
    halve<4>(v);
    halve<2>(v);
    halve<1>(v);
    return v[0] + __shfl_xor_sync(kAll, v[0], 1);
}

// One pass over a row. by_mass 0: the cut by top-k; 1: by top-p, inside the former (floored: there was one). Pass kPasses
// only closes. Grid: (kSlices, rows), pass kPasses: (1, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_select(const int *lanes, Wishes wishes, Rows rows, int vocabulary, int pass, int by_mass, int floored) {
    __shared__ int counts[kDigits];
    __shared__ double masses[kDigits];
    __shared__ int warp_counts[kWarps][kDigits];
    __shared__ double warp_masses[kWarps][kDigits];
    const int row = blockIdx.y, slice = blockIdx.x, lane = read(lanes + row);
    if (lane < 0) {
        return;
    }
    const double temperature = read(wishes.temperature + lane);
    const int top_k = read(wishes.top_k + lane);
    const double top_p = read(wishes.top_p + lane);
    int best;
    const float peak = row_peak(rows, row, best);
    if (temperature <= 0 || best < 0) {
        return;
    }
    const unsigned floor = floored ? read(rows.floor + row) : 0;
    double limit = top_k > 0 ? top_k : 4e9;
    if (by_mass) {
        limit = top_p >= 1 ? 1e300 : pass > 1 || floored ? read(rows.limit + row) : -1;
    }
    Step step = {};
    if (pass > 0) {
        step = narrowed(rows, row, pass, by_mass, limit, top_p, counts, masses);
        if (by_mass && limit < 0) {
            limit = top_p * step.all;
        }
    }
    if (slice == 0 && threadIdx.x == 0) {
        write(rows.prefix + row * (kPasses + 1) + pass, step.prefix);
        write(rows.above + row * (kPasses + 1) + pass, step.above);
        write(rows.mass_above + row * (kPasses + 1) + pass, step.mass_above);
        if (by_mass && pass == 1 && !floored) {
            write(rows.limit + row, limit);
        }
        if (pass == kPasses) {
            const double each = weight(value_of(step.prefix), peak, temperature);
            if (!by_mass) {
                const int ties = static_cast<int>(fmin(limit - step.above, static_cast<double>(step.inside)));
                write(rows.floor + row, step.prefix);
                write(rows.floor_ties + row, ties);
                write(rows.limit + row, top_p * (step.mass_above + ties * each));
                write(rows.cut + row, step.prefix);
                write(rows.ties + row, ties < step.inside ? ties : kAllTies);
            } else {
                const double wanted = ceil((limit - step.mass_above) / each);
                int ties = static_cast<int>(fmin(fmax(wanted, 1.0), static_cast<double>(step.inside)));
                if (floored && step.prefix == floor) {
                    ties = min(ties, read(rows.floor_ties + row));
                }
                write(rows.cut + row, step.prefix);
                write(rows.ties + row, ties < step.inside ? ties : kAllTies);
            }
        }
    }
    if (pass == kPasses) {
        return;
    }

    const int shift = 4 * (kPasses - 1 - pass);
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    int own_counts[kDigits] = {};
    double own_masses[kDigits] = {};
    for (int id = begin + threadIdx.x; id < end; id += kThreads) {
        const float value = read(rows.logits + static_cast<size_t>(row) * vocabulary + id);
        const unsigned key = ascending(value);
        if (key >= floor && (pass == 0 || key >> (shift + 4) == step.prefix >> (shift + 4))) {
            const int digit = key >> shift & (kDigits - 1);
            const double mass = weight(value, peak, temperature);
#pragma unroll
            for (int i = 0; i < kDigits; ++i) {
                own_counts[i] += digit == i;
                own_masses[i] += digit == i ? mass : 0.0;
            }
        }
    }
    const int lane_digit = digit_of_lane();
    const int count = digit_sum(own_counts);
    const double mass = digit_sum(own_masses);
    if (threadIdx.x % 2 == 0) {
        warp_counts[threadIdx.x / 32][lane_digit] = count;
        warp_masses[threadIdx.x / 32][lane_digit] = mass;
    }
    __syncthreads();
    if (threadIdx.x < kDigits) {
        int count = 0;
        double mass = 0;
        for (int warp = 0; warp < kWarps; ++warp) {
            count += warp_counts[warp][threadIdx.x];
            mass += warp_masses[warp][threadIdx.x];
        }
        const size_t place = digit_place(row, slice, pass, threadIdx.x);
        write(rows.digit_counts + place, count);
        write(rows.digit_masses + place, mass);
    }
}

// A row's distribution as a block sees it.
struct View {
    const float *logits;
    double temperature, min_p, total;
    float peak;
    unsigned cut;
    int ties, vocabulary;

    // Weight of an id; `rank` counts the ids before it that equal the cut.
    __device__ double at(float value, int rank) const {
        const unsigned key = ascending(value);
        if (key < cut || (key == cut && rank >= ties)) {
            return 0.0;
        }
        const double w = weight(value, peak, temperature);
        return w >= min_p ? w : 0.0;
    }
};

// Nothing was cut: cut 0 and all ties. Sums the masses of the slices if `summed`. Whole warps call it.
__device__ __forceinline__ View view_of(const Rows &rows, const Wishes &wishes, int row, int lane, int vocabulary,
                                        bool selected, bool summed) {
    View view;
    int best;
    view.logits = rows.logits + static_cast<size_t>(row) * vocabulary;
    view.temperature = read(wishes.temperature + lane);
    view.min_p = read(wishes.min_p + lane);
    view.peak = row_peak(rows, row, best);
    view.cut = selected ? read(rows.cut + row) : 0;
    view.ties = selected ? read(rows.ties + row) : kAllTies;
    view.vocabulary = vocabulary;
    view.total = summed ? warp_total(read(rows.slice_mass + row * kSlices + threadIdx.x % 32)) : 0.0;
    return view;
}

// Walks a slice in the order of ids, kThreads at a time: `visit(id, weight)` with weight 0 behind the end. All threads
// call it together.
template <class Visit>
__device__ __forceinline__ void walk(const View &view, int begin, int end, int rank, int *scratch, Visit visit) {
    for (int first = begin; first < end; first += kThreads) {
        const int id = first + threadIdx.x;
        const float value = id < end ? read(view.logits + id) : 0.0f;
        int own = 0;
        if (view.ties != kAllTies) {
            int all;
            own = rank + rank_in_block(id < end && ascending(value) == view.cut, scratch, all);
            rank += all;
        }
        if (visit(id, id < end ? view.at(value, own) : 0.0)) {
            return;
        }
    }
}

// Equal values in each slice: their ranks go on from slice to slice. Only rows whose ties are cut need it.
// Grid: (kSlices, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_ties(const int *lanes, Rows rows, int vocabulary) {
    __shared__ double scratch[kWarps];
    const int row = blockIdx.y, slice = blockIdx.x;
    if (read(lanes + row) < 0 || read(rows.ties + row) == kAllTies) {
        return;
    }
    const unsigned cut = read(rows.cut + row);
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    int equal = 0;
    for (int id = begin + threadIdx.x; id < end; id += kThreads) {
        equal += ascending(read(rows.logits + static_cast<size_t>(row) * vocabulary + id)) == cut;
    }
    const double all = block_total(equal, scratch);
    if (threadIdx.x == 0) {
        write(rows.slice_equal + row * kSlices + slice, static_cast<int>(all));
    }
}

__device__ __forceinline__ int rank_before(const Rows &rows, const View &view, int row, int slice) {
    if (view.ties == kAllTies) {
        return 0;
    }
    const int lane = threadIdx.x % 32;
    return static_cast<int>(warp_total(lane < slice ? read(rows.slice_equal + row * kSlices + lane) : 0));
}

// Mass inside the cut, a slice. Grid: (kSlices, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_mass(const int *lanes, Wishes wishes, Rows rows, int vocabulary, int selected) {
    __shared__ double scratch[kWarps];
    __shared__ int ranks[kWarps];
    const int row = blockIdx.y, slice = blockIdx.x, lane = read(lanes + row);
    if (lane < 0 || read(wishes.temperature + lane) <= 0) {
        return;
    }
    const View view = view_of(rows, wishes, row, lane, vocabulary, selected, false);
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    double mass = 0;
    walk(view, begin, end, rank_before(rows, view, row, slice), ranks, [&](int, double w) {
        mass += w;
        return false;
    });
    mass = block_total(mass, scratch);
    if (threadIdx.x == 0) {
        write(rows.slice_mass + row * kSlices + slice, mass);
    }
}

// Probability of an id under a view whose total is known; all threads call it.
__device__ __forceinline__ double probability(const Rows &rows, const View &view, int row, int id, double *scratch) {
    const float value = read(view.logits + id);
    int rank = 0;
    if (view.ties != kAllTies && ascending(value) == view.cut) {
        const int size = (view.vocabulary + kSlices - 1) / kSlices, slice = id / size;
        int equal = 0;
        for (int other = slice * size + threadIdx.x; other < id; other += kThreads) {
            equal += ascending(read(view.logits + other)) == view.cut;
        }
        rank = rank_before(rows, view, row, slice) + static_cast<int>(block_total(equal, scratch));
    }
    return view.at(value, rank) / view.total;
}

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw, 2011): a number in [0, 1) of 53 bits from seed, position and purpose.
__device__ __forceinline__ double uniform(unsigned long long seed, unsigned long long position, unsigned purpose) {
    unsigned c0 = static_cast<unsigned>(position), c1 = static_cast<unsigned>(position >> 32), c2 = purpose, c3 = 0;
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const unsigned high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        const unsigned high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return static_cast<double>(static_cast<unsigned long long>(c0) << 21 | c1 >> 11) * 0x1p-53;
}

// Sequence s of lane lanes_of[s] has rows firsts[s] .. + counts[s] - 1 and counts[s] - 1 drafts: drafted by row, in
// `drafts` [rows] (the last row's unused); sources [rows]: the draft's own row of `draft_rows`, -1: it was certain;
// chances FP64 [rows]: its probability there. positions [sequences]: of the first row's token. Decides how many drafts
// stand: verdict [sequences, 4] = accepted, row that the last token comes from, what to draw (0 nothing, 1 its
// distribution, 2 the rest of it), token (greedy) or -1; a row that is not finite: accepted -1. Grid: (sequences).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_judge(const int *sequence_lanes, const int *firsts, const int *counts, const long long *positions,
                   const int *drafts, const int *sources, const double *chances, const long long *seeds, Wishes wishes,
                   Rows rows, int vocabulary, int selected, int *verdict) {
    __shared__ double scratch[kWarps];
    const int sequence = blockIdx.x, lane = read(sequence_lanes + sequence);
    if (lane < 0) {
        return;
    }
    const int first = read(firsts + sequence), count = read(counts + sequence);
    const unsigned long long seed = read(seeds + lane), position = read(positions + sequence);
    const bool greedy = read(wishes.temperature + lane) <= 0;
    int accepted = 0, kind = greedy ? 0 : 1, token = -1;
    bool finite = true;
    for (int row = first; row < first + count; ++row) {
        int best;
        row_peak(rows, row, best);
        finite &= best >= 0;
    }
    for (int index = 0; finite && index < count; ++index) {
        const int row = first + index, draft = index + 1 < count ? read(drafts + row) : -1;
        if (greedy) {
            row_peak(rows, row, token);
            if (token != draft) {
                break;
            }
        } else {
            if (index + 1 == count) {
                break;
            }
            const View view = view_of(rows, wishes, row, lane, vocabulary, selected, true);
            const double chance = read(sources + row) < 0 ? 1.0 : read(chances + row);
            const double target = draft >= 0 && draft < vocabulary ? probability(rows, view, row, draft, scratch) : 0.0;
            if (!(uniform(seed, position + index, kAccept) * chance < target)) {
                kind = 2;
                break;
            }
        }
        ++accepted;
    }
    if (threadIdx.x == 0) {
        write(verdict + sequence * 4, finite ? accepted : -1);
        write(verdict + sequence * 4 + 1, first + accepted);
        write(verdict + sequence * 4 + 2, finite ? kind : 0);
        write(verdict + sequence * 4 + 3, finite ? token : -1);
    }
}

// What remains of a target after its draft was refused, id by id.
struct Rest {
    View target, source;
    int certain; // the draft, if it was certain
    bool has_source;

    __device__ double at(int id, double target_weight, double source_weight) const {
        const double p = target_weight / target.total;
        const double q = has_source ? source_weight / source.total : id == certain ? 1.0 : 0.0;
        return p > q ? p - q : 0.0;
    }
};

template <class Visit>
__device__ __forceinline__ void walk_rest(const Rest &rest, int begin, int end, int rank, int source_rank, int *scratch, Visit visit) {
    for (int first = begin; first < end; first += kThreads) {
        const int id = first + threadIdx.x;
        const auto weigh = [&](const View &view, int &base) {
            const float value = id < end ? read(view.logits + id) : 0.0f;
            int own = 0;
            if (view.ties != kAllTies) {
                int all;
                own = base + rank_in_block(id < end && ascending(value) == view.cut, scratch, all);
                base += all;
            }
            return id < end ? view.at(value, own) : 0.0;
        };
        const double target_weight = weigh(rest.target, rank);
        const double source_weight = rest.has_source ? weigh(rest.source, source_rank) : 0.0;
        if (visit(id, id < end ? rest.at(id, target_weight, source_weight) : 0.0)) {
            return;
        }
    }
}

__device__ __forceinline__ Rest rest_of(const Rows &rows, const Rows &draft_rows, const Wishes &wishes, int row, int lane,
                                        int source, int draft, int vocabulary, bool selected) {
    Rest rest;
    rest.target = view_of(rows, wishes, row, lane, vocabulary, selected, true);
    rest.has_source = source >= 0;
    rest.source = rest.has_source ? view_of(draft_rows, wishes, source, lane, vocabulary, selected, true) : rest.target;
    rest.certain = draft;
    return rest;
}

// The mass of the rest, a slice; FP64 [sequences, kSlices]. Grid: (kSlices, sequences).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_rest(const int *sequence_lanes, const int *drafts, const int *sources, Wishes wishes, Rows rows,
                  Rows draft_rows, int vocabulary, int selected, const int *verdict, double *rest_mass) {
    __shared__ double scratch[kWarps];
    __shared__ int ranks[kWarps];
    const int sequence = blockIdx.y, slice = blockIdx.x, lane = read(sequence_lanes + sequence);
    if (lane < 0 || read(verdict + sequence * 4 + 2) != 2) {
        return;
    }
    const int row = read(verdict + sequence * 4 + 1), source = read(sources + row);
    const Rest rest = rest_of(rows, draft_rows, wishes, row, lane, source, read(drafts + row), vocabulary, selected);
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    const int source_rank = rest.has_source ? rank_before(draft_rows, rest.source, source, slice) : 0;
    double mass = 0;
    walk_rest(rest, begin, end, rank_before(rows, rest.target, row, slice), source_rank, ranks, [&](int, double w) {
        mass += w;
        return false;
    });
    mass = block_total(mass, scratch);
    if (threadIdx.x == 0) {
        write(rest_mass + sequence * kSlices + slice, mass);
    }
}

// The first id of a block of kThreads consecutive ones whose running sum, from `running` on, exceeds `goal`; -1: none,
// and `running` moves on. All threads call it; values behind one another are added in the order of the ids' warps.
__device__ __forceinline__ int crossing(int id, double value, double goal, double &running, double *sums, int *found) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double upto = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(kAll, upto, step);
        upto += lane >= step ? other : 0.0;
    }
    __syncthreads();
    if (lane == 31) {
        sums[warp] = upto;
    }
    if (threadIdx.x < kWarps) {
        found[threadIdx.x] = -1;
    }
    __syncthreads();
    double before = running;
    for (int other = 0; other < warp; ++other) {
        before += sums[other];
    }
    const unsigned over = __ballot_sync(kAll, value > 0 && before + upto > goal);
    if (over && lane == 0) {
        found[warp] = id + __ffs(over) - 1;
    }
    for (int other = 0; other < kWarps; ++other) {
        running += sums[other];
    }
    __syncthreads();
    for (int other = 0; other < kWarps; ++other) {
        if (found[other] >= 0) {
            return found[other];
        }
    }
    return -1;
}

// Draws what the verdict asks for. tokens: [sequences, kMaxDrafts + 1], the drafts that stand, then the new one, then
// -1; produced: [sequences], their count, 0 if the logits were not finite; chance: FP64 [sequences], the new token's
// probability (1: greedy); accepted, turns: [lanes] as the delta rule keeps them, or null; seen and answer_counts gain the
// tokens if `counted`. Grid: (sequences).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_draw(const int *sequence_lanes, const long long *positions, const int *drafts, const int *firsts,
                  const int *sources, const long long *seeds, Wishes wishes, Rows rows, Rows draft_rows, int vocabulary,
                  int selected, int purpose, const int *verdict, const double *rest_mass, int *tokens, int *produced,
                  double *chance, int *accepted_of, int *turns, unsigned char *seen, float *answer_counts, int counted) {
    __shared__ double sums[kWarps], slice_masses[kSlices];
    __shared__ int ranks[kWarps], found[kWarps];
    const int sequence = blockIdx.x, lane = read(sequence_lanes + sequence);
    if (lane < 0) {
        return;
    }
    const int accepted = read(verdict + sequence * 4), row = read(verdict + sequence * 4 + 1);
    int kind = read(verdict + sequence * 4 + 2), token = read(verdict + sequence * 4 + 3);
    double likely = 1.0;
    if (kind) {
        const unsigned long long seed = read(seeds + lane), position = read(positions + sequence) + accepted;
        const double random = uniform(seed, position, kind == 2 ? static_cast<unsigned>(kResidual) : purpose);
        const Rest rest = rest_of(rows, draft_rows, wishes, row, lane, kind == 2 ? read(sources + row) : -1,
                                  kind == 2 ? read(drafts + row) : -1, vocabulary, selected);
        const double *slices = kind == 2 ? rest_mass + sequence * kSlices : rows.slice_mass + row * kSlices;
        double total = warp_total(read(slices + threadIdx.x % 32));
        if (kind == 2 && !(total > 0)) { // equal distributions refuse nothing: only rounding leads here
            kind = 1;
            slices = rows.slice_mass + row * kSlices;
            total = rest.target.total;
        }
        if (threadIdx.x < kSlices) {
            slice_masses[threadIdx.x] = read(slices + threadIdx.x);
        }
        __syncthreads();
        const double goal = random * total;
        const int size = (vocabulary + kSlices - 1) / kSlices;
        double running = 0;
        int slice = 0, last = 0; // the slice where the sum exceeds the goal; else the last one that holds any mass
        for (int other = 0; other < kSlices; ++other) {
            last = slice_masses[other] > 0 ? other : last;
        }
        for (; slice < last && !(running + slice_masses[slice] > goal); ++slice) {
            running += slice_masses[slice];
        }
        token = -1;
        int highest = -1; // id with any mass, for a goal that rounding put at the very end
        const int begin = slice * size, end = min(vocabulary, begin + size);
        const int rank = rank_before(rows, rest.target, row, slice);
        const auto look = [&](int id, double w) {
            highest = w > 0 ? id : highest;
            token = crossing(id - threadIdx.x % 32, w, goal, running, sums, found);
            return token >= 0;
        };
        if (kind == 2) {
            const int source_rank = rest.has_source ? rank_before(draft_rows, rest.source, read(sources + row), slice) : 0;
            walk_rest(rest, begin, end, rank, source_rank, ranks, look);
        } else {
            walk(rest.target, begin, end, rank, ranks, look);
        }
        if (token < 0) {
            for (int step = 16; step; step /= 2) {
                highest = max(highest, __shfl_xor_sync(kAll, highest, step));
            }
            __syncthreads();
            if (threadIdx.x % 32 == 0) {
                found[threadIdx.x / 32] = highest;
            }
            __syncthreads();
            for (int warp = 0; warp < kWarps; ++warp) {
                token = max(token, found[warp]);
            }
        }
        likely = probability(rows, rest.target, row, max(token, 0), sums);
    }
    if (threadIdx.x != 0) {
        return;
    }
    int *out = tokens + sequence * (kMaxDrafts + 1);
    const int first = read(firsts + sequence);
    for (int index = 0; index <= kMaxDrafts; ++index) {
        const int id = index < accepted ? read(drafts + first + index) : index == accepted ? token : -1;
        write(out + index, id);
        if (counted && id >= 0 && id < vocabulary) {
            const size_t own = static_cast<size_t>(lane) * vocabulary + id;
            write(seen + own, static_cast<unsigned char>(1));
            write(answer_counts + own, read(answer_counts + own) + 1.0f);
        }
    }
    write(produced + sequence, accepted + 1);
    write(chance + sequence, likely);
    if (accepted_of) {
        write(accepted_of + lane, accepted + 1);
        write(turns + lane, read(turns + lane) ^ 1);
    }
}

// Largest (value, lowest id of equals) of a block among those behind `limit` in that order; id -1: none.
struct Ranked {
    float value;
    int id;
};
__device__ __forceinline__ bool before(Ranked a, Ranked b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

__device__ __forceinline__ Ranked block_first(Ranked own, Ranked *scratch) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const Ranked other = {__shfl_xor_sync(kAll, own.value, step), __shfl_xor_sync(kAll, own.id, step)};
        own = before(other, own) ? other : own;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = own;
    }
    __syncthreads();
    own = scratch[0];
    for (int warp = 1; warp < kWarps; ++warp) {
        own = before(scratch[warp], own) ? scratch[warp] : own;
    }
    return own;
}

// The model's own log-probabilities, first half: of each slice the sum of e^(logit - its largest), and its `best` first
// logits. sums: FP64 [rows, kSlices]; values, ids: [rows, kSlices, max(best, 1)]. Grid: (kSlices, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    logprob_slices(const float *logits, int logits_stride, int vocabulary, int best, double *sums, float *values,
                   int *ids) {
    __shared__ Ranked firsts[kWarps];
    __shared__ double scratch[kWarps];
    const int row = blockIdx.y, slice = blockIdx.x, kept = max(best, 1);
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    const float *own_row = logits + static_cast<size_t>(row) * logits_stride;
    const Ranked none = {__uint_as_float(0xFF800000u), 0x7FFFFFFF};
    Ranked last = {__uint_as_float(0x7F800000u), -1};
    float peak = 0;
    for (int place = 0; place < kept; ++place) {
        Ranked own = none;
        for (int id = begin + threadIdx.x; id < end; id += kThreads) {
            const Ranked here = {read(own_row + id), id};
            if (before(last, here) && before(here, own)) {
                own = here;
            }
        }
        last = block_first(own, firsts);
        peak = place == 0 ? last.value : peak;
        if (threadIdx.x == 0) {
            write(values + (static_cast<size_t>(row) * kSlices + slice) * kept + place, last.value);
            write(ids + (static_cast<size_t>(row) * kSlices + slice) * kept + place, last.id);
        }
    }
    double sum = 0;
    for (int id = begin + threadIdx.x; id < end; id += kThreads) {
        sum += weight(read(own_row + id), peak, 1.0);
    }
    sum = block_total(sum, scratch);
    if (threadIdx.x == 0) {
        write(sums + row * kSlices + slice, sum);
    }
}

// Second half: chosen: FP64 [rows], of tokens [rows] (NaN for one outside of the vocabulary); best_values FP64 and
// best_ids: [rows, best], most likely first. Grid: (rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    logprob_merge(const float *logits, int logits_stride, int vocabulary, int best, const double *sums,
                  const float *values, const int *ids, const int *tokens, double *chosen, double *best_values,
                  int *best_ids) {
    __shared__ Ranked firsts[kWarps];
    const int row = blockIdx.x, kept = max(best, 1);
    const size_t base = static_cast<size_t>(row) * kSlices * kept;
    float peak = read(values + base);
    for (int slice = 1; slice < kSlices; ++slice) {
        peak = fmaxf(peak, read(values + base + slice * kept));
    }
    double total = 0;
    for (int slice = 0; slice < kSlices; ++slice) {
        const double sum = read(sums + row * kSlices + slice);
        total += sum > 0 ? sum * weight(read(values + base + slice * kept), peak, 1.0) : sum;
    }
    const double scale = static_cast<double>(peak) + log(total);
    const Ranked none = {__uint_as_float(0xFF800000u), 0x7FFFFFFF};
    Ranked last = {__uint_as_float(0x7F800000u), -1};
    for (int place = 0; place < best; ++place) {
        Ranked own = none;
        for (int index = threadIdx.x; index < kSlices * kept; index += kThreads) {
            const Ranked here = {read(values + base + index), read(ids + base + index)};
            if (before(last, here) && before(here, own)) {
                own = here;
            }
        }
        last = block_first(own, firsts);
        if (threadIdx.x == 0) {
            write(best_values + row * best + place, static_cast<double>(last.value) - scale);
            write(best_ids + row * best + place, last.id);
        }
    }
    if (threadIdx.x == 0) {
        const int token = read(tokens + row);
        const bool known = token >= 0 && token < vocabulary;
        const float value = known ? read(logits + static_cast<size_t>(row) * logits_stride + token) : 0.0f;
        write(chosen + row, known ? static_cast<double>(value) - scale : 0.0 / 0.0);
    }
}
