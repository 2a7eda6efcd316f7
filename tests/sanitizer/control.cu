// What each tool must report: "0 found" of the others means something only if these are found.

extern "C" __global__ void control_read(const float *in, float *out, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        out[i] = 2.0f * in[i];
    }
}

// One element past `count`.
extern "C" __global__ void control_past(float *out, int count) {
    if (threadIdx.x == 0) {
        out[count] = 1.0f;
    }
}

extern "C" __global__ void control_read_past(const float *in, float *out, int count) {
    if (threadIdx.x == 0) {
        out[0] = in[count];
    }
}

// One float past the dynamic shared memory that the launch has asked for.
extern "C" __global__ void control_shared_past(float *out, int count) {
    extern __shared__ float room[];
    room[threadIdx.x] = out[threadIdx.x];
    if (threadIdx.x == 0) {
        room[count] = 1.0f;
    }
    __syncthreads();
    out[threadIdx.x] = room[threadIdx.x ^ 1];
}

// Other warps' words without a barrier.
extern "C" __global__ void control_race(int *out) {
    __shared__ int room[256];
    room[threadIdx.x] = out[threadIdx.x];
    out[threadIdx.x] = room[255 - threadIdx.x];
}

// With it: nothing to report.
extern "C" __global__ void control_sound(int *out) {
    __shared__ int room[256];
    room[threadIdx.x] = out[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = room[255 - threadIdx.x];
}

// Other warps' words, copied asynchronously, waited for by the warp that asked but not by a barrier.
extern "C" __global__ void control_race_async(const int4 *in, int4 *out) {
    __shared__ int4 room[256];
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(room + threadIdx.x));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(at), "l"(in + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;\n" ::: "memory");
    out[threadIdx.x] = room[255 - threadIdx.x];
}

// One's own word, copied asynchronously and not waited for.
extern "C" __global__ void control_unawaited(const int4 *in, int4 *out) {
    __shared__ int4 room[256];
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(room + threadIdx.x));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(at), "l"(in + threadIdx.x) : "memory");
    out[threadIdx.x] = room[threadIdx.x];
    asm volatile("cp.async.wait_all;\n" ::: "memory");
}
