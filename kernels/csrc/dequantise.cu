// Tiles to plain fp16, for products with more tokens than the decode linear takes: out[r, c] = W[r, c] * s[r] * factor.
#include "encodings.cuh"

constexpr int kTiles = 4; // that a warp takes

// A warp takes four tiles of one band, four rows at a time: eight lanes a row, each half a row of a tile, so that a row's
// 64 columns are written as one run of 128 bytes. Bands from first_band on go to out [32 * gridDim.y, 16 * groups].
template <class Weight>
__device__ __forceinline__ void dequantise(const Matrix &matrix, unsigned short *out, int groups, int first_band,
                                           float factor) {
    const int lane = threadIdx.x % 32;
    const int group = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * kTiles + lane % 8 / 2;
    if (group >= groups) {
        return;
    }
    const int band = first_band + blockIdx.y;
    const size_t tile = static_cast<size_t>(band) * groups + group;
    if (Weight::kBlocks) {
        const int block = band / matrix.block_bands * matrix.block_columns + group / kTiles / matrix.block_turns;
        factor *= matrix.block_scales[block];
    }
    factor *= Weight::kUnit;
#pragma unroll
    for (int part = 0; part < kRows / 4; ++part) {
        const int row = part * 4 + lane / 8;
        const int matrix_row = band * kRows + row;
        Weight weight = Weight::load(matrix.words, matrix.group_scales, tile * kRows + row);
        weight.prepare();
        if (lane % 2) {
            weight.drop_lower();
        }
        float scale = factor;
        if (!Weight::kBlocks) {
            scale *= matrix_row < matrix.rows ? matrix.scale[matrix_row * matrix.scale_stride] : 0.0f;
        }
        unsigned words[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const unsigned bits = weight.pair(pair);
            words[pair] = half_pair(half_value(bits) * scale, half_value(bits >> 16) * scale);
        }
        const size_t place = static_cast<size_t>(blockIdx.y * kRows + row) * groups + group;
        reinterpret_cast<uint4 *>(out)[2 * place + lane % 2] = {words[0], words[1], words[2], words[3]};
    }
}

#define DEQUANTISE(name, Weight)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256)                                                                  \
        name(const __grid_constant__ Matrix matrix, unsigned short *out, int groups, int first_band, float factor) {   \
        dequantise<Weight>(matrix, out, groups, first_band, factor);                                                   \
    }

DEQUANTISE(dequantise_nvfp4, Nvfp4)
DEQUANTISE(dequantise_fp8, Fp8)
DEQUANTISE(dequantise_fp8_blocks, Fp8Blocks)
DEQUANTISE(dequantise_half, Half)
