// Runs CUDA kernels on the host: a fiber a CUDA thread, one block after another, all in one thread of the system.
// Every access to global memory is checked against the buffers of the call. Tensor-core products follow the fragment
// tables of the PTX ISA. Stands in for half.cuh, volta.cuh, ampere.cuh, warp_product.cuh and shared.cuh.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { int x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
alignas(16) static unsigned char dynamic_shared[1 << 18];
#define DYNAMIC_SHARED(name) unsigned char *name = dynamic_shared

constexpr int kMaxThreads = 1024;
constexpr size_t kStack = 1 << 17;

struct Barrier { int expected = 0, arrived = 0; unsigned generation = 0; bool awaited = false; };
struct Fiber {
    jmp_buf place;
    ucontext_t entry;
    std::unique_ptr<char[]> stack;
    bool started = false, done = false;
    Barrier *waiting = nullptr;
    unsigned generation = 0;
    unsigned parity = 0;
    bool awaited = false;
};
static Fiber fibers[kMaxThreads];
static jmp_buf scheduler;
static int running;
static Barrier block_barrier, warp_barriers[kMaxThreads / 32], named_barriers[16], cluster_barrier;
static void (*body)(const void *);
static const void *body_argument;

struct Range { const char *begin, *end; };
static const Range *ranges;
static int range_count, stray;

// What a kernel does before it waits for the launch before it: which buffers it reads and writes, a bit each; accesses to
// what that launch writes (`fresh`); and threads that end without having waited.
struct Early { uint64_t read, written; int fresh, never; };
static Early early;
static bool block_awaited;
static std::vector<Range> fresh;
extern "C" void overlap_report(Early *found) { *found = early; }
extern "C" void overlap_fresh(const Range *written, int count) { fresh.assign(written, written + count); }
inline void note(uint64_t &buffers, const char *begin, size_t bytes, int buffer) {
    if (!fibers[running].awaited) {
        buffers |= uint64_t(1) << buffer;
        for (const Range &range : fresh) {
            early.fresh += begin < range.end && begin + bytes > range.begin;
        }
    }
}

inline bool inside(const void *address, size_t bytes, uint64_t &buffers = early.read) {
    const char *begin = static_cast<const char *>(address);
    for (int i = 0; i < range_count; ++i) {
        if (begin >= ranges[i].begin && begin + bytes <= ranges[i].end) {
            note(buffers, begin, bytes, i);
            return reinterpret_cast<uintptr_t>(address) % std::min<size_t>(bytes, 16) == 0; // a GPU faults on others
        }
    }
    return false;
}
template <class T> T read(const T *address) {
    if (inside(address, sizeof(T))) {
        return *address;
    }
    ++stray;
    return T{};
}
template <class T> T stream(const T *address) { return read(address); }
template <class T> T read_here(const T *address) { return read(address); }
template <class T> T __ldg(const T *address) { return read(address); }
template <class T> T __ldcs(const T *address) { return read(address); }
template <class T> void write(T *address, T value) {
    if (inside(address, sizeof(T), early.written)) {
        *address = value;
    } else {
        ++stray;
    }
}

// A hint, which a card ignores outside of memory: here it must be inside all the same. Lines asked for since the kernel began.
static std::vector<uint64_t> asked;
inline void prefetch(const void *address) {
    stray += !inside(address, 1);
    asked.push_back(reinterpret_cast<uint64_t>(address));
}
extern "C" int prefetched(uint64_t *found, int most) {
    std::copy_n(asked.begin(), std::min<size_t>(most, asked.size()), found);
    return static_cast<int>(asked.size());
}

inline int atomicAdd(int *shared, int value) { return std::exchange(*shared, *shared + value); } // of shared memory
inline void add(int *address, int value) { write(address, read(address) + value); }

inline void arrive(Barrier &barrier) {
    if (++barrier.arrived == barrier.expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
}
inline void wait(Barrier &barrier) {
    Fiber &self = fibers[running];
    self.waiting = &barrier;
    self.generation = barrier.generation;
    barrier.awaited |= self.awaited; // who meets a thread that has waited need not wait
    arrive(barrier);
    if (barrier.generation == self.generation && !_setjmp(self.place)) {
        _longjmp(scheduler, 1);
    }
    self.waiting = nullptr;
    self.awaited |= barrier.awaited;
}
inline void __syncthreads() { wait(block_barrier); }
template <int id> void meet(int threads) {
    named_barriers[id].expected = threads;
    wait(named_barriers[id]);
}
inline void __syncwarp(unsigned = ~0u) { wait(warp_barriers[running / 32]); }

static char slots[2][kMaxThreads][64];
// What `value` is in lane `lane` of the warp; slots alternate, so that one barrier is enough.
template <class T> const T *published(const T &value) {
    Fiber &self = fibers[running];
    char (*own)[64] = slots[self.parity++ % 2] + running / 32 * 32;
    static_assert(sizeof(T) <= 64, "slot");
    std::memcpy(own[threadIdx.x % 32], &value, sizeof(T));
    __syncwarp();
    return reinterpret_cast<const T *>(own);
}
template <class T> T lane_value(const T *base, int lane) {
    T value;
    std::memcpy(&value, reinterpret_cast<const char *>(base) + 64 * (lane & 31), sizeof(T));
    return value;
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
    return lane_value(published(value), (threadIdx.x % 32) ^ mask);
}
template <class T> T __shfl_sync(unsigned, T value, int lane) { return lane_value(published(value), lane); }
template <class T> T __shfl_up_sync(unsigned, T value, int by) {
    const int lane = threadIdx.x % 32;
    return lane_value(published(value), lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned, bool predicate) {
    const bool *all = published(predicate);
    unsigned bits = 0;
    for (int lane = 0; lane < 32; ++lane) {
        bits |= unsigned(lane_value(all, lane)) << lane;
    }
    return bits;
}
inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) {
    volatile float product = a * b; // not fused with what follows
    return product;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    }
    return result;
}

inline float half_value(unsigned bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    float size = exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp(float(mantissa), -24);
    if (exponent == 31) {
        size = mantissa ? NAN : INFINITY;
    }
    return bits & 0x8000 ? -size : size;
}
inline unsigned half_bits(float value) {
    const unsigned sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) {
        return 0x7FFF;
    }
    if (std::fabs(value) >= 65520.0f) {
        return sign | 0x7C00;
    }
    const int exponent = value == 0 ? -14 : std::max(std::ilogb(value), -14);
    const unsigned mantissa = unsigned(std::nearbyint(std::ldexp(std::fabs(value), 10 - exponent)));
    return sign | (unsigned(exponent + 14) * 1024 + mantissa); // the hidden bit adds one to the exponent
}
inline unsigned half_pair(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
inline void await_previous() { fibers[running].awaited = true; }
inline void admit_next() {}
inline void take_over() { await_previous(); }
inline float fast_inverse(float value) { return 1.0f / value; }
inline float fast_inverse_root(float value) { return 1.0f / std::sqrt(value); }
inline float fast_exp2(float value) { return std::exp2(value); }
template <class F> unsigned by_halves(unsigned a, unsigned b, F f) {
    return half_bits(f(half_value(a & 0xFFFF), half_value(b & 0xFFFF))) |
           half_bits(f(half_value(a >> 16), half_value(b >> 16))) << 16;
}
inline unsigned subtract_pairs(unsigned a, unsigned b) { return by_halves(a, b, [](float x, float y) { return x - y; }); }
inline unsigned multiply_pairs(unsigned a, unsigned b) { return by_halves(a, b, [](float x, float y) { return x * y; }); }

inline unsigned permute(unsigned a, unsigned b, unsigned selector) { return __byte_perm(a, b, selector); }
inline unsigned chosen(unsigned mask, unsigned a, unsigned b) { return (a & mask) | (b & ~mask); }
inline unsigned both_lower(unsigned pair) { return (pair & 0xFFFF) * 0x10001u; }
inline unsigned both_upper(unsigned pair) { return (pair >> 16) * 0x10001u; }
inline unsigned e4m3_half(unsigned byte) { // not a NaN code
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(float(mantissa), -9);
    return half_bits(byte & 0x80 ? -size : size);
}
inline unsigned e4m3_pair(unsigned short bytes) { return e4m3_half(bytes & 0xFF) | e4m3_half(bytes >> 8) << 16; }

struct Fragment { unsigned a[4], b[2]; };
inline float element(const unsigned *pairs, int index) { return half_value(pairs[index / 2] >> 16 * (index % 2) & 0xFFFF); }

inline void multiply_accumulate(float (&sum)[8], unsigned a0, unsigned a1, unsigned b0, unsigned b1) {
    const Fragment *all = published(Fragment{{a0, a1}, {b0, b1}});
    const int lane = threadIdx.x % 32, upper = lane < 16 ? 0 : 4, quads = lane / 4 % 4 * 4;
    for (int i = 0; i < 8; ++i) {
        const int row = (lane & 1) + (i & 2) + upper, column = (i & 4) + (lane & 2) + (i & 1);
        const Fragment left = lane_value(all, quads + row % 4 + row / 4 * 16);
        const Fragment right = lane_value(all, quads + column % 4 + column / 4 * 16);
        double total = sum[i];
        for (int k = 0; k < 4; ++k) {
            total += double(element(left.a, k)) * element(right.b, k);
        }
        sum[i] = float(total);
    }
}

inline void multiply_16x8(float *sum, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    const Fragment *all = published(Fragment{{a0, a1, a2, a3}, {b0, b1}});
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        double total = sum[i];
        for (int k = 0; k < 16; ++k) {
            const int pair = k % 8 / 2;
            const Fragment left = lane_value(all, row % 8 * 4 + pair), right = lane_value(all, column * 4 + pair);
            const unsigned a = left.a[row / 8 + 2 * (k / 8)], b = right.b[k / 8];
            total += double(half_value(a >> 16 * (k % 2) & 0xFFFF)) * half_value(b >> 16 * (k % 2) & 0xFFFF);
        }
        sum[i] = float(total);
    }
}

// Products of whole tiles: a lane holds eight elements in a row of its tile, columns 8 (lane % 2) .. of row lane / 2.
enum class From { kGlobal, kShared };
enum class Order { kRows, kColumns };
struct HalfTile { unsigned words[4]; };
struct SumTile {
    float values[8];
    void scale(float factor) {
        for (float &value : values) {
            value *= factor;
        }
    }
};
template <From from, Order order> HalfTile half_tile(const unsigned short *p, int pitch) {
    HalfTile tile{};
    stray += reinterpret_cast<uintptr_t>(p) % 32 != 0 || pitch % 8 != 0;
    const int row = threadIdx.x % 32 / 2, first = threadIdx.x % 2 * 8;
    for (int i = 0; i < 8; ++i) {
        const unsigned short *place = p + (order == Order::kRows ? row * pitch + first + i : (first + i) * pitch + row);
        tile.words[i / 2] |= unsigned(from == From::kGlobal ? read(place) : *place) << 16 * (i % 2);
    }
    return tile;
}
template <From from, Order order> HalfTile left_tile(const unsigned short *p, int pitch) { return half_tile<from, order>(p, pitch); }
template <From from, Order order> HalfTile right_tile(const unsigned short *p, int pitch) { return half_tile<from, order>(p, pitch); }
template <Order, Order> void multiply_tiles(SumTile &sum, const HalfTile &a, const HalfTile &b) {
    struct Both { HalfTile a, b; };
    const Both *all = published(Both{a, b});
    const int row = threadIdx.x % 32 / 2, first = threadIdx.x % 2 * 8;
    for (int k = 0; k < 16; ++k) {
        const float left = element(lane_value(all, row * 2 + k / 8).a.words, k % 8);
        const HalfTile right = lane_value(all, k * 2 + first / 8).b;
        for (int i = 0; i < 8; ++i) {
            sum.values[i] += left * element(right.words, i);
        }
    }
}
template <From to> void store_tile(float *p, const SumTile &tile, int pitch) {
    stray += reinterpret_cast<uintptr_t>(p) % 32 != 0 || pitch % 4 != 0;
    for (int i = 0; i < 8; ++i) {
        float *place = p + threadIdx.x % 32 / 2 * pitch + threadIdx.x % 2 * 8 + i;
        to == From::kGlobal ? write(place, tile.values[i]) : void(*place = tile.values[i]);
    }
    __syncwarp();
}
inline SumTile sum_tile(const float *p, int pitch) {
    SumTile tile;
    for (int i = 0; i < 8; ++i) {
        tile.values[i] = read(p + threadIdx.x % 32 / 2 * pitch + threadIdx.x % 2 * 8 + i);
    }
    return tile;
}

// Copies that are done when they are waited for; until then there is NaN, and what was there is gone.
using SharedAddress = unsigned char *;
struct Copy { SharedAddress to; uint4 piece; };
static std::vector<std::vector<Copy>> copies[kMaxThreads]; // groups of each thread; the last one is open
inline SharedAddress shared_address(void *p) { return static_cast<SharedAddress>(p); }
inline uint4 shared_16(SharedAddress address) { return *reinterpret_cast<const uint4 *>(address); }
inline unsigned shared_2(SharedAddress address) { return *reinterpret_cast<const unsigned short *>(address); }
inline unsigned shared_1(SharedAddress address) { return *reinterpret_cast<const unsigned char *>(address); }
inline uint2 shared_8(SharedAddress address) { return *reinterpret_cast<const uint2 *>(address); }
inline void copy_async(SharedAddress to, const unsigned char *from) {
    auto &groups = copies[threadIdx.x];
    if (groups.empty()) {
        groups.emplace_back();
    }
    std::memset(to, 0xFF, 16);
    groups.back().push_back({to, from ? read(reinterpret_cast<const uint4 *>(from)) : uint4{}});
}
inline void zero_async(SharedAddress to, const unsigned char *) { copy_async(to, nullptr); }
inline void commit_copies() {
    auto &groups = copies[threadIdx.x];
    groups.resize(std::max<size_t>(groups.size(), 1));
    groups.emplace_back();
}
template <int pending> void wait_copies() {
    auto &groups = copies[threadIdx.x];
    while (groups.size() > pending + 1) {
        for (const Copy &copy : groups.front()) {
            std::memcpy(copy.to, &copy.piece, 16);
        }
        groups.erase(groups.begin());
    }
}

// A cluster runs as one block of all its threads. What they call shared memory is one piece, so only what every block of a
// cluster holds alike may lie there: what a block tells another, they all are told.
static int cluster = 1;
extern "C" void cluster_of(int blocks) { cluster = blocks; }
inline int cluster_blocks() { return cluster; }
inline int cluster_rank() { return blockIdx.x % cluster; }
inline int cluster_index() { return cluster > 1 ? blockIdx.y : blockIdx.x; }
struct Told {};
inline void begin_in_cluster(Told *, unsigned) {}
inline void await_beginnings() {}
inline void await_told(Told *) { wait(cluster_barrier); }
inline void tell(float *shared, float value, int rank, Told *) {
    if (rank == cluster_rank()) {
        *shared = value;
    }
}

static void enter() {
    body(body_argument);
    Fiber &self = fibers[running];
    self.done = true;
    block_awaited |= self.awaited;
    for (Barrier *barrier : {&block_barrier, &cluster_barrier, &warp_barriers[running / 32]}) { // threads that have ended are not waited for
        --barrier->expected;
        if (barrier->expected && barrier->arrived == barrier->expected) {
            barrier->arrived = 0;
            ++barrier->generation;
        }
    }
    _longjmp(scheduler, 1);
}

// The threads of a block, or of a cluster from block `first` on. False if they wait for one another for ever.
static bool run_block(int threads, int first) {
    block_barrier = cluster_barrier = Barrier{threads};
    std::fill(std::begin(named_barriers), std::end(named_barriers), Barrier{});
    for (int warp = 0; warp < threads / 32; ++warp) {
        warp_barriers[warp] = Barrier{32};
    }
    for (int i = 0; i < threads; ++i) {
        Fiber &fiber = fibers[i];
        fiber.started = fiber.done = false;
        fiber.waiting = nullptr;
        fiber.parity = 0;
        fiber.awaited = false;
        copies[i].clear();
        if (!fiber.stack) {
            fiber.stack = std::make_unique<char[]>(kStack);
        }
    }
    for (int alive = threads; alive;) {
        bool moved = false;
        for (int i = 0; i < threads; ++i) {
            Fiber &fiber = fibers[i];
            if (fiber.done || (fiber.waiting && fiber.waiting->generation == fiber.generation)) {
                continue;
            }
            moved = true;
            running = i;
            threadIdx = {i % blockDim.x, 0, 0};
            blockIdx.x = first + i / blockDim.x;
            if (!_setjmp(scheduler)) {
                if (fiber.started) {
                    _longjmp(fiber.place, 1);
                }
                fiber.started = true;
                getcontext(&fiber.entry);
                fiber.entry.uc_stack.ss_sp = fiber.stack.get();
                fiber.entry.uc_stack.ss_size = kStack;
                fiber.entry.uc_link = nullptr;
                makecontext(&fiber.entry, enter, 0);
                setcontext(&fiber.entry);
            }
            alive -= fibers[running].done;
        }
        if (!moved) {
            return false;
        }
    }
    return true;
}

template <class T> T argument(const uint64_t *slot) {
    T value;
    const void *from = std::is_class<T>::value ? reinterpret_cast<const void *>(*slot) : slot; // structs by address
    std::memcpy(&value, from, sizeof(T));
    return value;
}
template <class... A, size_t... I>
static void call(void (*kernel)(A...), const uint64_t *arguments, std::index_sequence<I...>) {
    kernel(argument<A>(arguments + I)...);
}

template <class... A> struct Launch {
    void (*kernel)(A...);
    const uint64_t *arguments;
    static void run(const void *self) {
        const Launch &launch = *static_cast<const Launch *>(self);
        call(launch.kernel, launch.arguments, std::index_sequence_for<A...>{});
    }
};

// The number of accesses outside of the buffers; -1 if a block hangs, -2 if the count of arguments does not fit.
template <class... A>
int emulate(void (*kernel)(A...), const int *grid, int threads, const uint64_t *arguments, int count,
            const Range *buffers, int buffer_count) {
    if (count != sizeof...(A)) {
        return -2;
    }
    const Launch<A...> launch{kernel, arguments};
    body = Launch<A...>::run;
    body_argument = &launch;
    ranges = buffers;
    range_count = buffer_count;
    stray = 0;
    asked.clear();
    early = {};
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads, 1, 1};
    for (int z = 0; z < grid[2]; ++z) {
        for (int y = 0; y < grid[1]; ++y) {
            for (int x = 0; x < grid[0]; x += cluster) {
                blockIdx = {x, y, z};
                std::memset(dynamic_shared, 0xFF, sizeof dynamic_shared); // NaN: nothing relies on what was there
                block_awaited = false;
                if (!run_block(threads * cluster, x)) {
                    return -1;
                }
                early.never += !block_awaited;
            }
        }
    }
    return stray;
}
