// Tiles to plain fp16, for products with more tokens than the decode linear takes: out[r, c] = W[r, c] * s[r] * factor.
#include "encodings.cuh"
#if __CUDA_ARCH__ >= 800
#include "ampere.cuh"
#endif

constexpr int kTiles = 4; // that a warp takes
constexpr int kParts = kRows / 4;

__device__ __forceinline__ void store(uint4 *to, uint4 words) {
#if __CUDA_ARCH__ >= 800
    store_to_stay(to, words);
#else
    *to = words;
#endif
}

// A warp takes four tiles of one band, four rows at a time: eight lanes a row, each half a row of a tile, so that a row's
// 64 columns are written as one run of 128 bytes. Bands from first_band on go to out [32 * bands, 16 * groups]. Words of all parts
// are asked for before any is written: the compiler moves no load before a store that might change what it reads. Blocks go from
// the end to the beginning, and half of what they write is to stay in the second-level cache (sm_80 and newer): a product begins
// with the first rows.
template <class Weight>
__device__ __forceinline__ void dequantise(const Matrix &matrix, unsigned short *out, int groups, int first_band,
                                           int bands, float factor) {
    const int lane = threadIdx.x % 32;
    const int quads = (groups + kTiles - 1) / kTiles;
    const int warps = blockDim.x / 32;
    for (int item = (gridDim.x - 1 - blockIdx.x) * warps + threadIdx.x / 32; item < bands * quads; item += gridDim.x * warps) {
        const int own = item / quads, wanted = (item - own * quads) * kTiles + lane % 8 / 2;
        const int group = wanted < groups ? wanted : groups - 1; // past the end it only hands its scale on
        const int band = first_band + own;
        const size_t tile = static_cast<size_t>(band) * groups + group;
        uint4 *to = reinterpret_cast<uint4 *>(out) + 2 * (static_cast<size_t>(own * kRows + lane / 8) * groups + group) + lane % 2;
        float unit = factor * Weight::kUnit;
        if (Weight::kBlocks) {
            const int block = band / matrix.block_bands * matrix.block_columns + group / kTiles / matrix.block_turns;
            unit *= matrix.block_scales[block];
        }
        Weight weights[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            weights[part] = Weight::load_half(matrix.words, matrix.group_scales, tile * kRows + part * 4 + lane / 8, lane % 2);
        }
        if (!Weight::kBlocks) { // of row `lane`
            const int row = band * kRows + lane;
            unit *= row < matrix.rows ? matrix.scale[row * matrix.scale_stride] : 0.0f;
        }
        float scales[kParts];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            scales[part] = Weight::kBlocks ? unit : from_lane(unit, part * 4 + lane / 8);
        }
        if (wanted >= groups) {
            continue;
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
            store(to, {words[0], words[1], words[2], words[3]});
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
