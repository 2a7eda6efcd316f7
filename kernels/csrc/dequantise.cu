// Tiles to plain fp16, for products with more tokens than the decode linear takes: out[r, c] = W[r, c] * s[r] * factor.
#include "encodings.cuh"

// A warp takes four tiles of one band: lane q of a row's four lanes has tile q. It reads whole tiles, and writes each row's
// 64 columns (128 bytes) together. Bands first_band .. first_band + gridDim.y - 1 go to out [32 * gridDim.y, K].
template <class Weight> __device__ __forceinline__ void dequantise(const Matrix &matrix, unsigned short *out, int groups, int first_band, float factor) {
    const int lane = threadIdx.x % 32;
    const int group = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * kTurn + lane % 4;
    if (group >= groups) {
        return;
    }
    const int band = first_band + blockIdx.y;
    const size_t tile = static_cast<size_t>(band) * groups + group;
    float block_scale = 1.0f;
    if (Weight::kBlocks) {
        block_scale = matrix.block_scales[band / matrix.block_bands * matrix.block_columns + group / kTurn / matrix.block_turns];
    }
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        const int row = part * 8 + lane / 4;
        Weight weight = Weight::load(matrix.words, matrix.group_scales, tile * kRows + row);
        weight.prepare();
        const int matrix_row = band * kRows + row;
        float scale = block_scale;
        if (!Weight::kBlocks) {
            scale = matrix_row < matrix.rows ? matrix.scale[matrix_row * matrix.scale_stride] : 0.0f;
        }
        scale *= Weight::kUnit * factor;
        unsigned words[8];
#pragma unroll
        for (int pair = 0; pair < 8; ++pair) {
            const unsigned bits = weight.pair(pair);
            words[pair] = half_bits(half_value(bits & 0xFFFF) * scale) |
                          static_cast<unsigned>(half_bits(half_value(bits >> 16) * scale)) << 16;
        }
        uint4 *place = reinterpret_cast<uint4 *>(out + (static_cast<size_t>(blockIdx.y * kRows + row) * groups + group) * kColumns);
        place[0] = {words[0], words[1], words[2], words[3]};
        place[1] = {words[4], words[5], words[6], words[7]};
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
