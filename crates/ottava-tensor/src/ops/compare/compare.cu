// `X` is the type of a tensor and of its reference, and `CODE` is the type of codes.
struct Sums {
    double at[4];
    __device__ __forceinline__ void add(double x, double r) {
        at[0] += x * x;
        at[1] += r * r;
        at[2] += x * r;
        at[3] += (x - r) * (x - r);
    }
};

__device__ __forceinline__ void block_sums(double* into, const Sums& sums) {
    for (int k = 0; k < 4; k++) {
        const double sum = block_sum(sums.at[k]);
        if (threadIdx.x == 0) into[k] = sum;
    }
}

// Each block writes four sums in F64: x·x, r·r, x·r and the squared error. Row i of the reference is compared with row i · every of x.
extern "C" __global__ void __launch_bounds__(256)
compare_rows(double* partial, const X* x, const X* reference, u64 rows, u64 columns, u64 every) {
    const u64 per_row = (columns + 7) / 8;
    const bool wide = (rows == 1 || columns % 8 == 0) && aligned(x, reference);
    Sums sums = {};
    for (u64 g = grid_start(); g < rows * per_row; g += grid_step()) {
        const u64 row = g / per_row, column = g % per_row * 8;
        const int valid = columns - column < 8 ? columns - column : 8;
        float a[8], r[8];
        unpack8(fetch8(x + row * every * columns + column, valid, wide && valid == 8), a);
        unpack8(fetch8(reference + row * columns + column, valid, wide && valid == 8), r);
#pragma unroll
        for (int i = 0; i < 8; i++) sums.add(a[i], r[i]);
    }
    block_sums(partial + 4 * blockIdx.x, sums);
}

// Compares the products of rows with a direction. A block processes whole rows.
extern "C" __global__ void __launch_bounds__(256)
compare_along(double* partial, const X* x, const X* reference, const X* direction, u64 rows, u64 columns) {
    Sums sums = {};
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        double a = 0.0, r = 0.0;
        for (u64 i = row * columns + threadIdx.x; i < (row + 1) * columns; i += blockDim.x) {
            const double d = load(direction[i]);
            a += load(x[i]) * d;
            r += load(reference[i]) * d;
        }
        a = block_sum(a);
        r = block_sum(r);
        if (threadIdx.x == 0) sums.add(a, r);
    }
    block_sums(partial + 4 * blockIdx.x, sums);
}

// Compares the dequantized codes `[rows, columns]` with a matrix of the same shape.
extern "C" __global__ void __launch_bounds__(256)
compare_codes(double* partial, const CODE* codes, const float* scales, const X* x, u64 rows, u64 columns, u64 pitch, u64 rows_shared,
              u64 columns_shared, u64 row_scales, u64 column_scales) {
    const u64 per_row = (columns + 7) / 8;
    const bool wide_codes = pitch % 8 == 0 && aligned(codes), wide = columns % 8 == 0 && aligned(x);
    Sums sums = {};
    for (u64 g = grid_start(); g < rows * per_row; g += grid_step()) {
        const u64 row = g / per_row, column = g % per_row * 8;
        const int valid = columns - column < 8 ? columns - column : 8;
        float v[8], r[8];
        unpack8(fetch8(codes + row * pitch + column, valid, wide_codes && valid == 8), v);
        unpack8(fetch8(x + row * columns + column, valid, wide && valid == 8), r);
        // Blocks of scales begin at multiples of eight columns.
        const float scale = scales[row / rows_shared * row_scales + column / columns_shared * column_scales];
#pragma unroll
        for (int i = 0; i < 8; i++) sums.add(v[i] * scale, r[i]);
    }
    block_sums(partial + 4 * blockIdx.x, sums);
}

// Compares the dequantized codes `[rows, columns]` with a matrix `[columns, rows]`. A tile of the matrix is in shared memory.
extern "C" __global__ void __launch_bounds__(256)
compare_transposed(double* partial, const CODE* codes, const float* scales, const X* x, u64 rows, u64 columns, u64 pitch, u64 rows_shared,
                   u64 columns_shared, u64 row_scales, u64 column_scales) {
    __shared__ float tile[SIDE][SIDE + 1];
    const u64 across = (columns + SIDE - 1) / SIDE, tiles = (rows + SIDE - 1) / SIDE * across;
    const bool wide_codes = pitch % 8 == 0 && aligned(codes), wide = rows % 8 == 0 && aligned(x);
    Sums sums = {};
    for (u64 t = blockIdx.x; t < tiles; t += gridDim.x) {
        const u64 first_row = t / across * SIDE, first_column = t % across * SIDE;
        __syncthreads();
        for (int g = threadIdx.x; g < SIDE * SIDE / 8; g += blockDim.x) {
            const int c = g / (SIDE / 8), r = g % (SIDE / 8) * 8;
            const u64 column = first_column + c, row = first_row + r;
            if (column >= columns || row >= rows) continue;
            const int valid = rows - row < 8 ? rows - row : 8;
            float v[8];
            unpack8(fetch8(x + column * rows + row, valid, wide && valid == 8), v);
#pragma unroll
            for (int i = 0; i < 8; i++) tile[c][r + i] = v[i];
        }
        __syncthreads();
        for (int g = threadIdx.x; g < SIDE * SIDE / 8; g += blockDim.x) {
            const int r = g / (SIDE / 8), c = g % (SIDE / 8) * 8;
            const u64 column = first_column + c, row = first_row + r;
            if (column >= columns || row >= rows) continue;
            const int valid = columns - column < 8 ? columns - column : 8;
            float v[8];
            unpack8(fetch8(codes + row * pitch + column, valid, wide_codes && valid == 8), v);
            const float scale = scales[row / rows_shared * row_scales + column / columns_shared * column_scales];
            for (int i = 0; i < valid; i++) sums.add(v[i] * scale, tile[c + i][r]);
        }
    }
    block_sums(partial + 4 * blockIdx.x, sums);
}

// Adds the sums of all blocks. One block.
extern "C" __global__ void __launch_bounds__(256) total(double* sums, const double* partial, int n) {
    Sums all = {};
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        for (int k = 0; k < 4; k++) all.at[k] += partial[4 * i + k];
    block_sums(sums, all);
}
