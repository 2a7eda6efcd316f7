// The model's own log-probabilities: of a token, and of the most likely ones. Slices first, then rows (see sampling.cu).
#include "sampling.cuh"

// Largest (value, lowest id of equals) of a block among those behind `limit` in that order; id -1: none.
struct Ranked {
    float value;
    int id;
};
__device__ __forceinline__ bool before(Ranked a, Ranked b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

__device__ __forceinline__ Ranked block_first(Ranked own, Ranked *scratch) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const Ranked other = {__shfl_xor_sync(kAll, own.value, step), __shfl_xor_sync(kAll, own.id, step)};
        own = before(other, own) ? other : own;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = own;
    }
    __syncthreads();
    own = scratch[0];
    for (int warp = 1; warp < kWarps; ++warp) {
        own = before(scratch[warp], own) ? scratch[warp] : own;
    }
    return own;
}

// The model's own log-probabilities, first half: of each slice the sum of e^(logit - its largest), and its `best` first
// logits. sums: FP64 [rows, kSlices]; values, ids: [rows, kSlices, max(best, 1)]. Grid: (kSlices, rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    logprob_slices(const float *logits, int logits_stride, int vocabulary, int best, double *sums, float *values,
                   int *ids) {
    __shared__ Ranked firsts[kWarps];
    __shared__ double scratch[kWarps];
    const int row = blockIdx.y, slice = blockIdx.x, kept = max(best, 1);
    const int size = (vocabulary + kSlices - 1) / kSlices, begin = slice * size, end = min(vocabulary, begin + size);
    const float *own_row = logits + static_cast<size_t>(row) * logits_stride;
    const Ranked none = {__uint_as_float(0xFF800000u), 0x7FFFFFFF};
    Ranked last = {__uint_as_float(0x7F800000u), -1};
    float peak = 0;
    for (int place = 0; place < kept; ++place) {
        Ranked own = none;
        for (int id = begin + threadIdx.x; id < end; id += kThreads) {
            const Ranked here = {read(own_row + id), id};
            if (before(last, here) && before(here, own)) {
                own = here;
            }
        }
        last = block_first(own, firsts);
        peak = place == 0 ? last.value : peak;
        if (threadIdx.x == 0) {
            write(values + (static_cast<size_t>(row) * kSlices + slice) * kept + place, last.value);
            write(ids + (static_cast<size_t>(row) * kSlices + slice) * kept + place, last.id);
        }
    }
    double sum = 0;
    for (int id = begin + threadIdx.x; id < end; id += kThreads) {
        sum += weight(read(own_row + id), peak, 1.0);
    }
    sum = block_total(sum, scratch);
    if (threadIdx.x == 0) {
        write(sums + row * kSlices + slice, sum);
    }
}

// Second half: chosen: FP64 [rows], of tokens [rows] (NaN for one outside of the vocabulary); best_values FP64 and
// best_ids: [rows, best], most likely first. Grid: (rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    logprob_merge(const float *logits, int logits_stride, int vocabulary, int best, const double *sums,
                  const float *values, const int *ids, const int *tokens, double *chosen, double *best_values,
                  int *best_ids) {
    __shared__ Ranked firsts[kWarps];
    const int row = blockIdx.x, kept = max(best, 1);
    const size_t base = static_cast<size_t>(row) * kSlices * kept;
    float peak = read(values + base);
    for (int slice = 1; slice < kSlices; ++slice) {
        peak = fmaxf(peak, read(values + base + slice * kept));
    }
    double total = 0;
    for (int slice = 0; slice < kSlices; ++slice) {
        const double sum = read(sums + row * kSlices + slice);
        total += sum > 0 ? sum * weight(read(values + base + slice * kept), peak, 1.0) : sum;
    }
    const double scale = static_cast<double>(peak) + log(total);
    const Ranked none = {__uint_as_float(0xFF800000u), 0x7FFFFFFF};
    Ranked last = {__uint_as_float(0x7F800000u), -1};
    for (int place = 0; place < best; ++place) {
        Ranked own = none;
        for (int index = threadIdx.x; index < kSlices * kept; index += kThreads) {
            const Ranked here = {read(values + base + index), read(ids + base + index)};
            if (before(last, here) && before(here, own)) {
                own = here;
            }
        }
        last = block_first(own, firsts);
        if (threadIdx.x == 0) {
            write(best_values + row * best + place, static_cast<double>(last.value) - scale);
            write(best_ids + row * best + place, last.id);
        }
    }
    if (threadIdx.x == 0) {
        const int token = read(tokens + row);
        const bool known = token >= 0 && token < vocabulary;
        const float value = known ? read(logits + static_cast<size_t>(row) * logits_stride + token) : 0.0f;
        write(chosen + row, known ? static_cast<double>(value) - scale : 0.0 / 0.0);
    }
}
