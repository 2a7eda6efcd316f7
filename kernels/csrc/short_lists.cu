// A row's short list: what top-k, then top-p and min-p leave of it, in the order of ids. docs/kernels/sampling.md.
#include "short_lists.cuh"

constexpr int kHeld = kListed * kSlices / kThreads;
struct Held {
    Key keys[kHeld];

    template <class Visit> __device__ __forceinline__ void operator()(Visit visit) const {
#pragma unroll
        for (int n = 0; n < kHeld; ++n) {
            visit(keys[n]);
        }
    }
};

// firsts: [rows, kListed, kSlices], the first top-k keys of every slice, as sampling_adjust has left them. by_mass: lanes'
// top-p counts. Rows whose lane's top-k is above `listed` have none. Grid: (rows).
extern "C" __global__ void __launch_bounds__(kThreads)
    sampling_list(const int *lanes, Wishes wishes, Rows rows, int listed, int by_mass, const Key *firsts) {
    __shared__ Contest<kListed * kHeld> contest;
    __shared__ Key ordered[kListed];
    __shared__ double weights[kListed], sums[kListed];
    __shared__ int ids[kListed], kept_size;
    const int row = blockIdx.x, lane = read(lanes + row);
    if (lane < 0 || !is_listed(wishes, lane, listed)) {
        return;
    }
    const int top_k = read(wishes.top_k + lane);
    const double temperature = read(wishes.temperature + lane), min_p = read(wishes.min_p + lane);
    const double top_p = by_mass ? read(wishes.top_p + lane) : 1.0;
    Held held;
    Key largest = 0;
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
        const int place = threadIdx.x + n * kThreads;
        held.keys[n] = place < top_k * kSlices ? read(firsts + static_cast<size_t>(row) * kListed * kSlices + place) : 0;
        largest = held.keys[n] > largest ? held.keys[n] : largest;
    }
    const int count = first_keys(contest, top_k, largest, held, [&](int rank, Key key) { ordered[rank] = key; });
    __syncthreads();
    double own_weight = 0;
    if (threadIdx.x < count) {
        own_weight = weight(value_of_key(ordered[threadIdx.x]), value_of_key(ordered[0]), temperature);
        weights[threadIdx.x] = own_weight;
    }
    __syncthreads();
    if (threadIdx.x == 0) { // the largest first: what is kept is a beginning
        double all = 0, before = 0;
        for (int rank = 0; top_p < 1 && rank < count; ++rank) {
            all += weights[rank];
        }
        const double limit = top_p < 1 ? top_p * all : 1e300;
        int rank = 0;
        do {
            before += weights[rank];
            ++rank;
        } while (rank < count && before < limit && weights[rank] > 0 && weights[rank] >= min_p);
        kept_size = min(rank, count); // of nothing but broken logits nothing comes
    }
    __syncthreads();
    const int size = kept_size, id = threadIdx.x < size ? id_of(ordered[threadIdx.x]) : 0;
    int place = 0;
    for (int other = 0; other < size; ++other) {
        place += id_of(ordered[other]) < id;
    }
    if (threadIdx.x < size) { // nobody reads the weights in their former order any more
        ids[place] = id;
        weights[place] = own_weight;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (int at = 0; at < size; ++at) {
            sum += weights[at];
            sums[at] = sum;
        }
        write(rows.list_size + row, size);
    }
    __syncthreads();
    if (threadIdx.x < size) {
        write(rows.list_ids + row * kListed + threadIdx.x, ids[threadIdx.x]);
        write(rows.list_weights + row * kListed + threadIdx.x, weights[threadIdx.x]);
        write(rows.list_sums + row * kListed + threadIdx.x, sums[threadIdx.x]);
    }
}
