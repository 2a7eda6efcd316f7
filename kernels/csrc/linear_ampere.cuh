// The decode linear for sm_80 and newer: m16n8k16, a ring of asynchronous copies for each warp, equal shares, and a warp that
// finishes bands while the others go on.
#pragma once
#include "ampere.cuh"
#include "encodings.cuh"
#include "linear_finish.cuh"
#include "linear_share.cuh"

// One warp's turns through spans of its block's share: loads run ahead of products, across bands too.
template <class Weight, int kTiles, bool kMixed> struct Turns {
    static constexpr int kTurn = Weight::kTurn;
    static constexpr int kStages = Weight::kStages;
    static constexpr int kStageBytes = kTurn * Weight::kTileStride;
    static constexpr int kTileBytes = kRows * Weight::kBytes;
    static constexpr int kTurnBytes = kTurn * kTileBytes;

    const Task &task;
    Course<kMixed> ahead;                // at the turn to load next
    int full, cut;                       // turns left of its stretch, and tiles of a last one that is cut short
    const unsigned char *words, *scales; // of this lane in that turn
    SharedAddress ring, stage, free;     // of this warp: the stage to multiply next, and the one to fill next
    int lane, to, scales_to, from;       // offsets in a stage: of this lane's copies, and of what it multiplies
    uint4 x_even[kTiles][2], x_odd[kTiles][2]; // x of every other four tiles, for the next products

    __device__ Turns(const Task &task, const Course<kMixed> &course, unsigned char *shared)
        : task(task), ahead(course), full(0), cut(0),
          ring(shared_address(shared + threadIdx.x / 32 * kStages * kStageBytes)), stage(ring), free(ring),
          lane(kept(threadIdx.x % 32)), to(kept(place(lane))),
          // Scales: 16 bytes for each of the first lanes, two lanes a tile.
          scales_to(kept(lane / 2 * Weight::kTileStride + kTileBytes + lane % 2 * 16)),
          from(kept(lane % 4 * Weight::kTileStride)) {
#pragma unroll 1 // a new launch finds no instructions in the caches: short code starts sooner
        for (int count = 0; count < kStages - 1; ++count) {
            load();
            free += kStageBytes;
        }
    }

    // Where a lane's first 16 bytes of a turn go: chunk `lane` of the tiles, which stand kTileStride apart.
    __device__ static int place(int lane) {
        return lane * 16 / kTileBytes * Weight::kTileStride + lane * 16 % kTileBytes;
    }

    // Takes the next stretch in which the warp has a turn.
    __device__ void take_stretch() {
        while (ahead.count == 0 && !ahead.done()) {
            ahead.next();
        }
        if (ahead.count > 0) {
            int band;
            const Matrix &matrix = matrix_of(task, ahead.span.item, ahead.part, band);
            const long long tile = static_cast<long long>(band) * task.groups + ahead.turn * kTurn;
            words = matrix.words + tile * kTileBytes + lane * 16;
            scales = matrix.group_scales + tile * kRows + lane * 16;
            const bool ends = ahead.turn + (ahead.count - 1) * kWarps == ahead.turns - 1;
            cut = ends ? task.groups % kTurn : 0;
            full = ahead.count - (cut > 0);
            ahead.count = 0;
        }
    }

    // Loads a turn into the stage `free`.
    __device__ void load() {
#ifndef ABLATE_LOADS
        if (full + cut == 0) {
            take_stretch();
        }
        if (full > 0) {
#pragma unroll
            for (int i = 0; i < kTurnBytes / 512; ++i) {
                copy_async(free + to + step(i), words + i * 512);
            }
            if (Weight::kGroupScales && lane < 2 * kTurn) {
                copy_async(free + scales_to, scales);
            }
            words += kWarps * kTurnBytes;
            scales += kWarps * kTurn * kRows;
            --full;
        } else if (cut > 0) {
            load_cut();
        }
#endif
        commit_copies(); // an empty group at the end of the walk keeps the count of groups
    }

    __device__ void load_cut() {
        const unsigned char *any = reinterpret_cast<const unsigned char *>(task.x);
#pragma unroll 1
        for (int i = 0; i < kTurnBytes / 512; ++i) {
            if ((i * 512 + lane * 16) / kTileBytes < cut) {
                copy_async(free + to + step(i), words + i * 512);
            } else {
                zero_async(free + to + step(i), any);
            }
        }
        if (Weight::kGroupScales && lane < 2 * kTurn) {
            if (lane / 2 < cut) {
                copy_async(free + scales_to, scales);
            } else {
                zero_async(free + scales_to, any);
            }
        }
        cut = 0;
    }

    // How far chunk `lane + 32 i` lies from chunk `lane`.
    __device__ static constexpr int step(int i) {
        return kTileBytes < 512 ? i * (512 / kTileBytes) * Weight::kTileStride
                                : i * 512 / kTileBytes * Weight::kTileStride + i * 512 % kTileBytes;
    }

    // x of this lane in the four tiles from `tile` on. A lane whose token there is not has the last one's: it spoils nothing
    // but its own sums, which nobody reads.
    __device__ void load_x(uint4 (&loaded)[kTiles][2], int tile) {
        tile += lane % 4;
#pragma unroll
        for (int part_of = 0; part_of < kTiles; ++part_of) {
#ifdef ABLATE_LOADS
            loaded[part_of][0] = loaded[part_of][1] = {};
#else
            const int token = min(part_of * kTokens + lane / 4, task.tokens - 1);
            const uint4 *row = reinterpret_cast<const uint4 *>(task.x) + (token * task.groups + tile) * 2;
            loaded[part_of][0] = loaded[part_of][1] = {};
            if (tile < task.groups) {
                loaded[part_of][0] = read_written(row);
                loaded[part_of][1] = read_written(row + 1);
            }
#endif
        }
    }

    // sum[tile][i]: token `token(i)` of token tile `tile`, row `row(i)` of the band.
    __device__ static int token(int lane, int i) { return lane % 4 * 2 + i % 2; }
    __device__ static int row(int lane, int i) {
        // Such that the lanes' reads meet all banks: 16 bytes are two rows of nvfp4 and one of fp8.
        const int half = i / 4, lower = i / 2 % 2, g = lane / 4;
        return half * 16 + (Weight::kGroupScales ? 2 * g + lower : 8 * lower + g);
    }

    // Adds the products of a warp's next turn, which is turn `turn` of the band and whose first x is there; `after` is the
    // one after it.
    __device__ void multiply(float (&sum)[kTiles][8], int turn, int after) {
        const int tile = turn * kTurn, next = after * kTurn;
        wait_copies<kStages - 2>();
        __syncwarp(); // the copies of the other lanes, too
        load();       // into the stage that the last turn left
        const SharedAddress words_now = stage + from;
        free = stage;
        stage = stage + kStageBytes == ring + kStages * kStageBytes ? ring : stage + kStageBytes;
        if constexpr (kTiles == 3) { // registers for x of one product only
#pragma unroll
            for (int four = 0; four < kTurn / 4; ++four) {
                load_x(x_even, tile + 4 * four);
#pragma unroll
                for (int index = 0; index < kTiles; ++index) {
                    x_even[index][0] = Weight::arrange(x_even[index][0]);
                    x_even[index][1] = Weight::arrange(x_even[index][1]);
                }
                multiply_four(sum, words_now + 4 * four * Weight::kTileStride, x_even);
            }
        } else if constexpr (kTurn == 8) {
            load_x(x_odd, tile + 4);
            multiply_four(sum, words_now, x_even);
            load_x(x_even, next);
            multiply_four(sum, words_now + 4 * Weight::kTileStride, x_odd);
        } else {
            uint4 now[kTiles][2];
#pragma unroll
            for (int index = 0; index < kTiles; ++index) {
                now[index][0] = Weight::arrange(x_even[index][0]);
                now[index][1] = Weight::arrange(x_even[index][1]);
            }
            load_x(x_even, next);
            multiply_four(sum, words_now, now);
        }
    }

    // Adds the products with four tiles. Lane (g, q) = (lane / 4, lane % 4) holds tile q, for token g and for four rows. A
    // product takes four columns of each of the tiles: their order is free as long as both sides agree.
    __device__ void multiply_four(float (&sum)[kTiles][8], SharedAddress words_now, const uint4 (&x_now)[kTiles][2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Weight upper, lower;
            if constexpr (Weight::kGroupScales) {
                Weight::take_two(words_now, row(lane, half * 4), upper, lower);
            } else {
                upper = Weight::take(words_now, row(lane, half * 4));
                lower = Weight::take(words_now, row(lane, half * 4 + 2));
            }
#ifdef ABLATE_ARITHMETIC
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                sum[tile][half] += __int_as_float(upper.mix() ^ lower.mix() ^ x_now[tile][0].x ^ x_now[tile][1].y);
            }
#else
            upper.prepare();
            lower.prepare();
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                unsigned a0, a1, a2, a3;
                upper.quarter(j, a0, a2);
                lower.quarter(j, a1, a3);
#pragma unroll
                for (int tile = 0; tile < kTiles; ++tile) {
                    const uint4 &eight = x_now[tile][j / 2];
                    multiply_16x8(sum[tile] + 4 * half, a0, a1, a2, a3, j % 2 ? eight.z : eight.x,
                                  j % 2 ? eight.w : eight.y);
                }
            }
#endif
        }
    }

    // The products of one warp with a stretch of a band; `after` is the turn with which the next one begins.
    __device__ void multiply_stretch(float (&sum)[kTiles][8], const Matrix &matrix, int band, int turn, int count,
                                     int after) {
        if (count == 0 && kTiles < 3) {
            load_x(x_even, after * kTurn);
        }
#pragma unroll 1
        for (; count > 0; --count) {
            const int next = count > 1 ? turn + kWarps : after;
            if (Weight::kBlocks) {
                const int block = band / matrix.block_bands * matrix.block_columns + turn / matrix.block_turns;
                const float scale = __ldg(matrix.block_scales + block);
                float products[kTiles][8] = {};
                multiply(products, turn, next);
#pragma unroll
                for (int index = 0; index < kTiles * 8; ++index) {
                    sum[index / 8][index % 8] = fmaf(scale, products[index / 8][index % 8], sum[index / 8][index % 8]);
                }
            } else {
                multiply(sum, turn, next);
            }
            turn = next;
        }
    }
};

// What the warps leave to the finishing one: their sums of a band, in turns here and there where memory allows.
template <int kTiles> struct Board {
    static constexpr int kPages = kTiles == 1 ? 2 : 1;
    static constexpr int kAll = (kWarps + 1) * 32;

    float sums[kPages][kWarps][kTiles * kTokens][kRows + 1]; // a word of padding: lanes would meet in one bank
    float gates[kTiles * kTokens][kRows + 1];

    __device__ static int written(int page) { return 1 + page; }
    __device__ static int read(int page) { return 1 + kPages + page; }
};

// The products of one of kWarps warps with the spans [first, end) of its block's share.
template <class Weight, int kTiles, bool kMixed>
__device__ __forceinline__ void multiply_spans(const Task &task, const Share<kMixed> &share, int first, int end, int parts,
                                               Board<kTiles> &board) {
    using Walk = Turns<Weight, kTiles, kMixed>;
    Course<kMixed> course(share, first, end, parts, (task.groups + Walk::kTurn - 1) / Walk::kTurn);
    Walk walk(task, course, dynamic_shared() + sizeof(Board<kTiles>));
    take_over(); // weights are on their way; what else is read, the launch before may have written
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (kTiles < 3) {
        walk.load_x(walk.x_even, course.turn * Walk::kTurn);
    }
    int bands = 0; // that were left to the finishing warp
#pragma unroll 1
    while (!course.done()) {
        int band;
        const Matrix &matrix = matrix_of(task, course.span.item, course.part, band);
        const int turn = course.turn, count = course.count;
        const bool begins = course.from == 0, finishes = course.finishes();
        course.next();
        float sum[kTiles][8];
#pragma unroll
        for (int i = 0; i < kTiles * 8; ++i) {
            sum[i / 8][i % 8] = 0.0f;
        }
        if (!begins) {
            Handed<kTiles>(task, static_cast<int>(blockIdx.x) - 1).receive_sums(task, sum);
        }
        walk.multiply_stretch(sum, matrix, band, turn, count, course.turn);
        if (!finishes) {
            Handed<kTiles>(task, blockIdx.x).send_sums(task, sum);
            continue;
        }
        const int page = bands % Board<kTiles>::kPages;
        if (bands >= Board<kTiles>::kPages) {
            wait_at(Board<kTiles>::read(page), Board<kTiles>::kAll);
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int token = tile * kTokens + walk.token(lane, i);
                if (token < task.tokens) {
                    board.sums[page][warp][token][walk.row(lane, i)] = sum[tile][i];
                }
            }
        }
        arrive_at(Board<kTiles>::written(page), Board<kTiles>::kAll);
        ++bands;
    }
    // The finishing warp announces itself after each band: every announcement finds its wait.
    for (int index = max(bands - Board<kTiles>::kPages, 0); index < bands; ++index) {
        wait_at(Board<kTiles>::read(index % Board<kTiles>::kPages), Board<kTiles>::kAll);
    }
}

// What the last warp does with the same spans: a lane a row, the warps' sums in order, and what follows the product.
template <class Weight, int kTiles, bool kMixed>
__device__ __forceinline__ void finish_spans(const Task &task, const Share<kMixed> &share, int first, int end, int parts,
                                             Board<kTiles> &board) {
    const int lane = threadIdx.x % 32, kTurn = Weight::kTurn;
    Course<kMixed> course(share, first, end, parts, (task.groups + kTurn - 1) / kTurn);
    take_over();
    int bands = 0;
#pragma unroll 1
    for (; !course.done(); course.next()) {
        if (course.part == 1 && course.span.begin >= course.turns) {
            __syncwarp(); // before it overwrites what other lanes may still use
            Handed<kTiles>(task, static_cast<int>(blockIdx.x) - 1).receive_gates(task, board.gates);
            __syncwarp();
        }
        if (!course.finishes()) {
            continue;
        }
        int band;
        const Matrix &matrix = matrix_of(task, course.span.item, course.part, band);
        const int row = band * kRows + lane, page = bands % Board<kTiles>::kPages;
        const bool there = row < matrix.rows;
        float scale = Weight::kUnit, residual[kTokens]; // of the first tokens, asked for before they are needed
        if (!Weight::kBlocks && there) {
            scale *= __ldg(matrix.scale + row * matrix.scale_stride);
        }
#pragma unroll
        for (int token = 0; token < kTokens; ++token) {
            residual[token] = 0.0f;
            if (matrix.residual != nullptr && there && token < task.tokens) {
                residual[token] = matrix.residual[static_cast<size_t>(token) * matrix.out_stride + row];
            }
        }
        wait_at(Board<kTiles>::written(page), Board<kTiles>::kAll);
#pragma unroll
        for (int token = 0; token < kTiles * kTokens; ++token) {
            if (token < task.tokens) {
                float value = board.sums[page][0][token][lane];
#pragma unroll
                for (int warp = 1; warp < kWarps; ++warp) {
                    value += board.sums[page][warp][token][lane];
                }
                value *= scale;
                float &gate = board.gates[token][lane];
                if (parts == 2 && course.part == 0) {
                    gate = value / (1.0f + expf(-value));
                } else if (there) {
                    const size_t place = static_cast<size_t>(token) * matrix.out_stride + row;
                    if (parts == 2) {
                        value *= gate;
                    } else if (matrix.residual != nullptr) {
                        value += token < kTokens ? residual[token % kTokens] : matrix.residual[place];
                    }
                    store(task, matrix, place, value);
                }
            }
        }
        arrive_at(Board<kTiles>::read(page), Board<kTiles>::kAll);
        ++bands;
        if (parts == 2 && course.part == 0 && course.span.end < 2 * course.turns) {
            __syncwarp();
            Handed<kTiles>(task, blockIdx.x).send_gates(task, board.gates);
            __syncwarp();
        }
    }
}

template <class Weight, int kTiles, bool kMixed>
__device__ __forceinline__ void run_spans(const Task &task, const Share<kMixed> &share, int first, int end) {
    Board<kTiles> &board = *reinterpret_cast<Board<kTiles> *>(dynamic_shared());
    const int parts = task.epilogue == kSwiglu ? 2 : 1;
    if (threadIdx.x / 32 < kWarps) {
        multiply_spans<Weight, kTiles>(task, share, first, end, parts, board);
    } else {
        finish_spans<Weight, kTiles>(task, share, first, end, parts, board);
    }
}

template <class Weight, int kTiles> __device__ __forceinline__ void run(const Task &task) {
    const Share<false> share(task);
    run_spans<Weight, kTiles>(task, share, 0, share.spans());
}

// Matrices of different encodings: spans of one encoding at a time.
template <int kTiles> __device__ __forceinline__ void run_any(const Task &task) {
    const Share<true> share(task);
    const auto encoding_of = [&](int index) {
        int band;
        return matrix_of(task, share.span(index).item, 0, band).encoding;
    };
    const int spans = share.spans();
#pragma unroll 1
    for (int first = 0, end; first < spans; first = end) {
        const int encoding = encoding_of(first);
        for (end = first + 1; end < spans && encoding_of(end) == encoding; ++end) {
        }
        switch (encoding) {
        case kNvfp4:
            run_spans<Fp4Lane, kTiles>(task, share, first, end);
            break;
        case kFp8:
            run_spans<Fp8Lane, kTiles>(task, share, first, end);
            break;
        case kFp8Blocks:
            run_spans<Fp8BlocksLane, kTiles>(task, share, first, end);
            break;
        default:
            run_spans<Half, kTiles>(task, share, first, end);
        }
        __syncthreads(); // before another ring stands where warps may still read this one
    }
}

// Blocks that a multiprocessor should hold.
__device__ constexpr int blocks_a_sm(int, bool) { return kWarps == 16 ? 1 : 2; }

#define LINEAR_KERNEL(name, call, blocks)                                                                              \
    extern "C" __global__ void __launch_bounds__((kWarps + 1) * 32, blocks) name(const __grid_constant__ Task task) {        \
        call(task);                                                                                                    \
    }
