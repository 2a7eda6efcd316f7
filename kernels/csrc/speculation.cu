// From distributions (sampling.cu) to tokens: which drafts stand, what remains where one was refused, and the draw.
#include "short_lists.cuh"

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

// Sequence s of lane lanes[s] has rows firsts[s] .. + counts[s] - 1 and counts[s] - 1 drafts: by row, in `drafts` [rows]
// (the last row's unused); sources [rows]: the draft's own row of `draft_rows`, -1: it was certain; chances FP64 [rows]: its
// probability there. positions: of the first row's token. forced [lanes], or null: how many drafts stand whatever the
// logits say, -1: as they say; the best id follows.
struct Sequences {
    const int *lanes, *firsts, *counts;
    const long long *positions;
    const int *drafts, *sources;
    const double *chances;
    const int *forced;
    const long long *seeds;
};

// How many drafts stand (-1: a row is not finite), the row that the last token comes from, what to draw (0 nothing, 1 its
// distribution, 2 the rest of it), and the token of a greedy lane, or -1.
struct Verdict {
    int accepted, row, kind, token;
};

// All threads call it; kWhole false: every lane that draws is listed.
template <bool kWhole>
__device__ __forceinline__ Verdict judged(const Sequences &all, int sequence, int lane, const Wishes &wishes, const Rows &rows,
                                          int vocabulary, int listed) {
    static_assert(kMaxDrafts < kWarps, "a row a warp");
    __shared__ double scratch[kWarps], targets[kWarps];
    __shared__ int bests[kWarps];
    const int first = read(all.firsts + sequence), count = read(all.counts + sequence), warp = threadIdx.x / 32;
    const unsigned long long seed = read(all.seeds + lane), position = read(all.positions + sequence);
    const int standing = all.forced ? min(read(all.forced + lane), count - 1) : -1;
    const bool greedy = standing >= 0 || read(wishes.temperature + lane) <= 0, by_list = is_listed(wishes, lane, listed);
    if (warp < count) {
        int best;
        row_peak(rows, first + warp, best);
        const bool wanted = by_list && !greedy && warp + 1 < count;
        const double target = wanted ? List(rows, first + warp).probability(read(all.drafts + first + warp)) : 0.0;
        if (threadIdx.x % 32 == 0) {
            bests[warp] = best;
            targets[warp] = target;
        }
    }
    __syncthreads();
    bool finite = true;
    for (int index = 0; index < count; ++index) {
        finite &= bests[index] >= 0;
    }
    int accepted = 0, kind = greedy ? 0 : 1, token = -1;
    for (int index = 0; finite && index < count; ++index) {
        const int row = first + index, draft = index + 1 < count ? read(all.drafts + row) : -1;
        if (greedy) {
            token = bests[index];
            if (standing >= 0 ? index == standing : token != draft) {
                break;
            }
        } else {
            if (index + 1 == count) {
                break;
            }
            double target = targets[index];
            if (kWhole && !by_list) {
                const View view = view_of(rows, wishes, row, lane, vocabulary, true);
                target = draft >= 0 && draft < vocabulary ? probability(rows, view, row, draft, scratch) : 0.0;
            }
            const double chance = read(all.sources + row) < 0 ? 1.0 : read(all.chances + row);
            if (!(uniform(seed, position + index, kAccept) * chance < target)) {
                kind = 2;
                break;
            }
        }
        ++accepted;
    }
    Verdict found;
    found.accepted = finite ? accepted : -1;
    found.row = finite ? first + accepted : first;
    found.kind = finite ? kind : 0;
    found.token = finite ? token : -1;
    return found;
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
    for (int id = begin + threadIdx.x; id - static_cast<int>(threadIdx.x) < end; id += kAtOnce * kThreads) {
        float values[kAtOnce], source_values[kAtOnce] = {};
        double weights[kAtOnce], source_weights[kAtOnce] = {};
        rest.target.load(values, id, end);
        if (rest.has_source) {
            rest.source.load(source_values, id, end);
            rest.source.weigh(source_weights, source_values, id, end, source_rank, scratch);
        }
        rest.target.weigh(weights, values, id, end, rank, scratch);
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            weights[n] = id + n * kThreads < end ? rest.at(id + n * kThreads, weights[n], source_weights[n]) : 0.0;
        }
        if (visit(id, weights)) {
            return;
        }
    }
}

__device__ __forceinline__ Rest rest_of(const Rows &rows, const Rows &draft_rows, const Wishes &wishes, int row, int lane,
                                        int source, int draft, int vocabulary) {
    Rest rest;
    rest.target = view_of(rows, wishes, row, lane, vocabulary, true);
    rest.has_source = source >= 0;
    rest.source = rest.has_source ? view_of(draft_rows, wishes, source, lane, vocabulary, true) : rest.target;
    rest.certain = draft;
    return rest;
}

// Judges, and takes the mass of the rest, a slice: rest_mass FP64 [sequences, kSlices], where a whole row's draft was refused.
// verdict: [sequences, 4], see Verdict. Grid: (kSlices, sequences).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sampling_rest(Sequences all, Wishes wishes, Rows rows, Rows draft_rows, int vocabulary, int listed, int *verdict,
                  double *rest_mass) {
    __shared__ double scratch[kWarps];
    __shared__ int ranks[kWarps];
    const int sequence = blockIdx.y, slice = blockIdx.x, lane = read(all.lanes + sequence);
    if (lane < 0) {
        return;
    }
    const Verdict found = judged<true>(all, sequence, lane, wishes, rows, vocabulary, listed);
    if (slice == 0 && threadIdx.x == 0) {
        write(verdict + sequence * 4, found.accepted);
        write(verdict + sequence * 4 + 1, found.row);
        write(verdict + sequence * 4 + 2, found.kind);
        write(verdict + sequence * 4 + 3, found.token);
    }
    if (found.kind != 2 || is_listed(wishes, lane, listed)) {
        return;
    }
    const int row = found.row, source = read(all.sources + row);
    const Rest rest = rest_of(rows, draft_rows, wishes, row, lane, source, read(all.drafts + row), vocabulary);
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    const int source_rank = rest.has_source ? rank_before(draft_rows, rest.source, source, slice) : 0;
    double mass = 0;
    walk_rest(rest, begin, end, rank_before(rows, rest.target, row, slice), source_rank, ranks, [&](int, const double (&weights)[kAtOnce]) {
        mass = added(mass, weights);
        return false;
    });
    mass = block_total(mass, scratch);
    if (threadIdx.x == 0) {
        write(rest_mass + sequence * kSlices + slice, mass);
    }
}

// The first of kAtOnce * kThreads consecutive ids whose running sum, from `running` on, exceeds `goal`; -1: none, and
// `running` moves on. `id`: of the thread's first value; the others are kThreads apart. Values behind one another are added in
// the order of the ids' warps. sums, found: [kAtOnce * kWarps] of shared memory. All threads call it.
__device__ __forceinline__ int crossing(int id, const double (&values)[kAtOnce], double goal, double &running, double *sums,
                                        int *found) {
    static_assert(kAtOnce * kWarps == 32, "a place a lane");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    double upto[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
        upto[n] = values[n];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const double other = __shfl_up_sync(kAll, upto[n], step);
            upto[n] += lane >= step ? other : 0.0;
        }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
        if (lane == 31) {
            sums[n * kWarps + warp] = upto[n];
        }
    }
    __syncthreads();
    double befores[kAtOnce];
#pragma unroll
    for (int place = 0; place < kAtOnce * kWarps; ++place) {
        befores[place / kWarps] = place % kWarps == warp ? running : befores[place / kWarps];
        running += sums[place];
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
        const unsigned over = __ballot_sync(kAll, values[n] > 0 && befores[n] + upto[n] > goal);
        if (lane == 0) {
            found[n * kWarps + warp] = over ? id + n * kThreads + __ffs(over) - 1 : -1;
        }
    }
    __syncthreads();
    const int own = found[lane];
    const unsigned any = __ballot_sync(kAll, own >= 0);
    return any ? __shfl_sync(kAll, own, __ffs(any) - 1) : -1;
}

// Where a sequence's tokens go. tokens: [sequences, kMaxDrafts + 1], the drafts that stand, then the new one, then -1;
// produced: [sequences], their count, 0 if the logits were not finite; chance: FP64 [sequences], the new token's
// probability (1: greedy); accepted, turns: [lanes] as the delta rule keeps them, or null; seen and answer_counts gain the
// tokens if `counted`.
struct Answers {
    int *tokens, *produced;
    double *chance;
    int *accepted, *turns;
    unsigned char *seen;
    float *answer_counts;
};

__device__ __forceinline__ void conclude(const Answers &out, const Sequences &all, int sequence, int lane, int vocabulary,
                                         int accepted, int token, double likely, int counted) {
    if (threadIdx.x != 0) {
        return;
    }
    int *own_tokens = out.tokens + sequence * (kMaxDrafts + 1);
    const int first = read(all.firsts + sequence);
    for (int index = 0; index <= kMaxDrafts; ++index) {
        const int id = index < accepted ? read(all.drafts + first + index) : index == accepted ? token : -1;
        write(own_tokens + index, id);
        if (counted && id >= 0 && id < vocabulary) {
            const size_t own = static_cast<size_t>(lane) * vocabulary + id;
            write(out.seen + own, static_cast<unsigned char>(1));
            write(out.answer_counts + own, read(out.answer_counts + own) + 1.0f);
        }
    }
    write(out.produced + sequence, accepted + 1);
    write(out.chance + sequence, likely);
    if (out.accepted) {
        write(out.accepted + lane, accepted + 1);
        write(out.turns + lane, read(out.turns + lane) ^ 1);
    }
}

__device__ __forceinline__ double random_of(const Sequences &all, int sequence, int lane, const Verdict &verdict, int purpose) {
    const unsigned long long seed = read(all.seeds + lane), position = read(all.positions + sequence) + verdict.accepted;
    return uniform(seed, position, verdict.kind == 2 ? static_cast<unsigned>(kResidual) : purpose);
}

// The token of a lane whose rows are short lists, and its probability.
__device__ __forceinline__ int drawn_from_lists(const Sequences &all, const Rows &rows, const Rows &draft_rows,
                                                const Verdict &verdict, double random, double &likely) {
    __shared__ double rest[kListed];
    const List target(rows, verdict.row);
    int token = -1;
    if (verdict.kind == 2) {
        const int source = read(all.sources + verdict.row);
        const int draft = read(all.drafts + verdict.row);
        token = source < 0 ? drawn_from_rest(target, Certain{draft}, random, rest)
                           : drawn_from_rest(target, List(draft_rows, source), random, rest);
    }
    token = token < 0 ? drawn_from(target, random) : token; // equal distributions refuse nothing: only rounding leads here
    likely = target.probability(token);
    return token;
}

// A round whose lanes are greedy or listed, judged and drawn in one. Grid: (sequences).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_settle(Sequences all, Wishes wishes, Rows rows, Rows draft_rows, int vocabulary, int listed, int purpose,
                    Answers out, int counted) {
    const int sequence = blockIdx.x, lane = read(all.lanes + sequence);
    if (lane < 0) {
        return;
    }
    const Verdict verdict = judged<false>(all, sequence, lane, wishes, rows, vocabulary, listed);
    int token = verdict.token;
    double likely = 1.0;
    if (verdict.kind) {
        const double random = random_of(all, sequence, lane, verdict, purpose);
        token = drawn_from_lists(all, rows, draft_rows, verdict, random, likely);
    }
    conclude(out, all, sequence, lane, vocabulary, verdict.accepted, token, likely, counted);
}

// Draws what the verdict asks for. Grid: (sequences).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sampling_draw(Sequences all, Wishes wishes, Rows rows, Rows draft_rows, int vocabulary, int listed, int purpose,
                  const int *verdicts, const double *rest_mass, Answers out, int counted) {
    __shared__ double sums[kAtOnce * kWarps], slice_masses[kSlices];
    __shared__ int ranks[kWarps], found[kAtOnce * kWarps];
    const int sequence = blockIdx.x, lane = read(all.lanes + sequence);
    if (lane < 0) {
        return;
    }
    const int *own_verdict = verdicts + sequence * 4;
    const Verdict verdict = {read(own_verdict), read(own_verdict + 1), read(own_verdict + 2), read(own_verdict + 3)};
    const int row = verdict.row;
    int kind = verdict.kind, token = verdict.token;
    double likely = 1.0;
    const double random = kind ? random_of(all, sequence, lane, verdict, purpose) : 0.0;
    if (kind && is_listed(wishes, lane, listed)) {
        token = drawn_from_lists(all, rows, draft_rows, verdict, random, likely);
    } else if (kind) {
        const int source = kind == 2 ? read(all.sources + row) : -1;
        const Rest rest = rest_of(rows, draft_rows, wishes, row, lane, source, kind == 2 ? read(all.drafts + row) : -1, vocabulary);
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
        const auto look = [&](int id, const double (&weights)[kAtOnce]) {
#pragma unroll
            for (int n = 0; n < kAtOnce; ++n) {
                highest = weights[n] > 0 ? id + n * kThreads : highest;
            }
            token = crossing(id - threadIdx.x % 32, weights, goal, running, sums, found);
            return token >= 0;
        };
        if (kind == 2) {
            const int source_rank = rest.has_source ? rank_before(draft_rows, rest.source, source, slice) : 0;
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
    conclude(out, all, sequence, lane, vocabulary, verdict.accepted, token, likely, counted);
}
