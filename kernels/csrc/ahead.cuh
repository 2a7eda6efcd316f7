// What a launch asks for of the weights that the next one reads, into the second-level cache (kernels/ahead.py holds the same
// structures). A hint: no bits change.
#pragma once
#include "shared.cuh"

constexpr int kSpans = 16;
constexpr int kLine = 128; // bytes of the cache that are asked for at a time
constexpr int kAsked = 4;  // lines that a thread asks for between two looks whether it is time to stop

struct Span {
    const unsigned char *first;
    int lines;
};

struct Ahead {
    Span span[kSpans];
    int spans;
};

// By block `block` of `blocks`, until `stop()`.
template <class Stop> __device__ __forceinline__ void ask_ahead(const Ahead &ahead, int block, int blocks, Stop stop) {
    const int first = block * blockDim.x + threadIdx.x, stride = blocks * blockDim.x;
    int asked = 0;
#pragma unroll 1
    for (int index = 0; index < ahead.spans; ++index) {
        const Span &span = ahead.span[index];
#pragma unroll 1
        for (int line = first; line < span.lines; line += stride) {
            prefetch(span.first + static_cast<size_t>(line) * kLine);
            if (++asked % kAsked == 0 && stop()) {
                return;
            }
        }
    }
}
