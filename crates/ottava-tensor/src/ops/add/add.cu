// Adds in a grid-stride loop over eights. The remainder, and unaligned views, are added element by element.
extern "C" __global__ void add(X* __restrict__ y, const X* __restrict__ a, const X* __restrict__ b, u64 n) {
    const u64 eights = aligned(y, a, b) ? n / 8 : 0;
    for (u64 g = grid_start(); g < eights; g += grid_step()) {
        const Eight<X> u = load8(a + 8 * g), v = load8(b + 8 * g);
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = load(u.at[i]) + load(v.at[i]);
        store8(y + 8 * g, pack8<X>(sum));
    }
    for (u64 i = 8 * eights + grid_start(); i < n; i += grid_step()) store(&y[i], load(a[i]) + load(b[i]));
}
