// One block per row; threads stride over its C channels.
extern "C" __global__ void rmsnorm(X* y, float* rstd, const X* x, const X* weight, int C, float eps) {
    const u64 row = (u64)blockIdx.x * C;
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) { float v = load(x[row + c]); sum += v * v; }
    const float r = 1.0f / sqrtf(block_sum(sum) / C + eps);      // as in cpu.rs; rsqrtf rounds differently
    for (int c = threadIdx.x; c < C; c += blockDim.x) store(&y[row + c], load(x[row + c]) * r * load(weight[c]));
    if (threadIdx.x == 0) rstd[blockIdx.x] = r;
}

// One block per row.
extern "C" __global__ void rmsnorm_dx(X* dx, const X* dy, const X* x, const X* weight, const float* rstd, int C) {
    const u64 row = (u64)blockIdx.x * C;
    const float r = rstd[blockIdx.x];
    float sum = 0.0f;
    for (int c = threadIdx.x; c < C; c += blockDim.x) sum += load(dy[row + c]) * load(weight[c]) * (load(x[row + c]) * r);
    const float projection = block_sum(sum) / C;
    for (int c = threadIdx.x; c < C; c += blockDim.x)
        store(&dx[row + c], r * (load(dy[row + c]) * load(weight[c]) - load(x[row + c]) * r * projection));
}

// Grid (columns / 256, chunks of rows): each thread sums one channel of one chunk.
extern "C" __global__ void rmsnorm_dweight(float* partial, const X* dy, const X* x, const float* rstd, int rows, int C, int chunk) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    const int end = min(rows, (int)(blockIdx.y + 1) * chunk);
    float sum = 0.0f;
    for (int r = blockIdx.y * chunk; r < end; r++) sum += load(dy[(u64)r * C + c]) * (load(x[(u64)r * C + c]) * rstd[r]);
    partial[(u64)blockIdx.y * C + c] = sum;
}

// Grid (columns / 256): adds the chunks in order.
extern "C" __global__ void add_partial_sums(float* sum, const float* partial, int C, int chunks) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    float total = sum[c];
    for (int i = 0; i < chunks; i++) total += partial[(u64)i * C + c];
    sum[c] = total;
}
