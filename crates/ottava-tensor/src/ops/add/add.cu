// One thread per element, in strides.
extern "C" __global__ void add(X* y, const X* a, const X* b, u64 n) {
    for (u64 i = grid_start(); i < n; i += grid_step()) store(&y[i], load(a[i]) + load(b[i]));
}
