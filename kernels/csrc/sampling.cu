// From logits to distributions without the host: penalties, and the cut by top-k, top-p and min-p. speculation.cu draws.
//
// The vocabulary is cut into kSlices slices of consecutive ids; a block takes one slice of one row. What concerns a whole
// row is put together from the slices in their order by whoever needs it, so nothing depends on timing. Probabilities are
// FP64. The cut is found digit by digit: a logit's bits, made to ascend with its value, are eight digits of four bits,
// and each pass counts and weighs the values of the row that share the digits found so far; rows of a small top-k go by
// short_lists.cu instead. docs/kernels/sampling.md.
#include "short_lists.cuh"

// The keys of what a thread has written of a slice.
struct Written {
    const float *logits;
    int begin, end;

    template <class Visit> __device__ __forceinline__ void operator()(Visit visit) const {
        for (int first = begin + threadIdx.x; first < end; first += kAtOnce * kThreads) {
            float values[kAtOnce];
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const int id = first + n * kThreads;
                values[n] = id < end ? read(logits + id) : 0.0f;
            }
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                const int id = first + n * kThreads;
                visit(id < end ? key_of(values[n], id) : 0);
            }
        }
    }
};

// logits: FP32 [rows, vocabulary ...], rows logits_stride apart. lanes: [rows], -1: none. drafted: [rows, kMaxDrafts],
// the drafts that stand before the row's token, -1 where there are none. seen: [lanes, vocabulary]; answer_counts: FP32
// likewise; bias: FP32 likewise, or null. mask: [rows, mask_words], a bit an id, or null: ids without theirs cannot come.
// open: minus infinity is a logit of a token that cannot come, and nothing broken. listed: kListed, or 0: no short lists;
// firsts: [rows, kListed, kSlices], the first top-k keys of each slice where a row becomes one. Grid: (kSlices, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_adjust(const float *logits, int logits_stride, const int *lanes, const int *drafted,
                    const unsigned char *seen, const float *answer_counts, const float *bias, const unsigned *mask,
                    int mask_words, int open, int listed, Wishes wishes, Rows rows, int vocabulary, Key *firsts) {
    __shared__ Contest<kMostInside> contest;
    __shared__ float peaks[kWarps];
    __shared__ int bests[kWarps];
    const int row = blockIdx.y, slice = blockIdx.x, lane = read(lanes + row);
    if (lane < 0) {
        return;
    }
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    const Penalties penalties(wishes, lane, drafted, row, seen, answer_counts, vocabulary);
    const bool penalised = penalties.any();
    float peak = __uint_as_float(0xFF800000u);
    int best = kNone;
    bool finite = true;
    for (int first = begin + threadIdx.x; first < end; first += kAtOnce * kThreads) {
        float values[kAtOnce], biases[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) { // asked for side by side: their waits overlap
            const int id = first + n * kThreads;
            values[n] = id < end ? read(logits + static_cast<size_t>(row) * logits_stride + id) : 0.0f;
            biases[n] = bias && id < end ? read(bias + static_cast<size_t>(lane) * vocabulary + id) : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const int id = first + n * kThreads;
            if (id >= end) {
                break;
            }
            float value = values[n];
            finite &= is_sound(value, open);
            if (bias) {
                value = value + biases[n];
            }
            if (penalised) {
                value = penalties.on(value, id);
            }
            if (mask && !(read(mask + static_cast<size_t>(row) * mask_words + id / 32) >> id % 32 & 1)) {
                value = __uint_as_float(0xFF800000u);
            }
            write(rows.logits + static_cast<size_t>(row) * vocabulary + id, value);
            if (value > peak || best == kNone) {
                peak = value > peak ? value : peak;
                best = id;
            }
        }
    }
    if (is_listed(wishes, lane, listed)) {
        const int top_k = read(wishes.top_k + lane);
        const float *own = rows.logits + static_cast<size_t>(row) * vocabulary;
        Key *out = firsts + static_cast<size_t>(row) * kListed * kSlices + slice;
        const auto take = [&](int rank, Key key) { write(out + rank * kSlices, key); };
        const int count = first_keys(contest, top_k, best == kNone ? 0 : key_of(peak, best), Written{own, begin, end}, take);
        for (int rank = count + threadIdx.x; rank < top_k; rank += kThreads) {
            write(out + rank * kSlices, Key{0});
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
        if (slice == 0) { // until something is cut
            write(rows.cut + row, 0u);
            write(rows.ties + row, kAllTies);
        }
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

// One pass over a row. by_mass 0: the cut by top-k; 1: by top-p, inside the former (cuts: those were made, where a lane has
// a top-k). Rows that become short lists (top-k up to `listed`) or want no such cut have no part in it. Pass kPasses only
// closes. Grid: (kSlices, rows), pass kPasses: (1, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_select(const int *lanes, Wishes wishes, Rows rows, int vocabulary, int pass, int by_mass, int cuts, int listed) {
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
    if (temperature <= 0 || (by_mass ? top_p >= 1 : top_k <= 0) || is_listed(wishes, lane, listed)) {
        return;
    }
    int best;
    const float peak = row_peak(rows, row, best);
    if (best < 0) {
        return;
    }
    const bool floored = cuts && top_k > 0;
    const unsigned floor = floored ? read(rows.floor + row) : 0;
    double limit = top_k;
    if (by_mass) {
        limit = pass > 1 || floored ? read(rows.limit + row) : -1;
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
    for (int first = begin + threadIdx.x; first < end; first += kAtOnce * kThreads) {
        float values[kAtOnce];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const int id = first + n * kThreads;
            values[n] = id < end ? read(rows.logits + static_cast<size_t>(row) * vocabulary + id) : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            const unsigned key = ascending(values[n]);
            const bool inside = first + n * kThreads < end && key >= floor;
            if (inside && (pass == 0 || key >> (shift + 4) == step.prefix >> (shift + 4))) {
                const int digit = key >> shift & (kDigits - 1);
                const double mass = weight(values[n], peak, temperature);
#pragma unroll
                for (int i = 0; i < kDigits; ++i) {
                    own_counts[i] += digit == i;
                    own_masses[i] += digit == i ? mass : 0.0;
                }
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

// Mass inside the cut, a slice, of rows that are no short lists. Grid: (kSlices, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_mass(const int *lanes, Wishes wishes, Rows rows, int vocabulary, int listed) {
    __shared__ double scratch[kWarps];
    __shared__ int ranks[kWarps];
    const int row = blockIdx.y, slice = blockIdx.x, lane = read(lanes + row);
    if (lane < 0 || read(wishes.temperature + lane) <= 0 || is_listed(wishes, lane, listed)) {
        return;
    }
    const View view = view_of(rows, wishes, row, lane, vocabulary, false);
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    double mass = 0;
    walk(view, begin, end, rank_before(rows, view, row, slice), ranks, [&](int, const double (&weights)[kAtOnce]) {
        mass = added(mass, weights);
        return false;
    });
    mass = block_total(mass, scratch);
    if (threadIdx.x == 0) {
        write(rows.slice_mass + row * kSlices + slice, mass);
    }
}
