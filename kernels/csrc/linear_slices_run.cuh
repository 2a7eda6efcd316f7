// A launch in slices of K: what the warps' sums become, and the kernel's way from step to step. Included by linear.cuh.
#pragma once
#include "linear_slices.cuh"

// Sums of a round of steps: [steps, kSlices, tokens, kSumPitch]; `put`: where a lane's first one of a step stands, for row 0.
template <bool kHalved, class Products>
__device__ __forceinline__ void put_sums(const Task &task, const float (&sum)[4], int lane, float *put) {
#pragma unroll
    for (int i = 0; i < (kHalved ? 2 : 4); ++i) {
        if (lane % 4 * 2 + i % 2 < task.tokens) {
            put[i % 2 * kSumPitch + Products::template row<kHalved>(lane, i)] = sum[i];
        }
    }
}

// One output of a round, and what else it is made of; asked for before the last products are there.
template <class Weight> struct Output {
    const Matrix *matrix, *up; // up: null unless gates are to be multiplied
    const float *sums, *up_sums;
    float scale, up_scale, residual;
    int token, row;
    bool there;

    __device__ Output(const Task &task, const Share &share, const float *round_sums, int first_step, int index) {
        const int rows = share.paired ? kHalfRows / 2 : kHalfRows; // outputs of a step
        int held = index % rows, own = index / rows / task.tokens;
        const int step = first_step + own;
        token = index / rows - own * task.tokens;
        int band, above, place; // of the band in the launch; how far up's sums stand behind those of gate; in the band
        there = true;
        if (step < share.whole_steps) {
            band = share.band_of(step);
            place = (share.paired ? (step >> 1) % 2 : step % 2) * kHalfRows;
            if (share.paired) { // two steps, of gate and of up, have sixteen outputs
                held += own % 2 * rows;
                own &= ~1;
            }
            place += held;
            above = kSlices * task.tokens * kSumPitch;
        } else {
            const int units = share.halved(step) ? 2 : 1;
            int part;
            place = share.left_row_of(step, held, part);
            band = place / kRows;
            place %= kRows;
            above = rows / units;
            there = held < rows / units;
        }
        matrix = &matrix_of(task, band, 0, band);
        up = share.paired ? &task.matrix[1] : nullptr;
        row = band * kRows + place;
        sums = round_sums + (own * kSlices * task.tokens + token) * kSumPitch + held;
        up_sums = sums + above;
        scale = up_scale = residual = 0.0f;
        if (there) {
            scale = __ldg(matrix->scale + row * matrix->scale_stride);
            if (up != nullptr) {
                up_scale = __ldg(up->scale + row * up->scale_stride);
            } else if (matrix->residual != nullptr) {
                residual = matrix->residual[place_of(*matrix, token, row)];
            }
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
        if (there && up == nullptr) {
            store(task, *matrix, token, row, total(task, sums) * scale, residual);
        } else if (there) {
            const float gate = total(task, sums) * scale, raised = total(task, up_sums) * up_scale;
            store(task, *up, token, row, silu(gate) * raised, 0.0f);
        }
    }
};

// Dynamic shared memory: rings of all warps, then the sums of one round, or of two that take turns.
template <class Weight, int kFours, int kAhead> __device__ __forceinline__ void run_slices(const Task &task) {
    using Own = SliceTurns<Weight, kFours, kAhead>;
    const Share share(task);
    Own own(task, share, dynamic_shared());
    take_over(); // weights are on their way; what else is read, the launch before may have written
    own.begin();
    float *const sums = reinterpret_cast<float *>(dynamic_shared() + kSlices * Own::kRing);
    const int lane = own.copies.lane, step_sums = kSlices * task.tokens * kSumPitch;
    const int first_sum = opaque(static_cast<int>(threadIdx.x / 32 * task.tokens + lane % 4 * 2) * kSumPitch);
    int buffer = 0;
#pragma unroll 1
    for (int first = 0; first < share.steps; first += task.cut.round) {
        const int rest = share.steps - first, count = task.cut.round < rest ? task.cut.round : rest;
        float *const round_sums = sums + buffer * task.cut.round * step_sums;
        float *put = round_sums + first_sum;
#pragma unroll 1
        for (int step = first; step < first + count; ++step, put += step_sums) {
            float sum[4] = {};
            if (share.halved(step)) {
                own.template multiply<true>(sum, step);
                put_sums<true, typename Own::Products>(task, sum, lane, put);
            } else {
                own.template multiply<false>(sum, step);
                put_sums<false, typename Own::Products>(task, sum, lane, put);
            }
        }
        const int outputs = count * task.tokens * (share.paired ? kHalfRows / 2 : kHalfRows);
        if (static_cast<int>(threadIdx.x / 32 * 32) < outputs) { // whole warps: a barrier must not part them
            int index = threadIdx.x;
            Output<Weight> output(task, share, round_sums, first, index < outputs ? index : 0);
            __syncthreads();
            for (; index < outputs; index += blockDim.x) {
                if (index >= static_cast<int>(blockDim.x)) {
                    output = Output<Weight>(task, share, round_sums, first, index);
                }
                output.finish(task);
            }
        } else {
            __syncthreads();
        }
        buffer ^= 1; // whoever comes to the next barrier has finished this round
    }
}
