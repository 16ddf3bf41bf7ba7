// One thread per entry. The rule is in mod.rs.
extern "C" __global__ void delayed_scaling(float* amax, float* history, float* scale, const float* largest, i64* wait,
                                           i64* non_finite, int n, int window, int most_recent, int keep, int interval,
                                           float headroom) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float newest = amax[i];
    amax[i] = 0.0f;
    const bool due = wait[i] == 0;
    if (!due) wait[i]--;
    const bool finite = fabsf(newest) <= 3.402823466e38f;
    if (!finite) non_finite[i]++;
    if (newest == 0.0f || (!finite && !keep)) return;
    float reduced = newest;
    for (int row = 1; row < window; row++) {
        const float old = history[(u64)row * n + i];
        if (!most_recent) reduced = fmaxf(reduced, old);
        history[(u64)(row - 1) * n + i] = old;
    }
    history[(u64)(window - 1) * n + i] = newest;
    history[i] = 0.0f;
    if (due && reduced > 0.0f && reduced <= 3.402823466e38f) {
        scale[i] = fminf(largest[i] * headroom / reduced, 3.402823466e38f);
        wait[i] = interval - 1;
    }
}
