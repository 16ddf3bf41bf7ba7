// `CODE` is the type of the codes, and `X` is the type of the values `[rows, columns]`. The values are rows 0, every, 2 · every, … of the codes. A
// thread processes eight neighbouring columns at a time.
extern "C" __global__ void __launch_bounds__(256)
dequantize(X* y, const CODE* codes, const float* scales, const float* tensor_scale, u64 rows, u64 columns, u64 pitch, u64 rows_shared, u64 columns_shared,
           u64 row_scales, u64 column_scales, u64 every) {
    const u64 per_row = (columns + 7) / 8;
    const bool wide_codes = pitch % 8 == 0 && aligned(codes), wide = columns % 8 == 0 && aligned(y);
    for (u64 g = grid_start(); g < rows * per_row; g += grid_step()) {
        const u64 sampled = g / per_row, row = sampled * every, column = g % per_row * 8;
        const int valid = columns - column < 8 ? columns - column : 8;
        float v[8];
        unpack8(fetch8(codes + row * pitch + column, valid, wide_codes && valid == 8), v);
        // Blocks of scales begin at multiples of eight columns.
        const float scale = scales[row / rows_shared * row_scales + column / columns_shared * column_scales];
        const float of_tensor = tensor_scale ? tensor_scale[row] : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = v[i] * scale * of_tensor;
        put8(y + sampled * columns + column, pack8<X>(v), valid, wide && valid == 8);
    }
}
