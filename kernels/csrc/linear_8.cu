// The decode linear for up to 8 tokens.
#include "linear.cuh"

LINEARS(8, 1)
DEEP
SLICES
