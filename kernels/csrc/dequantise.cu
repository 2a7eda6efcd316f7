// Tiles to plain fp16, for products with more tokens than the decode linear takes: out[r, c] = W[r, c] * s[r] * factor.
#include "encodings.cuh"

constexpr int kTiles = 4; // that a warp takes
constexpr int kParts = kRows / 4;

// A warp takes four tiles of one band, four rows at a time: eight lanes a row, each half a row of a tile, so that a row's
// 64 columns are written as one run of 128 bytes. Bands from first_band on go to out [32 * bands, 16 * groups]. Words of all parts
// are asked for before any is written: the compiler moves no load before a store that might change what it reads.
template <class Weight>
__device__ __forceinline__ void dequantise(const Matrix &matrix, unsigned short *out, int groups, int first_band,
                                           int bands, float factor) {
    const int lane = threadIdx.x % 32;
    const int quads = (groups + kTiles - 1) / kTiles;
    const int warps = blockDim.x / 32;
    for (int item = blockIdx.x * warps + threadIdx.x / 32; item < bands * quads; item += gridDim.x * warps) {
        const int own = item / quads, group = (item - own * quads) * kTiles + lane % 8 / 2;
        if (group >= groups) {
            continue;
        }
        const int band = first_band + own;
        const size_t tile = static_cast<size_t>(band) * groups + group;
        uint4 *to = reinterpret_cast<uint4 *>(out) + 2 * (static_cast<size_t>(own * kRows + lane / 8) * groups + group) + lane % 2;
        float unit = factor * Weight::kUnit;
        if (Weight::kBlocks) {
            const int block = band / matrix.block_bands * matrix.block_columns + group / kTiles / matrix.block_turns;
            unit *= matrix.block_scales[block];
        }
        Weight weights[kParts];
        float scales[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int row = part * 4 + lane / 8, matrix_row = band * kRows + row;
            weights[part] = Weight::load_half(matrix.words, matrix.group_scales, tile * kRows + row, lane % 2);
            scales[part] = unit;
            if (!Weight::kBlocks) {
                scales[part] *= matrix_row < matrix.rows ? matrix.scale[matrix_row * matrix.scale_stride] : 0.0f;
            }
        }
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            Weight &weight = weights[part];
            weight.prepare();
            unsigned words[4];
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const unsigned bits = weight.pair(pair);
                words[pair] = half_pair(half_value(bits) * scales[part], half_value(bits >> 16) * scales[part]);
            }
            *to = {words[0], words[1], words[2], words[3]};
            to += 8 * static_cast<size_t>(groups); // four rows on
        }
    }
}

#define DEQUANTISE(name, Weight)                                                                                       \
    extern "C" __global__ void __launch_bounds__(128, 8)                                                                \
        name(const __grid_constant__ Matrix matrix, unsigned short *out, int groups, int first_band, int bands,        \
             float factor) {                                                                                           \
        dequantise<Weight>(matrix, out, groups, first_band, bands, factor);                                            \
    }

DEQUANTISE(dequantise_nvfp4, Nvfp4)
DEQUANTISE(dequantise_fp8, Fp8)
DEQUANTISE(dequantise_fp8_blocks, Fp8Blocks)
DEQUANTISE(dequantise_half, Half)
