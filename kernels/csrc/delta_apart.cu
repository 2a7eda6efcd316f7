// The decoding kernel of the gated delta rule where launches overlap (sm_90 and newer), as delta.cu has it and with its bits, by two
// kinds of warps: four hold the state, four prepare tokens meanwhile. A warp's scoreboard does not tell the state's loads from
// its others, so that one that asks for both waits for both. Here the state comes past the registers, and those that hold it
// prepare what they replay, before the launch before has ended; this round's tokens are waited for by the second kind alone.
// docs/kernels/delta.md.
#if __CUDA_ARCH__ >= 900
#include "bulk.cuh"
#include "delta_step.cuh"

constexpr int kThreads = 2 * 32 * kWarps;
enum Meeting { kBoth = 1, kHolding }; // barriers beside that of __syncthreads

// Arguments as of `delta_decode`. The next launch may begin once this one has waited, and must not be of the same layer: nothing
// fences what is kept for the next round.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    delta_decode_apart(const float *x, const float *x_a, const float *x_b, int x_stride, const float *weight,
                       const float *a_log, const float *dt_bias, float *rows, float *state, int all_lanes,
                       const int *lanes, const int *accepted, const int *turns, const int *counts, const int *firsts,
                       float *out, float eps) {
    __shared__ Prepared tokens;
    const int lane = threadIdx.x % 32, number = __shfl_sync(kAll, static_cast<int>(threadIdx.x) / 32, 0); // for all lanes
    const int warp = number % kWarps;
    const bool holds = number < kWarps;
    const Head own(lane);
    Walk walk(threadIdx.x % (32 * kWarps));
    // Sequence s is mostly lane s; if it is another, the right state is ordered in place of the guessed one.
    __shared__ __align__(128) float4 held[kBlockRows * kQuads];
    __shared__ Landing landing;
    const int guess = min(static_cast<int>(blockIdx.z), all_lanes - 1);
    if (threadIdx.x == 0) {
        expect_landings(&landing);
        copy_bulk(held, walk.place(state, own, guess), sizeof held, &landing);
    }
    const Called called(all_lanes, lanes, accepted, turns, counts, firsts, lane);
    const Taps taps(own, weight, a_log, dt_bias);
    if (called.lane < 0) {
        if (threadIdx.x == 0) { // nothing may land in a block that has ended
            await_landing(&landing, 0);
        }
        take_over();
        return;
    }
    const int before = called.before(accepted), turn = called.turn(turns), steps = before + called.tokens;
    const Inputs inputs = {x, x_a, x_b, rows_of(rows, turn, all_lanes, called.lane, own.width), x_stride, called.first, before};
    float *new_rows = rows_of(rows, turn + 1, all_lanes, called.lane, own.width);

    Token in;
    if (!holds) {
        take_over();
#pragma unroll 1
        for (int step = before + warp; step < steps; step += kWarps) {
            in.ask(inputs, own, step);
            tokens.put(in, taps, step, eps, lane);
            keep_token(new_rows, own, step - before, in, lane);
        }
        meet<kBoth>(kThreads);
        keep_last(new_rows, inputs, own, warp);
    } else {
        float4 *place = walk.place(state, own, called.lane);
        if (threadIdx.x == 0 && called.lane != guess) {
            await_landing(&landing, 0);
            copy_bulk(held, place, sizeof held, &landing);
        }
#pragma unroll 1
        for (int step = warp; step < before; step += kWarps) {
            in.ask(inputs, own, step);
            tokens.put(in, taps, step, eps, lane);
        }
        meet<kHolding>(kThreads / 2);
        await_landing(&landing, called.lane != guess);
        walk.take(held);
        if (before > 0) {
            walk.fetch(tokens, 0);
            walk.replay(tokens, 0, before, before - 1);
            walk.store(place); // after the last accepted token; with none it is there already
        }
        meet<kBoth>(kThreads);
        if (before < steps) {
            float *answers = out + (static_cast<size_t>(called.first) * own.value_heads + own.head) * kHead + own.row;
            walk.fetch(tokens, before);
            walk.answer(tokens, before, steps, answers + walk.own_row, own.value_heads * kHead);
        }
    }
}
#endif
