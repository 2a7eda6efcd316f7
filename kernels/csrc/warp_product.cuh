// Products of 16 x 16 tiles by a warp, in the form that every tensor core since sm_70 has: sum += a b, fp16 in, FP32 out.
// Which lane holds which element is the hardware's choice, so tiles come from memory, go back to memory, and are only
// scaled as a whole between (PTX ISA, "wmma"). The host emulation of the tests has its own of this file.
#pragma once
#include "half.cuh"

enum class From { kGlobal, kShared };
enum class Order { kRows, kColumns }; // of a tile: element (r, c) at p[r * pitch + c], or at p[c * pitch + r]

struct HalfTile { // an operand; the instruction asks for 8 words a lane
    unsigned words[8];
};
struct SumTile {
    float values[8];

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            values[i] *= factor;
        }
    }
};

#define TILE_LOAD(operand, order, space, type, address)                                                                \
    asm volatile("wmma.load." operand ".sync.aligned." order ".m16n16k16." space ".f16 {%0, %1, %2, %3, %4, %5, %6, "  \
                 "%7}, [%8], %9;"                                                                                      \
                 : "=r"(tile.words[0]), "=r"(tile.words[1]), "=r"(tile.words[2]), "=r"(tile.words[3]),                 \
                   "=r"(tile.words[4]), "=r"(tile.words[5]), "=r"(tile.words[6]), "=r"(tile.words[7])                  \
                 : type(address), "r"(pitch)                                                                           \
                 : "memory")
#define TILE_LOADS(name, operand)                                                                                      \
    template <From from, Order order>                                                                                  \
    __device__ __forceinline__ HalfTile name(const unsigned short *p, int pitch) {                                     \
        HalfTile tile;                                                                                                 \
        if (from == From::kShared) {                                                                                   \
            const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(p));                               \
            if (order == Order::kRows) {                                                                               \
                TILE_LOAD(operand, "row", "shared", "r", address);                                                     \
            } else {                                                                                                   \
                TILE_LOAD(operand, "col", "shared", "r", address);                                                     \
            }                                                                                                          \
        } else if (order == Order::kRows) {                                                                            \
            TILE_LOAD(operand, "row", "global", "l", p);                                                               \
        } else {                                                                                                       \
            TILE_LOAD(operand, "col", "global", "l", p);                                                               \
        }                                                                                                              \
        return tile;                                                                                                   \
    }

// Rows begin at multiples of 16 bytes, tiles at multiples of 32.
TILE_LOADS(left_tile, "a")
TILE_LOADS(right_tile, "b")

#define TILE_MULTIPLY(orders)                                                                                          \
    asm("wmma.mma.sync.aligned." orders ".m16n16k16.f32.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11, "     \
        "%12, %13, %14, %15}, {%16, %17, %18, %19, %20, %21, %22, %23}, {%0, %1, %2, %3, %4, %5, %6, %7};"             \
        : "+f"(sum.values[0]), "+f"(sum.values[1]), "+f"(sum.values[2]), "+f"(sum.values[3]), "+f"(sum.values[4]),     \
          "+f"(sum.values[5]), "+f"(sum.values[6]), "+f"(sum.values[7])                                                \
        : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(a.words[4]), "r"(a.words[5]),        \
          "r"(a.words[6]), "r"(a.words[7]), "r"(b.words[0]), "r"(b.words[1]), "r"(b.words[2]), "r"(b.words[3]),        \
          "r"(b.words[4]), "r"(b.words[5]), "r"(b.words[6]), "r"(b.words[7]))

// The orders are those in which a and b were loaded.
template <Order left, Order right>
__device__ __forceinline__ void multiply_tiles(SumTile &sum, const HalfTile &a, const HalfTile &b) {
    if (left == Order::kRows && right == Order::kRows) {
        TILE_MULTIPLY("row.row");
    } else if (left == Order::kRows) {
        TILE_MULTIPLY("row.col");
    } else if (right == Order::kRows) {
        TILE_MULTIPLY("col.row");
    } else {
        TILE_MULTIPLY("col.col");
    }
}

#define TILE_STORE(space, type, address)                                                                               \
    asm volatile("wmma.store.d.sync.aligned.row.m16n16k16." space ".f32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8}, %9;"   \
                 :                                                                                                     \
                 : type(address), "f"(tile.values[0]), "f"(tile.values[1]), "f"(tile.values[2]), "f"(tile.values[3]),  \
                   "f"(tile.values[4]), "f"(tile.values[5]), "f"(tile.values[6]), "f"(tile.values[7]), "r"(pitch)      \
                 : "memory")

template <From to> __device__ __forceinline__ void store_tile(float *p, const SumTile &tile, int pitch) {
    if (to == From::kShared) {
        TILE_STORE("shared", "r", static_cast<unsigned>(__cvta_generic_to_shared(p)));
    } else {
        TILE_STORE("global", "l", p);
    }
}

// FP32 values in rows, as a sum to go on from.
__device__ __forceinline__ SumTile sum_tile(const float *p, int pitch) {
    SumTile tile;
    asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.global.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8], %9;"
                 : "=f"(tile.values[0]), "=f"(tile.values[1]), "=f"(tile.values[2]), "=f"(tile.values[3]),
                   "=f"(tile.values[4]), "=f"(tile.values[5]), "=f"(tile.values[6]), "=f"(tile.values[7])
                 : "l"(p), "r"(pitch)
                 : "memory");
    return tile;
}
