// `C` is the type of the codes, `X` that of the values `[rows, columns]`. Threads take eight neighbouring columns at a time.
extern "C" __global__ void __launch_bounds__(256)
dequantize(X* y, const C* codes, const float* scales, u64 rows, u64 columns, u64 row_step, u64 column_step, u64 rows_shared,
           u64 columns_shared, u64 row_scales, u64 column_scales) {
    const u64 per_row = (columns + 7) / 8;
    const bool wide_codes = column_step == 1 && row_step % 8 == 0 && aligned(codes), wide = columns % 8 == 0 && aligned(y);
    for (u64 g = grid_start(); g < rows * per_row; g += grid_step()) {
        const u64 row = g / per_row, column = g % per_row * 8, at = row * row_step + column * column_step;
        const int valid = columns - column < 8 ? columns - column : 8;
        Eight<C> eight = {};
        if (column_step == 1) {
            eight = fetch8(codes + at, valid, wide_codes && valid == 8);
        } else {
            for (int i = 0; i < valid; i++) eight.at[i] = codes[at + i * column_step];
        }
        float v[8];
        unpack8(eight, v);
        // Blocks begin at multiples of eight columns; rows that are columns of the stored copy do not.
        const float* of_row = scales + row / rows_shared * row_scales;
        for (int i = 0; i < valid; i++) v[i] *= of_row[(column + i) / columns_shared * column_scales];
        put8(y + row * columns + column, pack8<X>(v), valid, wide);
    }
}
