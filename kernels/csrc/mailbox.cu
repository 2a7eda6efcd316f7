// Exchanges between two ranks: each pushes its words into the other's inbox and waits for the other's words in its own.
//
// A word carries its step, so neither flag nor fence is needed. An inbox has two halves, taken in turn by the parity of
// the step: a rank pushes step s + 2 after a kernel that has seen the peer's step s + 1, which the peer pushed after its
// kernel of step s had ended. The step stands in device memory and is advanced by the kernel, so that a graph's replays
// advance it. A wait that expires poisons the link: from then on nothing is pushed, nothing awaited, and outputs are NaN.
#include "ahead.cuh"
#include "link.cuh"
#include "norm_row.cuh"

constexpr int kBatch = 4;      // words a thread asks for at once
constexpr int kSpins = 32;     // looks between two readings of the clock
constexpr int kCounters = 512; // the largest grid
constexpr unsigned kNothing = 0x7FC00000u;
enum Door : unsigned { kNone, kDelay, kDrop, kStale };

// In device memory, zeroed but for the counters. Every kernel advances all counters, each block those of its own stripe:
// a counter is read by the block that writes it, whatever the grid.
struct State {
    unsigned poisoned;
    unsigned door, door_step, door_ms; // a fault ordered by a test: fires at one step
    unsigned pad[4];
    unsigned steps[kCounters];
};

struct Link {
    Word *inbox;       // [2][slot], written by the peer
    Word *outbox;      // the peer's inbox
    State *state;
    unsigned *expired; // in pinned host memory: the step whose wait expired
    Word budget;       // nanoseconds a wait may take
    unsigned slot;     // words of an inbox half
    int rank;
    int far;           // the inbox is read over PCIe: one thread of a block looks until its words are there
    int early;         // the next launch may begin while words travel
};

struct Turn {
    unsigned step;
    bool dead;
    bool fault; // one is ordered for this step
    Word *out;
    const Word *in;
};

// What comes after a step: 0 marks a word never written, and parity goes on alternating.
__device__ __forceinline__ unsigned following(unsigned step) { return step == 0xFFFFFFFFu ? 2 : step + 1; }

__device__ __forceinline__ Turn begin(const Link &link) {
    const State *state = link.state; // all of it is asked for before any of it is looked at
    const unsigned step = current(state->steps + blockIdx.x), dead = current(&state->poisoned);
    const unsigned door = current(&state->door), door_step = current(&state->door_step);
    const size_t half = static_cast<size_t>(step & 1) * link.slot;
    return {step, dead != 0, door && door_step == step, link.outbox + half, link.inbox + half};
}

__device__ void poison(const Link &link, unsigned step) {
    set(&link.state->poisoned, step);
    set(link.expired, step);
    publish();
}

// A fault that a test has ordered for this step. Returns false if nothing is to be pushed; may change the step sent.
__device__ bool ordered(const State *state, unsigned &sent) {
    const unsigned door = current(&state->door);
    if (door == kDelay && blockIdx.x == 0 && threadIdx.x == 0) {
        const Word start = nanoseconds(), wait = static_cast<Word>(current(&state->door_ms)) * 1000000;
        while (nanoseconds() - start < wait) {
        }
    }
    sent -= door == kStale;
    return door != kDrop;
}

// The step that words are sent with; false if nothing is to be sent. The same for all threads of a block.
__device__ __forceinline__ bool may_send(const Link &link, const Turn &turn, unsigned &sent) {
    sent = turn.step;
    bool open = !turn.dead;
    if (open && turn.fault) {
        open = ordered(link.state, sent);
        __syncthreads();
    }
    return open;
}

// After the message's words: one word more, another one each step, so that no word of an inbox is ever 2^32 steps old
// and passes for a new one.
__device__ __forceinline__ void refresh(const Link &link, const Turn &turn, int words, unsigned sent) {
    const unsigned refreshed = turn.step / 2 % link.slot;
    if (blockIdx.x == 0 && threadIdx.x == 0 && refreshed >= static_cast<unsigned>(words)) {
        push(turn.out + refreshed, 0, sent);
    }
}

// Lets the step go on, once every thread of the block has read it.
__device__ __forceinline__ void advance(const Link &link, const Turn &turn) {
    __syncthreads();
    for (int c = blockIdx.x + threadIdx.x * gridDim.x; c < kCounters; c += gridDim.x * blockDim.x) {
        set(link.state->steps + c, following(turn.step));
    }
}

// Pushes what `payload(i)` gives for i < words, and lets the step go on.
template <class Payload>
__device__ __forceinline__ void send(const Link &link, const Turn &turn, int words, Payload payload) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    unsigned sent;
    if (may_send(link, turn, sent)) {
#pragma unroll 4
        for (int i = first; i < words; i += stride) {
            push(turn.out + i, payload(i), sent);
        }
        refresh(link, turn, words, sent);
    }
    advance(link, turn);
}

__device__ __forceinline__ bool has_come(const Turn &turn, Word word) {
    return static_cast<unsigned>(word >> 32) == turn.step;
}

// Waits for the words `place(k)` of the inbox, k < N, -1 for none; what is missing is looked for in one go, so that N words
// take the time of one. False if the wait expired: then some of `found` are of another step.
template <int N, class Place>
__device__ __forceinline__ bool await(const Link &link, const Turn &turn, Place place, Word (&found)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
        found[k] = place(k) >= 0 ? look(turn.in + place(k)) : 0;
    }
    Word start = 0;
    for (int spin = 1;; ++spin) {
        bool missing = false;
#pragma unroll
        for (int k = 0; k < N; ++k) {
            missing |= place(k) >= 0 && !has_come(turn, found[k]);
        }
        if (!missing) {
            return true;
        }
        if (spin % kSpins == 0) {
            const Word now = nanoseconds();
            start = start ? start : now;
            if (now - start >= link.budget || current(&link.state->poisoned)) {
                poison(link, turn.step);
                return false;
            }
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            if (place(k) >= 0 && !has_come(turn, found[k])) {
                found[k] = look(turn.in + place(k));
            }
        }
    }
}

// Where the inbox is read over PCIe: one thread of the block looks until word `last` is there, and spares the link.
__device__ __forceinline__ void wait_far(const Link &link, const Turn &turn, int last) {
    if (link.far && !turn.dead) {
        if (threadIdx.x == 0) {
            Word word[1];
            await<1>(link, turn, [&](int) { return last; }, word);
        }
        __syncthreads();
    }
}

// Gives `take(i, payload)` the peer's words, or `lose(i)` where they did not come.
template <class Take, class Lose>
__device__ __forceinline__ void receive(const Link &link, const Turn &turn, int words, Take take, Lose lose) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    const int begin = blockIdx.x * blockDim.x;
    if (begin < words) {
        wait_far(link, turn, begin + (words - 1 - begin) / stride * stride);
    }
    for (int base = first; base < words; base += kBatch * stride) {
        Word found[kBatch];
        const auto place = [&](int k) { return base + k * stride < words ? base + k * stride : -1; };
        if (!turn.dead) {
            await<kBatch>(link, turn, place, found);
        }
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
            if (place(k) >= 0) {
                if (!turn.dead && has_come(turn, found[k])) {
                    take(place(k), static_cast<unsigned>(found[k]));
                } else {
                    lose(place(k));
                }
            }
        }
    }
}

__device__ __forceinline__ float2 both(unsigned pair) { return {half_value(pair & 0xFFFF), half_value(pair >> 16)}; }

// Rank 0's two values and rank 1's, added in this order.
__device__ __forceinline__ float2 joined(int rank, unsigned own, unsigned other) {
    const float2 first = both(rank ? other : own), second = both(rank ? own : other);
    return {first.x + second.x, first.y + second.y};
}

// Where launches overlap. Steps, parts and what the launch before has written are read behind it: so a rank pushes a step
// after its kernels of all earlier steps have ended, as if launches took turns.
__device__ __forceinline__ void await_turn(const Link &link) {
    await_previous();
    if (link.early) {
        admit_next();
    }
}

// part: fp16 pairs [words]; out: FP32 pairs [words], rank 0's part + rank 1's.
extern "C" __global__ void mailbox_reduce(Link link, const unsigned *part, float2 *out, int words) {
    await_turn(link);
    const Turn turn = begin(link);
    send(link, turn, words, [&](int i) { return read(part + i); });
    const float lost = __uint_as_float(kNothing);
    receive(
        link, turn, words, [&](int i, unsigned other) { write(out + i, joined(link.rank, read(part + i), other)); },
        [&](int i) { write(out + i, float2{lost, lost}); });
}

// One block a row: x += rank 0's part + rank 1's, in place; then half_out = RMSNorm(x), as `rms_norm` has it with a delta.
// Blocks behind those ask for what the next launch reads, while words travel.
// part: fp16 [T, columns]; x: FP32 [T, columns], one row every x_stride; half_out: fp16 likewise.
extern "C" __global__ void __launch_bounds__(kRowThreads, 1)
    mailbox_reduce_norm(Link link, const uint2 *part, float *x, int x_stride, const float *weight,
                        unsigned short *half_out, int half_stride, int *overflows, int rows, int columns, float eps,
                        Ahead ahead) {
    __shared__ __align__(16) float scratch[kRowWarps];
    const int row = blockIdx.x, quads = columns / 4, words = 2 * quads;
    if (link.early) { // a product comes next, whose weights can come while words travel
        admit_next();
    }
    await_previous(); // no block asks before: until then the launch before keeps the memory busy
    const Turn turn = begin(link);
    if (row >= rows) {
        advance(link, turn);
        const Word *last = turn.in + rows * words - 1; // once it is there, asking would only make the launch longer
        ask_ahead(ahead, row - rows, gridDim.x - rows,
                  [&] { return !link.far && (turn.dead || has_come(turn, look(last))); });
        return;
    }
    const size_t base = static_cast<size_t>(row) * words; // a row's first pairs of each quad, then its second ones
    const uint2 *own = part + static_cast<size_t>(row) * quads;
    float4 *stream = reinterpret_cast<float4 *>(x + static_cast<size_t>(row) * x_stride);
    uint2 mine[kRowQuads];
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        const int quad = k * blockDim.x + threadIdx.x;
        mine[k] = quad < quads ? read(own + quad) : uint2{};
    }
    unsigned sent;
    if (may_send(link, turn, sent)) {
#pragma unroll
        for (int k = 0; k < kRowQuads; ++k) {
            const int quad = k * blockDim.x + threadIdx.x;
            if (quad < quads) {
                push(turn.out + base + quad, mine[k].x, sent);
                push(turn.out + base + quads + quad, mine[k].y, sent);
            }
        }
        refresh(link, turn, rows * words, sent);
    }
    float4 values[kRowQuads], weights[kRowQuads]; // they come while the words travel
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        const int quad = k * blockDim.x + threadIdx.x;
        values[k] = quad < quads ? read(stream + quad) : float4{};
        weights[k] = quad < quads ? __ldg(reinterpret_cast<const float4 *>(weight) + quad) : float4{};
    }
    advance(link, turn);
    const float lost = __uint_as_float(kNothing);
    wait_far(link, turn, static_cast<int>(base) + words - 1);
    Word found[2 * kRowQuads];
    const auto place = [&](int k) {
        const int quad = k / 2 * blockDim.x + threadIdx.x;
        return quad < quads ? static_cast<int>(base) + (k & 1) * quads + quad : -1;
    };
    if (!turn.dead) {
        await<2 * kRowQuads>(link, turn, place, found);
    }
#pragma unroll
    for (int k = 0; k < kRowQuads; ++k) {
        const int quad = k * blockDim.x + threadIdx.x;
        if (quad < quads) {
            float2 a = {lost, lost}, b = {lost, lost};
            if (!turn.dead && has_come(turn, found[2 * k]) && has_come(turn, found[2 * k + 1])) {
                a = joined(link.rank, mine[k].x, static_cast<unsigned>(found[2 * k]));
                b = joined(link.rank, mine[k].y, static_cast<unsigned>(found[2 * k + 1]));
            }
            values[k] = {values[k].x + a.x, values[k].y + a.y, values[k].z + b.x, values[k].w + b.y};
            write(stream + quad, values[k]);
        }
    }
    normalise_row<false>(OneBlock(), values, weights, quads, eps, half_out + static_cast<size_t>(row) * half_stride, nullptr,
                  overflows ? overflows + row : nullptr, scratch, [](int) {});
}

// part: FP32 [rows, columns], one row every part_stride; out: FP32 [rows, 2 columns], one row every out_stride: rank 0's
// columns, then rank 1's.
extern "C" __global__ void mailbox_gather(Link link, const float *part, int part_stride, float *out, int out_stride,
                                          int rows, int columns) {
    await_turn(link);
    const Turn turn = begin(link);
    const int words = rows * columns;
    float *own = out + link.rank * columns, *others = out + (1 - link.rank) * columns;
    send(link, turn, words, [&](int i) {
        const int row = i / columns, column = i - row * columns;
        const float value = read(part + static_cast<size_t>(row) * part_stride + column);
        write(own + static_cast<size_t>(row) * out_stride + column, value);
        return __float_as_uint(value);
    });
    const auto put = [&](int i, unsigned bits) {
        const int row = i / columns, column = i - row * columns;
        write(others + static_cast<size_t>(row) * out_stride + column, __uint_as_float(bits));
    };
    receive(link, turn, words, put, [&](int i) { put(i, kNothing); });
}

__device__ __forceinline__ bool aligned(const void *address) { return reinterpret_cast<size_t>(address) % 16 == 0; }

// Four pairs at a time where they stand at multiples of 16 bytes, then what is left.
template <class Pair> __device__ __forceinline__ void add(Pair pair, const unsigned *a, const unsigned *b, float2 *out, int words) {
    const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    const auto *a4 = reinterpret_cast<const uint4 *>(a), *b4 = reinterpret_cast<const uint4 *>(b);
    const int quads = aligned(a) && aligned(b) && aligned(out) ? words / 4 : 0;
    for (int i = first; i < quads; i += stride) {
        const uint4 x = read(a4 + i), y = read(b4 + i);
        const float2 s = pair(x.x, y.x), t = pair(x.y, y.y), u = pair(x.z, y.z), v = pair(x.w, y.w);
        write(reinterpret_cast<float4 *>(out) + 2 * i, float4{s.x, s.y, t.x, t.y});
        write(reinterpret_cast<float4 *>(out) + 2 * i + 1, float4{u.x, u.y, v.x, v.y});
    }
    for (int i = 4 * quads + first; i < words; i += stride) {
        write(out + i, pair(read(a + i), read(b + i)));
    }
}

// out = first + second in FP32, fp16 pairs [words]: what an exchange of whole parts leaves to do.
extern "C" __global__ void mailbox_add(const unsigned *first, const unsigned *second, float2 *out, int words) {
    add([](unsigned x, unsigned y) { return joined(0, x, y); }, first, second, out, words);
}

// As `mailbox_reduce` of a part that the peer has copied to `other` in whole, after `mailbox_meet`.
extern "C" __global__ void mailbox_join(Link link, const unsigned *part, const unsigned *other, float2 *out, int words) {
    const bool dead = current(&link.state->poisoned) != 0;
    const float lost = __uint_as_float(kNothing);
    add([&](unsigned x, unsigned y) { return dead ? float2{lost, lost} : joined(link.rank, x, y); }, part, other, out,
        words);
}

// A word each way: what the peer had put on its stream before has been done. One warp, which leaves a card to others.
extern "C" __global__ void mailbox_meet(Link link) {
    const Turn turn = begin(link);
    send(link, turn, 1, [](int) { return 0u; });
    receive(link, turn, 1, [](int, unsigned) {}, [](int) {});
}

// Takes `duration` nanoseconds: a rank that comes late, for a measurement.
extern "C" __global__ void mailbox_linger(int duration) {
    const Word start = nanoseconds();
    while (nanoseconds() - start < static_cast<Word>(duration)) {
    }
}
