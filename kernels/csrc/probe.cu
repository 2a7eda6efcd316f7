// Kernels that measure the machine and compute nothing: a node of a graph, and a gate that holds a stream.

// Nanoseconds of a clock that all multiprocessors share; its steps may be a microsecond long.
__device__ __forceinline__ unsigned long long now() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

extern "C" __global__ void empty() {}

// Keeps the stream busy, so that what is queued behind it starts without waiting for the host.
extern "C" __global__ void hold(int microseconds) {
    const unsigned long long begin = now();
    while (now() - begin < 1000ULL * static_cast<unsigned long long>(microseconds)) {
    }
}
