// Writes the rows of each chunk and the chunks of each segment. One block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024) chunk_table(int2* of, int2* of_segments, const int* at, int count, int rows, int chunks) {
    __shared__ int warps[32];
    const Segments segments = {at, count, rows};
    int before = 0;
    for (int base = 0; base < count; base += 1024) {
        const int n = base + threadIdx.x, lane = threadIdx.x % 32;
        const int first = n < count ? segments.first(n) : 0, length = n < count ? segments.end(n) - first : 0;
        const int own = (length + CHUNK - 1) / CHUNK;
        int sum = own;
        for (int offset = 1; offset < 32; offset *= 2) {
            const int other = __shfl_up_sync(0xFFFFFFFF, sum, offset);
            if (lane >= offset) sum += other;
        }
        __syncthreads();
        if (lane == 31) warps[threadIdx.x / 32] = sum;
        __syncthreads();
        int all = 0;
        for (int w = 0; w < 32; w++) {
            if (w == threadIdx.x / 32) sum += all;
            all += warps[w];
        }
        const int chunk = before + sum - own;
        if (n < count) of_segments[n] = make_int2(chunk, own);
        for (int i = 0; i < own; i++) of[chunk + i] = make_int2(first + i * CHUNK, min(CHUNK, length - i * CHUNK));
        before += all;
    }
    for (int c = before + threadIdx.x; c < chunks; c += 1024) of[c] = make_int2(0, 0);
}
