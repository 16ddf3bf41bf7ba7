// Casts in a grid-stride loop over eights. The remainder, and unaligned views, are cast element by element.
extern "C" __global__ void cast(TO* __restrict__ y, const FROM* __restrict__ x, u64 n) {
    const u64 eights = aligned(y, x) ? n / 8 : 0;
    for (u64 g = grid_start(); g < eights; g += grid_step()) {
        float v[8];
        unpack8(load8(x + 8 * g), v);
        store8(y + 8 * g, pack8<TO>(v));
    }
    for (u64 i = 8 * eights + grid_start(); i < n; i += grid_step()) store(&y[i], load(x[i]));
}
