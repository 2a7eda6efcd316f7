// Gated delta rule for a prompt, 64 tokens at a time, on tensor cores (the WY form of Gated Delta Networks, Yang et al.
// 2024). With G the running sum of the log decay within a chunk that starts from the state S, the updates u solve
//   u_i + beta_i sum_{j<i} e^(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - e^(G_i) S k_i),
// so u = U - W S^T with U and W known before S. Three kernels: the convolution; then, for every chunk and head at once,
// the inverse of the system, W, U and the weights of u in the outputs; then the chunks one after another, a block for 32
// rows of a head's state. Operands are fp16, sums, inverse and state FP32. docs/kernels/delta.md.
#include "chunks_convolve.cuh"
#include "chunks_prepare.cuh"
#include "chunks_scan.cuh"
