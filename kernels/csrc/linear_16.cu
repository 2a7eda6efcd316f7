// The decode linear for up to 16 tokens.
#include "linear.cuh"

LINEARS(16, 2)
SLICED(16, 2)
