// Linears of 25 and more tokens (wide.cuh), and the sum of their parts of K.
#include "wide.cuh"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#include "encodings_ada.cuh"
#include "wide_ampere.cuh"
namespace wide {
using Fp4 = AdaNvfp4;
using Byte = AdaFp8;
using ByteBlocks = AdaFp8Blocks;
using Plain = Half;
} // namespace wide
#else
#include "encodings.cuh"
namespace wide {
using Fp4 = Nvfp4;
using Byte = Fp8;
using ByteBlocks = Fp8Blocks;
using Plain = Half;
} // namespace wide
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#include "wide_ampere.cuh"
namespace wide {
template <class Weight, int kTiles> using Steps = AmpereSteps<Weight, kTiles>;
}
#else
#include "wide_volta.cuh"
namespace wide {
template <class Weight, int kTiles> using Steps = VoltaSteps<Weight, kTiles>;
}
#endif

namespace wide {

// Adds the products of turns first .. end of two bands.
template <class Weight, int kTiles>
__device__ __forceinline__ void multiply(const Task &task, int number, int first_token, int first, int end,
                                         unsigned char *memory, float (&sum)[kBands][kTiles][8]) {
    Steps<Weight, kTiles> steps(task, number, first_token, first, end, memory);
#pragma unroll 1
    for (int turn = first; turn < end; ++turn) {
        if constexpr (Weight::kBlocks) {
            float products[kBands][kTiles][8] = {};
            steps.multiply(products);
            const int step = min(kGroups * turn + static_cast<int>(threadIdx.x) / kGroupThreads,
                                 (task.groups - 1) / kStepTiles); // beyond the last one products are zero
#pragma unroll
            for (int half = 0; half < kBands; ++half) {
                const Matrix &matrix = *steps.matrix[half];
                const int block = steps.band[half] / matrix.block_bands * matrix.block_columns + step / matrix.block_turns;
                const float scale = __ldg(matrix.block_scales + block);
#pragma unroll
                for (int index = 0; index < kTiles * 8; ++index) {
                    float &own = sum[half][index / 8][index % 8];
                    own = fmaf(scale, products[half][index / 8][index % 8], own);
                }
            }
        } else {
            steps.multiply(sum);
        }
    }
}

template <class Weight, int kTiles>
__device__ __forceinline__ void run(const Task &task, float *partial, int token_blocks) {
    constexpr int kWidth = kTiles * kTokens;
    using Order = Steps<Weight, kTiles>;
    DYNAMIC_SHARED(memory);
    const Shares shares(task, gridDim.x / token_blocks);
    const int worker = blockIdx.x / token_blocks, token_block = blockIdx.x % token_blocks;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
    for (int n = 0; n < shares.whole + kSlots; ++n) {
        const Part part(shares, worker, n);
        if (part.first == part.end) {
            continue;
        }
        const int number = part.tile * kTileBands + warp % kGroupWarps * kBands, first_token = token_block * kWidth;
        float sum[kBands][kTiles][8] = {};
        multiply<Weight, kTiles>(task, number, first_token, part.first, part.end, memory, sum);
        // Through shared memory, so that a warp's stores are whole rows.
        float *rows = reinterpret_cast<float *>(memory) + warp % kGroupWarps * kOutFloats;
        float *own = rows + warp / kGroupWarps * kGroupWarps * kOutFloats;
        float *out = nullptr;
        if (part.slot >= 0) {
            out = partial + partial_place(worker, part.slot, token_blocks, token_block, kWidth) +
                  warp % kGroupWarps * kBands * kRows;
        }
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            __syncthreads(); // what stood there is read
#pragma unroll
            for (int index = 0; index < kBands * 8; ++index) {
                const int half = index / 8, i = index % 8;
                own[Order::token(lane, i) * kOutPitch + half * kRows + Order::row(lane, i)] =
                    sum[half][tile][i] * Weight::kUnit;
            }
            __syncthreads();
            hand_over(task, number, out, rows, first_token + tile * kTokens, tile * kTokens);
        }
        __syncthreads(); // before the next part's copies
    }
}

} // namespace wide

// partial: FP32 [blocks / token_blocks, 2, token_blocks, width, 256]. Grid: token blocks of a worker next to each other.
#define WIDE(name, Weight, tiles)                                                                                      \
    extern "C" __global__ void __launch_bounds__(wide::kThreads, 1)                                                    \
        name(const __grid_constant__ Task task, float *partial, int token_blocks) {                                    \
        wide::run<wide::Weight, tiles>(task, partial, token_blocks);                                                   \
    }

WIDE(wide_nvfp4_32, Fp4, 4)
WIDE(wide_nvfp4_48, Fp4, 6)
WIDE(wide_nvfp4_64, Fp4, 8)
WIDE(wide_fp8_32, Byte, 4)
WIDE(wide_fp8_48, Byte, 6)
WIDE(wide_fp8_64, Byte, 8)
WIDE(wide_fp8_blocks_32, ByteBlocks, 4)
WIDE(wide_half_32, Plain, 4)

extern "C" __global__ void __launch_bounds__(wide::kTileRows)
    wide_sum(const __grid_constant__ Task task, const float *partial, int token_blocks, int workers, int width) {
    wide::add_up(task, partial, token_blocks, workers, width);
}
