// The sm_70 instructions that C++ cannot name. fp16 pairs travel as unsigned bit patterns.
#pragma once

// Product of fp16 pairs, subnormals kept.
__device__ __forceinline__ unsigned multiply_pairs(unsigned a, unsigned b) {
    unsigned product;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// Four 8 x 8 x 4 products at once, one a quad-pair (lanes 4q..4q+3 and 16+4q..16+4q+3): sum += a b, fp16 in, FP32 out.
// a: lane l holds row (l & 3) + (l < 16 ? 0 : 4), its four columns in two pairs.
// b: lane l holds column (l & 3) + (l < 16 ? 0 : 4), its four rows in two pairs.
// sum[i]: row (l & 1) + (i & 2) + (l < 16 ? 0 : 4), column (i & 4) + (l & 2) + (i & 1).
// (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type")
__device__ __forceinline__ void multiply_accumulate(float (&sum)[8], unsigned a0, unsigned a1, unsigned b0,
                                                    unsigned b1) {
    asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3]), "+f"(sum[4]), "+f"(sum[5]), "+f"(sum[6]), "+f"(sum[7])
        : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
}
