// One thread per element of y `[T, F]`, in strides; a row of x holds F gates, then F ups.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

extern "C" __global__ void swiglu(X* y, const X* x, u64 n, int F) {
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const X* row = x + i / F * 2 * F;
        const float gate = load(row[i % F]);
        store(&y[i], gate * sigmoid(gate) * load(row[F + i % F]));
    }
}

extern "C" __global__ void swiglu_backward(X* dx, const X* dy, const X* x, u64 n, int F) {
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const u64 at = i / F * 2 * F + i % F;
        const float gate = load(x[at]), up = load(x[at + F]), d = load(dy[i]), s = sigmoid(gate);
        store(&dx[at], d * up * s * (1.0f + gate * (1.0f - s)));
        store(&dx[at + F], d * (gate * s));
    }
}
