// A kernel that only reads: the bandwidth that others are held against.
// Reads `count` blocks of 16 bytes; writes a word if all bits come out as they never do, so that loads cannot be dropped.
extern "C" __global__ void __launch_bounds__(512) read_plain(const uint4 *data, unsigned *never, int count) {
    const int step = gridDim.x * blockDim.x;
    unsigned mix = 0;
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    for (; index + 3 * step < count; index += 4 * step) {
        uint4 part[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            part[i] = __ldcs(data + index + i * step);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            mix ^= part[i].x ^ part[i].y ^ part[i].z ^ part[i].w;
        }
    }
    for (; index < count; index += step) {
        const uint4 part = __ldcs(data + index);
        mix ^= part.x ^ part.y ^ part.z ^ part.w;
    }
    if (mix == 0x9E3779B9u) {
        never[0] = mix;
    }
}
