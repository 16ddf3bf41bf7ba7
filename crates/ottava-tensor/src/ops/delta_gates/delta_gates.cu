// The gates are stored in F32, so the sigmoid is exact in all types.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Grid-stride loop over the elements of all tokens. The pointers are not `__restrict__`, because reads could then move before the wait.
extern "C" __global__ void delta_gates(float* g, float* beta, const X* b, const X* a, const float* a_log, const float* dt_bias, u64 n,
                                       int heads) {
    start_successors();
    wait_for_predecessors();
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const int head = i % heads;
        g[i] = -(expf(a_log[head]) * softplus(load(a[i]) + dt_bias[head]));
        beta[i] = sigmoid(load(b[i]));
    }
}

// Grid (chunks of CHUNK tokens, heads / 32), 8 warps. A lane has a head, and every eighth token of the chunk. The sums of the warps are added in order,
// and written to the row of the chunk of the partial sums, `[chunks, heads]`.
extern "C" __global__ void __launch_bounds__(256)
    delta_gates_backward(X* db, X* da, float* partial_a_log, float* partial_dt_bias, const float* dg, const float* dbeta, const X* a,
                         const float* a_log, const float* dt_bias, const float* g, const float* beta, int tokens, int heads) {
    __shared__ float sums[2][8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y * 32 + lane;
    float of_a_log = 0.0f, of_dt_bias = 0.0f;
    if (head < heads) {
        const float rate = expf(a_log[head]), bias = dt_bias[head];
        const int end = min(tokens, (int)(blockIdx.x + 1) * CHUNK);
        for (int t = blockIdx.x * CHUNK + warp; t < end; t += 8) {
            const u64 i = (u64)t * heads + head;
            store(&db[i], dbeta[i] * beta[i] * (1.0f - beta[i]));
            const float d = -(dg[i] * rate * sigmoid(load(a[i]) + bias));
            store(&da[i], d);
            of_a_log += dg[i] * g[i];
            of_dt_bias += d;
        }
    }
    sums[0][warp][lane] = of_a_log;
    sums[1][warp][lane] = of_dt_bias;
    __syncthreads();
    if (warp > 1 || head >= heads) return;
    float total = 0.0f;
    for (int w = 0; w < 8; w++) total += sums[warp][w][lane];
    (warp == 0 ? partial_a_log : partial_dt_bias)[(u64)blockIdx.x * heads + head] = total;
}
