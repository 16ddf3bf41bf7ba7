// Compresses in a grid-stride loop over groups. A row of C values has (C + 15) / 16 groups.
extern "C" __global__ void __launch_bounds__(256) compress(e4m3* __restrict__ codes, unsigned char* __restrict__ scale_inv,
                                                           const X* __restrict__ x, u64 rows, int C) {
    const int groups = (C + 15) / 16;
    const bool wide = C % 16 == 0 && aligned(x, codes);
    for (u64 g = grid_start(); g < rows * groups; g += grid_step()) {
        const int column = g % groups * 16, width = min(16, C - column);
        const u64 at = g / groups * C + column;
        Eight<X> v[2] = {};
        if (wide) {
            v[0] = load8(x + at);
            v[1] = load8(x + at + 8);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) if (i < width) v[i / 8].at[i % 8] = x[at + i];
        }
        const u32 exponent = smallest_scale_inv(max(largest_bits8(v[0]), largest_bits8(v[1])));
        const Eight<e4m3> code[2] = {compress8(v[0], exponent), compress8(v[1], exponent)};
        scale_inv[g] = exponent;
        if (wide) {
            *(uint4*)(codes + at) = make_uint4(code[0].words.x, code[0].words.y, code[1].words.x, code[1].words.y);
        } else {
#pragma unroll
            for (int i = 0; i < 16; i++) if (i < width) codes[at + i] = code[i / 8].at[i % 8];
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) decompress(const e4m3* __restrict__ codes, const unsigned char* __restrict__ scale_inv,
                                                             X* __restrict__ y, u64 rows, int C) {
    const Compressed<X> x = {codes, scale_inv, C};
    const int groups = x.groups();
    const bool wide = C % 16 == 0 && aligned(y, codes);
    for (u64 g = grid_start(); g < rows * groups; g += grid_step()) {
        const u64 row = g / groups;
        const int column = g % groups * 16;
        if (wide) {
            store8(y + row * C + column, x.values(x.fetch(row, column)));
            store8(y + row * C + column + 8, x.values(x.fetch(row, column + 8)));
        } else {
            for (int c = column; c < min(C, column + 16); c++) y[row * C + c] = x.value(row, c);
        }
    }
}
