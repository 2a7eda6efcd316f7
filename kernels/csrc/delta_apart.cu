// The decoding kernel of the gated delta rule where launches overlap (sm_90 and newer), as delta.cu has it and with its bits, by
// three kinds of warps: those that hold the state, those that prepare what is replayed, and those that prepare this round's
// tokens, which alone wait for the launch before. A warp's scoreboards do not tell one load from another, so what comes at
// different times is asked for by different warps. docs/kernels/delta.md.
#if __CUDA_ARCH__ >= 900
#include "delta_parts.cuh"
#include "shared.cuh"

constexpr int kOldWarps = 4, kNewWarps = 4; // that prepare replayed tokens, and this round's
constexpr int kThreads = 32 * (kWarps + kOldWarps + kNewWarps);
constexpr int kRowsAhead = 8; // kept rows of either half that are asked for before it is known which
constexpr int kSector = 8;    // floats that a cache fetches at least
enum Meeting { kReplayed = 1, kPrepared };

// Where it stands, not behind the next barrier.
template <class T> __device__ __forceinline__ void known_here(T *&pointer) { asm volatile("" : "+l"(pointer)); }

// Asks for what a block reads of a kept row, as a hint: a sector a lane.
__device__ __forceinline__ void ask_for_row(const float *row, const Head &own, int lane) {
    const int sector = lane % 16 * kSector; // of the keys, or of the queries
    prefetch(row + (lane < 16 ? own.key : own.query) - 4 * lane + sector);
    if (lane < 6) {
        prefetch(row + (lane < 4 ? own.value - lane + kSector * lane : own.channels + own.head + (lane - 4) * own.value_heads));
    }
}

// What a round says of its sequences.
struct Tables {
    const int *lanes, *accepted, *turns, *counts, *firsts;

    __device__ __forceinline__ Asked asked(int all_lanes, int lane) const {
        return Asked(all_lanes, lanes, accepted, turns, counts, firsts, lane);
    }
};

__device__ __forceinline__ void hold(const Layer &layer, const Tables &tables, Prepared &tokens, int warp, int lane) {
    const Head own(lane);
    Walk walk(threadIdx.x);
    // Sequence s is mostly lane s; if it is another, the right state is read in place of the guessed one.
    const int guess = min(static_cast<int>(blockIdx.z), layer.all_lanes - 1);
    walk.load(walk.place(layer.state, own, guess));
    const Asked asked = tables.asked(layer.all_lanes, lane);
#pragma unroll 1
    for (int row = warp; row < 2 * kRowsAhead; row += kWarps) {
        const float *half = called_rows(layer.rows, row / kRowsAhead, layer.all_lanes, guess, own.width);
        ask_for_row(half + row % kRowsAhead * own.width, own, lane);
    }
    const Called called(asked, tables.accepted, tables.turns);
    if (called.lane < 0) {
        take_over();
        return;
    }
    float4 *place = walk.place(layer.state, own, called.lane);
    if (called.lane != guess) {
        walk.load(place);
    }
    const int before = called.before, steps = before + called.tokens, stride = own.value_heads * kHead;
    float *answers = layer.out + (static_cast<long long>(called.first) * own.value_heads + own.head) * kHead + own.row + walk.own_row;
    known_here(answers);
    known_here(place);
    if (before > 0) {
        meet<kReplayed>(32 * (kWarps + kOldWarps));
        walk.fetch(tokens, 0);
        walk.replay(tokens, 0, before, before - 1);
        walk.store(place); // after the last accepted token; with none it is there already
    }
    meet<kPrepared>(32 * (kWarps + kNewWarps));
    if (before < steps) {
        walk.fetch(tokens, before);
        walk.answer_to_the_end(tokens, before, steps, answers, stride);
    }
}

// A warp a token; with few tokens two warps share one.
__device__ __forceinline__ void prepare_replayed(const Layer &layer, const Called &called, Prepared &tokens, int warp, int lane) {
    const Head own(lane);
    const float *old_rows = called_rows(layer.rows, called.turn, layer.all_lanes, called.lane, own.width);
    const auto ask_gates = [&](Gates &gates, int step) {
        const float *kept = old_rows + (kKept + step) * own.width + own.channels + own.head;
        gates.ask(layer, own, kept, kept + own.value_heads);
    };
    if (called.before > kOldWarps / 2) {
#pragma unroll 1
        for (int step = warp; step < called.before; step += kOldWarps) {
            Pair pair;
            Gates gates;
            pair.ask(layer, own, Window(old_rows, own.width, step));
            ask_gates(gates, step);
            pair.put(tokens, step, layer.eps, lane);
            gates.put(tokens, step, lane);
        }
    } else if (const int step = warp / 2; step < called.before) {
        if (warp % 2 == 0) {
            Pair pair;
            pair.ask(layer, own, Window(old_rows, own.width, step));
            pair.put(tokens, step, layer.eps, lane);
        } else {
            Gates gates;
            ask_gates(gates, step);
            gates.put(tokens, step, lane);
        }
    }
    meet<kReplayed>(32 * (kWarps + kOldWarps));
}

// This round's tokens.
struct Fresh {
    const Layer &layer;
    const Called &called;
    const Head own;
    const float *old_rows;
    float *new_rows;
    int lane;

    __device__ __forceinline__ Fresh(const Layer &layer, const Called &called, int lane)
        : layer(layer), called(called), own(lane), lane(lane) {
        old_rows = called_rows(layer.rows, called.turn, layer.all_lanes, called.lane, own.width);
        new_rows = called_rows(layer.rows, called.turn + 1, layer.all_lanes, called.lane, own.width);
    }

    __device__ __forceinline__ Window window(int token) const { return Window(layer, old_rows, own.width, called, token); }
    __device__ __forceinline__ float *kept(int token) const { return new_rows + (kKept + token) * own.width; }

    __device__ __forceinline__ void ask(Gates &gates, int token) const {
        const int row = (called.first + token) * layer.x_stride + own.head;
        gates.ask(layer, own, layer.x_a + row, layer.x_b + row);
    }

    __device__ __forceinline__ void put(const Pair &pair, Prepared &tokens, int token) const {
        pair.put(tokens, called.before + token, layer.eps, lane);
        if (own.keeps) {
            write(reinterpret_cast<float4 *>(kept(token) + own.key), pair.key.in[3]);
        }
        write(kept(token) + own.value, pair.in[3]);
    }

    __device__ __forceinline__ void put(const Channels &query, const Gates &gates, Prepared &tokens, int token) const {
        tokens.queries[called.before + token][lane] = query.prepared(layer.eps, kQueryScale);
        gates.put(tokens, called.before + token, lane);
        if (own.keeps) {
            write(reinterpret_cast<float4 *>(kept(token) + own.query), query.in[3]);
        }
        if (lane == 0 && own.first) {
            float *to = kept(token) + own.channels + own.head;
            write(to, gates.a);
            write(to + own.value_heads, gates.b);
        }
    }
};

// A warp a token, all of it asked for at once; with few tokens two warps share one.
__device__ __forceinline__ void prepare_new(const Layer &layer, const Called &called, Prepared &tokens, int warp, int lane) {
    const Fresh fresh(layer, called, lane);
    const Head &own = fresh.own;
    if (called.tokens > kNewWarps / 2) {
#pragma unroll 1
        for (int token = warp; token < called.tokens; token += kNewWarps) {
            const Window window = fresh.window(token);
            Pair pair;
            Channels query;
            Gates gates;
            pair.ask(layer, own, window);
            query.ask(window, layer.weight, own.query);
            fresh.ask(gates, token);
            fresh.put(pair, tokens, token);
            fresh.put(query, gates, tokens, token);
        }
    } else if (const int token = warp / 2; token < called.tokens) {
        const Window window = fresh.window(token);
        if (warp % 2 == 0) {
            Pair pair;
            pair.ask(layer, own, window);
            fresh.put(pair, tokens, token);
        } else {
            Channels query;
            Gates gates;
            query.ask(window, layer.weight, own.query);
            fresh.ask(gates, token);
            fresh.put(query, gates, tokens, token);
        }
    }
    meet<kPrepared>(32 * (kWarps + kNewWarps));
    const Inputs inputs = {layer.x, layer.x_a, layer.x_b, fresh.old_rows, layer.x_stride, called.first, called.before};
    keep_last(fresh.new_rows, inputs, own, warp);
}

// Arguments as of `delta_decode`. The next launch may begin once this one has waited, and must not be of the same layer: nothing
// fences what is kept for the next round.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    delta_decode_apart(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                       const float *a_log, const float *dt_bias, float *rows, float *state, int all_lanes,
                       const int *lanes, const int *accepted, const int *turns, const int *counts, const int *firsts,
                       float *out, float eps) {
    __shared__ Prepared tokens;
    const Layer layer = {x, x_a, x_b, x_stride, weight, a_log, dt_bias, rows, state, all_lanes, out, eps};
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kAll, static_cast<int>(threadIdx.x) / 32, 0); // for all lanes
    const Tables tables = {lanes, accepted, turns, counts, firsts};
    if (warp < kWarps) {
        hold(layer, tables, tokens, warp, lane);
        return;
    }
    const Called called(tables.asked(all_lanes, lane), accepted, turns);
    if (called.lane < 0) {
        take_over();
    } else if (warp < kWarps + kOldWarps) {
        if (called.before > 0) {
            prepare_replayed(layer, called, tokens, warp - kWarps, lane);
        }
    } else {
        take_over();
        prepare_new(layer, called, tokens, warp - kWarps - kOldWarps, lane);
    }
}
#endif
