// Decode linear: y[T, N] = x[T, K] W[N, K]^T for nvfp4 and fp8 weights in the v100 layouts, T = 1..24.
//
// A block owns one band of 32 rows of W and splits K over its warps; a lane holds one row of the band. Tensor cores
// multiply 8 tokens by 32 rows at a time in FP32; the warps' sums are added in the order of the warps, in shared memory.
// A token's bits depend on its own row of x and on W alone: every output is the same chain of FP32 additions for every
// T, and there are no atomics. docs/kernels.md says why it is cut this way.
#include "decode.cuh"
#include "volta.cuh"

constexpr int kRows = 32;    // rows of a band: the lanes of a warp
constexpr int kColumns = 16; // columns of a tile: one nvfp4 group
constexpr int kTokens = 8;   // tokens of one tensor-core product
constexpr int kWarps = 8;    // parts of K
constexpr int kDepth = 4;    // tiles that a warp loads before it uses the first
constexpr int kPairs = kColumns / 2;
constexpr float kUnit = 256.0f; // both decoders leave values times 2^-8

// A weight lane: what one lane loads of a tile, and its 16 values * 2^-8 as fp16 pairs in column order.
struct Nvfp4 {
    uint2 codes;
    unsigned char scale;

    __device__ static Nvfp4 load(const unsigned char *words, const unsigned char *scales, size_t lane) {
        // .cs: weights pass once, and should not push the activations out of the caches.
        return {__ldcs(reinterpret_cast<const uint2 *>(words) + lane), __ldcs(scales + lane)};
    }

    __device__ void decode(unsigned (&pairs)[kPairs]) const {
        // (code * 2^-14) * (scale * 2^-8 * 2^14): at most 10.5, at least 2^-18, six bits wide, so exact in fp16.
        const unsigned factor = multiply_pairs(scale_pair(scale), 0x74007400u);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            pairs[pair] = multiply_pairs(nvfp4_pair(codes.x, pair), factor);
            pairs[pair + 4] = multiply_pairs(nvfp4_pair(codes.y, pair), factor);
        }
    }
};

struct Fp8 {
    uint4 values;

    __device__ static Fp8 load(const unsigned char *words, const unsigned char *, size_t lane) {
        return {__ldcs(reinterpret_cast<const uint4 *>(words) + lane)};
    }

    __device__ void decode(unsigned (&pairs)[kPairs]) const {
        const unsigned words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
            pairs[pair] = fp8_pair(words[pair / 2], pair % 2);
        }
    }
};

// x: fp16 [tokens, 16 * groups]; words, block_scales: tiles [bands, groups, 32, ...], block_scales unread by fp8;
// scale: FP32, one number (scale_stride 0) or one a row (scale_stride 1); y: FP32 [tokens, 32 * bands].
// Grid: one block a band. kTiles = ceil(tokens / 8).
template <class Weight, int kTiles>
__device__ void linear(const unsigned short *x, const unsigned char *words, const unsigned char *block_scales,
                       const float *scale, int scale_stride, float *y, int tokens, int groups) {
    // One word of padding a row: else lanes that hold four tokens of one weight row would meet in one bank.
    __shared__ float partial[kWarps][kTiles * kTokens][kRows + 1];

    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int half_warp = lane / 16;
    const size_t band_lane = static_cast<size_t>(blockIdx.x) * groups * kRows + lane;
    const int own_token = lane % 4 + 4 * half_warp;

    float sum[kTiles][8] = {};
    for (int first = warp * kDepth; first < groups; first += kWarps * kDepth) {
        Weight stored[kDepth];
#pragma unroll
        for (int step = 0; step < kDepth; ++step) {
            const int group = first + step;
            stored[step] = group < groups ? Weight::load(words, block_scales, band_lane + group * kRows) : Weight{};
        }
        // A fence for the compiler: without it ptxas moves each load down to its use, and one is in flight at a time.
        __syncwarp();
#pragma unroll
        for (int step = 0; step < kDepth; ++step) {
            const int group = first + step;
            unsigned weight[kPairs];
            stored[step].decode(weight);
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                const int token = tile * kTokens + own_token;
                uint4 low = {}, high = {};
                if (token < tokens && group < groups) {
                    const uint4 *row = reinterpret_cast<const uint4 *>(x) + (token * groups + group) * 2;
                    low = __ldg(row);
                    high = __ldg(row + 1);
                }
                multiply_accumulate(sum[tile], low.x, low.y, weight[0], weight[1]);
                multiply_accumulate(sum[tile], low.z, low.w, weight[2], weight[3]);
                multiply_accumulate(sum[tile], high.x, high.y, weight[4], weight[5]);
                multiply_accumulate(sum[tile], high.z, high.w, weight[6], weight[7]);
            }
        }
    }

    const int quad = lane / 4 % 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int token = (lane & 1) + (i & 2) + 4 * half_warp;
            const int column = (i & 4) + (lane & 2) + (i & 1); // of the quad-pair's eight weight rows
            const int row = 4 * quad + column % 4 + 16 * (column / 4);
            partial[warp][tile * kTokens + token][row] = sum[tile][i];
        }
    }
    __syncthreads();

    const int rows = gridDim.x * kRows;
    for (int index = threadIdx.x; index < tokens * kRows; index += blockDim.x) {
        const int token = index / kRows;
        const int band_row = index % kRows;
        const int row = blockIdx.x * kRows + band_row;
        float total = partial[0][token][band_row];
#pragma unroll
        for (int part = 1; part < kWarps; ++part) {
            total += partial[part][token][band_row];
        }
        y[static_cast<size_t>(token) * rows + row] = total * kUnit * scale[row * scale_stride];
    }
}

#define LINEAR(name, Weight, tiles)                                                                                    \
    extern "C" __global__ void __launch_bounds__(kWarps * 32)                                                          \
        name(const unsigned short *x, const unsigned char *words, const unsigned char *block_scales,                   \
             const float *scale, int scale_stride, float *y, int tokens, int groups) {                                 \
        linear<Weight, tiles>(x, words, block_scales, scale, scale_stride, y, tokens, groups);                         \
    }

LINEAR(linear_nvfp4_8, Nvfp4, 1)
LINEAR(linear_nvfp4_16, Nvfp4, 2)
LINEAR(linear_nvfp4_24, Nvfp4, 3)
LINEAR(linear_fp8_8, Fp8, 1)
LINEAR(linear_fp8_16, Fp8, 2)
LINEAR(linear_fp8_24, Fp8, 3)
