// How blocks of sm_80 and newer share a launch: equal runs of turns, wherever they begin and end.
//
// Where a run ends inside of an item, the block hands its warps' unfinished sums to the next block, which goes on with the
// same chains of additions: so the bits are those of one block, whatever the grid. A block computes the item that it hands
// on first, and the one handed to it last, when it has long been there. It waits only for a block before it, which has
// started: launches of any size come to their end.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"
#include "linear_task.cuh"

// Turns of a band, and what one of them counts for: its bytes / 256 (kernels/shares.py has the same).
__device__ __forceinline__ int turn_of(int encoding) { return encoding == kNvfp4 ? Nvfp4::kTurn : Fp8::kTurn; }
__device__ __forceinline__ int turns_of(int encoding, int groups) {
    const int tiles = turn_of(encoding);
    return (groups + tiles - 1) / tiles;
}
__device__ __forceinline__ int cost_of(int encoding) { return encoding == kNvfp4 ? 9 : encoding == kHalf ? 16 : 8; }

constexpr int kToTheEnd = 1 << 30;

// Turns [begin, end) of an item: of its gate, then of its up, for SwiGLU.
struct Span {
    int item, begin, end;
};

// Quotient of numbers below 2^23 by one below 2^15: the compiler's own way takes four times as long.
__device__ __forceinline__ int quotient(int number, int by) {
    int found = static_cast<int>(static_cast<float>(number) * fast_inverse(static_cast<float>(by)));
    const int rest = number - found * by;
    return rest < 0 ? found - 1 : rest >= by ? found + 1 : found;
}

// kMixed: encodings differ, and turns count by their bytes; otherwise each counts for one.
template <bool kMixed> struct Share {
    int first, begin; // the block's first item, and how many of its turns the block before does
    int last, end;    // the item after its last whole one, and how many of its turns it does

    __device__ explicit Share(const Task &task) {
        const int block = blockIdx.x, from = block * task.share + min(block, task.extra);
        locate(task, from, first, begin);
        locate(task, from + task.share + (block < task.extra ? 1 : 0), last, end);
    }

    __device__ void locate(const Task &task, int cost, int &item, int &turn) const {
        item = 0;
        for (int index = 0;; ++index) {
            const int encoding = task.matrix[index].encoding, unit = kMixed ? cost_of(encoding) : 1;
            const int whole = turns_of(encoding, task.groups) * (task.epilogue == kSwiglu ? 2 : 1);
            const bool is_last = !kMixed || index + 1 == task.matrices;
            const int bands = is_last ? 0 : task.matrix[index + 1].first_band - item;
            if (is_last || cost < bands * whole * unit) {
                const int passed = kMixed ? cost / unit : cost, items = quotient(passed, whole);
                item += items;
                turn = passed - items * whole;
                return;
            }
            cost -= bands * whole * unit;
            item += bands;
        }
    }

    __device__ int spans() const { return (end > 0) + last - first; }

    __device__ Span span(int index) const {
        const int handed_on = end > 0, untouched = last - first - (begin > 0);
        if (index < handed_on) {
            return {last, 0, end};
        }
        if (index < handed_on + untouched) {
            return {first + (begin > 0) + index - handed_on, 0, kToTheEnd};
        }
        return {first, begin, kToTheEnd};
    }
};

// The way of one warp through the stretches of its block: runs of turns in one band (or one of two parts, for SwiGLU), of
// which the warp has `count`, from `turn` on, every kWarps-th.
template <bool kMixed> struct Course {
    const Share<kMixed> &share;
    int index, end;         // spans from here on
    int part, parts, turns; // turns: of a band
    Span span;
    int from, to; // of the band, for all warps
    int turn, count;

    __device__ Course(const Share<kMixed> &share, int first, int end, int parts, int turns)
        : share(share), index(first - 1), end(end), part(parts - 1), parts(parts), turns(turns) {
        next();
    }

    __device__ bool done() const { return index >= end; }
    __device__ bool finishes() const { return to == turns; }

    __device__ void next() {
        do {
            if (++part == parts) {
                part = 0;
                if (++index >= end) {
                    count = 0;
                    turn = kToTheEnd / 64; // of no tile
                    return;
                }
                span = share.span(index);
            }
            from = max(span.begin - part * turns, 0);
            to = min(span.end - part * turns, turns);
        } while (from >= to);
        const int warp = threadIdx.x / 32;
        turn = from + (warp - from % kWarps + kWarps) % kWarps;
        count = max(to - turn + kWarps - 1, 0) / kWarps;
    }
};

// What is handed on: 16 bytes for each four sums of each thread, then the gates.
template <int kTiles> struct Handed {
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kSlot = (2 * kTiles * kThreads * 4 + kTiles * kTokens * kRows) / 4; // of 16 bytes
    static constexpr unsigned kNothing = 0xFFFFFFFFu; // a NaN that no sum becomes

    uint4 *slot;

    __device__ Handed(const Task &task, int block) : slot(static_cast<uint4 *>(task.handed) + static_cast<size_t>(block) * kSlot) {}

    __device__ static unsigned word(float value) {
        const unsigned bits = __float_as_uint(value);
        return bits == kNothing ? 0x7FFFFFFFu : bits;
    }

    __device__ void send(int place, float a, float b, float c, float d) {
        store_now(slot + place, {word(a), word(b), word(c), word(d)});
    }

    // Waits for 16 bytes, and leaves the place as it was found.
    __device__ uint4 receive(int place) {
        uint4 found;
        do {
            found = load_now(slot + place);
        } while (found.x == kNothing || found.y == kNothing || found.z == kNothing || found.w == kNothing);
        store_now(slot + place, {kNothing, kNothing, kNothing, kNothing});
        return found;
    }

    // Gates of a SwiGLU whose up goes on elsewhere, `gates[token][row]`: one warp's doing.
    __device__ void send_gates(const Task &task, const float (*gates)[kRows + 1]) {
        for (int index = threadIdx.x % 32; index < task.tokens * 8; index += 32) {
            const float *four = gates[index / 8] + index % 8 * 4;
            send(2 * kTiles * kThreads + index, four[0], four[1], four[2], four[3]);
        }
    }

    __device__ void receive_gates(const Task &task, float (*gates)[kRows + 1]) {
        for (int index = threadIdx.x % 32; index < task.tokens * 8; index += 32) {
            const uint4 found = receive(2 * kTiles * kThreads + index);
            float *four = gates[index / 8] + index % 8 * 4;
            four[0] = __uint_as_float(found.x);
            four[1] = __uint_as_float(found.y);
            four[2] = __uint_as_float(found.z);
            four[3] = __uint_as_float(found.w);
        }
    }

    // Lanes of tokens that there are not have nothing to say.
    __device__ static bool concerned(const Task &task, int tile) {
        return tile * kTokens + static_cast<int>(threadIdx.x % 4) * 2 < task.tokens;
    }

    __device__ void send_sums(const Task &task, const float (&sum)[kTiles][8]) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (concerned(task, tile)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float *four = sum[tile] + 4 * half;
                    send((2 * tile + half) * kThreads + threadIdx.x, four[0], four[1], four[2], four[3]);
                }
            }
        }
    }

    __device__ void receive_sums(const Task &task, float (&sum)[kTiles][8]) {
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            if (concerned(task, tile)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 four = receive((2 * tile + half) * kThreads + threadIdx.x);
                    sum[tile][4 * half] = __uint_as_float(four.x);
                    sum[tile][4 * half + 1] = __uint_as_float(four.y);
                    sum[tile][4 * half + 2] = __uint_as_float(four.z);
                    sum[tile][4 * half + 3] = __uint_as_float(four.w);
                }
            }
        }
    }
};
