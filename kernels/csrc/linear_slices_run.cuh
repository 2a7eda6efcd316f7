// A launch in slices of K: what the warps' sums become, and the kernel's way from step to step. Included by linear.cuh.
#pragma once
#include "linear_slices.cuh"

// Sums of a round: [slots, kSlices, tokens, kSumPitch]; a band has two slots, sixteen rows each, and a unit one. `put`: where a lane's first
// one stands; `count` of four are there, `step` rows apart.
__device__ __forceinline__ void put_sums(const Task &task, const float (&sum)[4], float *put, int count, int step) {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (i < count && 2 * q + i % 2 < task.tokens) {
            put[i % 2 * kSumPitch + i / 2 * step] = sum[i];
        }
    }
}

// One output of a round, and what else it is made of; asked for before the last products are there.
template <class Weight> struct Output {
    const Matrix *matrix; // of `up` none: a pointer that may be null is read through memory, not as an argument
    const float *sums, *up_sums;
    bool paired;
    float scale = 0.0f, up_scale = 0.0f, residual = 0.0f;
    int token, row;

    // `index` of a round that begins with item `first`, of `whole` bands or pairs and then units.
    __device__ Output(const Task &task, const Share &share, const float *round_sums, int first, int whole, int index) {
        int band, place, slot;
        const int each = kSlices * task.tokens * kSumPitch, outputs = whole * task.tokens * kRows;
        if (index < outputs) {
            const int own = index / kRows, item = own / task.tokens;
            token = own - item * task.tokens;
            place = index % kRows;
            slot = 2 * share.steps() * item + place / kHalfRows;
            matrix = &matrix_of(task, share.band_of(first + item), 0, band);
            sums = round_sums + slot * each + token * kSumPitch + place % kHalfRows;
            up_sums = sums + 2 * each;
        } else {
            const int rows = share.unit_rows(), own = (index - outputs) / rows, unit = own / task.tokens;
            int part;
            token = own - unit * task.tokens;
            place = (index - outputs) % rows;
            slot = 2 * share.steps() * whole + unit;
            sums = round_sums + slot * each + token * kSumPitch + place;
            up_sums = sums + 4;
            place = share.unit_row(first + whole - share.whole + unit, place, part);
            matrix = &matrix_of(task, place / kRows, 0, band);
            place %= kRows;
        }
        row = band * kRows + place;
        paired = share.paired;
        scale = __ldg(matrix->scale + row * matrix->scale_stride);
        if (paired) {
            up_scale = __ldg(task.matrix[1].scale + row * task.matrix[1].scale_stride);
        } else if (matrix->residual != nullptr) {
            residual = matrix->residual[place_of(*matrix, token, row)];
        }
    }
    __device__ float total(const Task &task, const float *parts) const {
        float sum = parts[0];
#pragma unroll
        for (int part = 1; part < kSlices; ++part) {
            sum += parts[part * task.tokens * kSumPitch];
        }
        return sum * Weight::kUnit;
    }
    __device__ void finish(const Task &task) const {
        if (!paired) {
            store(task, *matrix, token, row, total(task, sums) * scale, residual);
        } else {
            const float gate = total(task, sums) * scale, raised = total(task, up_sums) * up_scale;
            store(task, task.matrix[1], token, row, silu(gate) * raised, 0.0f);
        }
    }
};

// Dynamic shared memory: rings of all warps, then the sums of one round, or of two that take turns.
template <class Weight, int kFours, int kAhead> __device__ __forceinline__ void run_slices(const Task &task) {
    SliceTurns<Weight, kFours, kAhead> way(task, dynamic_shared());
    const Share &share = way.share;
    take_over(); // weights are on their way; what else is read, the launch before may have written
    way.begin();
    float *const sums = reinterpret_cast<float *>(dynamic_shared() + kSlices * SliceTurns<Weight, kFours, kAhead>::kShared);
    const int lane = threadIdx.x % 32, each = kSlices * task.tokens * kSumPitch, slots = 2 * share.steps();
    const int own = static_cast<int>(threadIdx.x / 32 * task.tokens + lane % 4 * 2) * kSumPitch, g = lane / 4;
    int buffer = 0, item = 0;
#pragma unroll 1
    while (item < share.whole + share.units) {
        float *const round_sums = sums + buffer * task.cut.round * each;
        float *put = round_sums + own;
        const int first = item;
        int whole = 0, room = task.cut.round;
#pragma unroll 1
        for (; item < share.whole && room >= slots; ++item, ++whole, room -= slots) {
#pragma unroll 1
            for (int part = 0; part < share.steps(); ++part, put += 2 * each) {
                float upper[4] = {}, lower[4] = {};
                way.template multiply<false>(upper, lower);
                put_sums(task, upper, put + 2 * g, 4, 1);
                put_sums(task, lower, put + each + 2 * g, 4, 1);
            }
        }
        int units = 0;
        if (item >= share.whole) {
#pragma unroll 1
            for (; item < share.whole + share.units && room > 0; ++item, ++units, --room, put += each) {
                float upper[4] = {}, lower[4];
                way.template multiply<true>(upper, lower);
                put_sums(task, upper, put + g, 2, 0);
            }
        }
        const int outputs = task.tokens * (whole * kRows + units * share.unit_rows());
        if (static_cast<int>(threadIdx.x / 32 * 32) < outputs) { // whole warps: a barrier must not part them
            int index = threadIdx.x;
            Output<Weight> output(task, share, round_sums, first, whole, index < outputs ? index : 0);
            __syncthreads();
            for (; index < outputs; index += blockDim.x) {
                if (index >= static_cast<int>(blockDim.x)) {
                    output = Output<Weight>(task, share, round_sums, first, whole, index);
                }
                output.finish(task);
            }
        } else {
            __syncthreads();
        }
        buffer ^= 1; // whoever comes to the next barrier has finished this round
    }
}
