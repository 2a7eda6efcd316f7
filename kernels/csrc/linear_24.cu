// The decode linear for up to 24 tokens.
#include "linear.cuh"

LINEARS(24, 3)
SLICED(24, 3)
