// One thread per element, in strides.
extern "C" __global__ void cast(TO* y, const FROM* x, u64 n) {
    for (u64 i = grid_start(); i < n; i += grid_step()) store(&y[i], load(x[i]));
}
