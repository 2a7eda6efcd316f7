// From distributions (sampling.cu) to tokens: which drafts stand, what remains where one was refused, and the draw.
#include "sampling.cuh"

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
// distribution, 2 the rest of it), token (greedy) or -1; a row that is not finite: accepted -1. forced: [lanes], or null: how
// many drafts stand whatever the logits say, -1: as they say; the best id follows. Grid: (sequences).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_judge(const int *sequence_lanes, const int *firsts, const int *counts, const long long *positions,
                   const int *drafts, const int *sources, const double *chances, const int *forced,
                   const long long *seeds, Wishes wishes, Rows rows, int vocabulary, int selected, int *verdict) {
    __shared__ double scratch[kWarps];
    const int sequence = blockIdx.x, lane = read(sequence_lanes + sequence);
    if (lane < 0) {
        return;
    }
    const int first = read(firsts + sequence), count = read(counts + sequence);
    const unsigned long long seed = read(seeds + lane), position = read(positions + sequence);
    const int standing = forced ? min(read(forced + lane), count - 1) : -1;
    const bool greedy = standing >= 0 || read(wishes.temperature + lane) <= 0;
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
            if (standing >= 0 ? index == standing : token != draft) {
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
extern "C" __global__ void __launch_bounds__(kThreads, 1)
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
