// What a round of decoding says of a sequence: which lane, how many tokens, of this round and of the last, and where.
#pragma once
#include "delta.cuh"

// Entry `index` of a table that a warp has read side by side with what told it the index: one wait in place of two.
__device__ __forceinline__ int entry(const int *table, int own, int index) {
    return index < 32 ? __shfl_sync(kAll, own, max(index, 0)) : read(table + index);
}

// What a round says of a sequence, asked for by a warp: a word a thread. So it is known at once, after one wait; of single
// loads the compiler sinks those that a branch may do without behind it, for a second one.
struct Asked {
    int own_word, own_accepted, own_turn;

    __device__ __forceinline__ Asked(int all_lanes, const int *lanes, const int *accepted, const int *turns,
                                     const int *counts, const int *firsts, int thread) {
        const int *table = thread == 0 ? lanes : thread == 1 ? counts : firsts;
        own_word = read_here(table + blockIdx.z);
        own_accepted = thread < all_lanes ? read_here(accepted + thread) : 0;
        own_turn = thread < all_lanes ? read_here(turns + thread) : 0;
    }
};

// The answer. lane: -1, none; first: the row of its first token; before: tokens of the last round that stand; turn: which
// half of the rows is read.
struct Called {
    int lane, tokens, first, before, turn;

    __device__ __forceinline__ Called(const Asked &asked, const int *accepted, const int *turns) {
        lane = __shfl_sync(kAll, asked.own_word, 0);
        tokens = min(max(__shfl_sync(kAll, asked.own_word, 1), 0), kMaxTokens);
        first = __shfl_sync(kAll, asked.own_word, 2);
        before = min(max(entry(accepted, asked.own_accepted, lane), 0), kMaxTokens);
        turn = entry(turns, asked.own_turn, lane) & 1;
    }
};

// As `rows_of`, by one wide product: it lies between what a round says and the first row.
template <class T> __device__ __forceinline__ T *called_rows(T *rows, int turn, int all_lanes, int lane, int width) {
    return rows + static_cast<long long>((turn & 1) * all_lanes + lane) * (kRowsKept * width);
}
