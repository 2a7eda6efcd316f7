// Decode linear: y[T, N] = x[T, K] W[N, K]^T for T = 1..24, several matrices a launch, with what follows them.
//
// A block owns bands of 32 rows of W and splits K over its warps, whose sums are added in the order of the warps, in
// shared memory. A token's bits depend on its own row of x and on W alone: every output is the same chain of FP32
// additions for every T and every grid, and no sum is atomic. docs/kernels/linear.md says why it is cut this way.
#pragma once
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#include "encodings_ada.cuh"
using Fp4Lane = AdaNvfp4;
using Fp8Lane = AdaFp8;
using Fp8BlocksLane = AdaFp8Blocks;
#else
#include "encodings.cuh"
using Fp4Lane = Nvfp4;
using Fp8Lane = Fp8;
using Fp8BlocksLane = Fp8Blocks;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#include "linear_ampere.cuh"
#else
#include "linear_volta.cuh"
#endif

#define LINEARS(tokens, tiles)                                                                                         \
    LINEAR_KERNEL(linear_nvfp4_##tokens, (run<Fp4Lane, tiles>), blocks_a_sm(tiles, false))                             \
    LINEAR_KERNEL(linear_fp8_##tokens, (run<Fp8Lane, tiles>), blocks_a_sm(tiles, false))                               \
    LINEAR_KERNEL(linear_fp8_blocks_##tokens, (run<Fp8BlocksLane, tiles>), blocks_a_sm(tiles, tiles == 3))             \
    LINEAR_KERNEL(linear_half_##tokens, (run<Half, tiles>), blocks_a_sm(tiles, true))                                  \
    LINEAR_KERNEL(linear_any_##tokens, run_any<tiles>, blocks_a_sm(tiles, true))
