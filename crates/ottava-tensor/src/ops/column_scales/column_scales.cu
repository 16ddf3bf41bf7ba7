// Grid (columns / 256, chunks of rows), 8 warps. A lane finds the amax of eight columns over every eighth row of the chunk. `amax` is initially 0.
extern "C" __global__ void column_amaxes(float* amax, const X* x, int rows, int columns, int chunk) {
    __shared__ float all[8][256 + 8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 256 + 8 * lane;
    const int end = min(rows, (int)(blockIdx.y + 1) * chunk);
    const bool wide = columns % 8 == 0 && aligned(x);
    float largest[8] = {};
    if (c < columns) {
#pragma unroll 4
        for (int r = blockIdx.y * chunk + warp; r < end; r += 8) {
            const X* from = x + (u64)r * columns + c;
            Eight<X> values;
            if (wide) values = load8(from);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (wide || c + i < columns) largest[i] = fmaxf(largest[i], fabsf(load(wide ? values.at[i] : from[i])));
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) all[warp][8 * lane + i] = largest[i];
    __syncthreads();
    const int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= columns) return;
    float m = 0.0f;
    for (int w = 0; w < 8; w++) m = fmaxf(m, all[w][threadIdx.x]);
    raise(&amax[column], m);
}

// Replaces amaxes by scales, as `scale` in cpu.rs. One thread per column.
extern "C" __global__ void scales_of_amaxes(float* scales, int columns) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns) return;
    const u32 bits = __float_as_uint(scales[c]);
    const bool scaled = bits != 0 && bits < 0x7F800000u, is_power = (bits & 0x7FFFFFu) == 0;
    const int exponent = 127 - (int)(bits >> 23) - (is_power ? 0 : 1);
    scales[c] = scaled ? __uint_as_float((u32)(min(max(exponent, -126), 126) + 127) << 23) : 1.0f;
}

// Grid (rows). Threads stride over columns, and over eights of columns if rows are aligned.
extern "C" __global__ void multiply_columns(X* y, const X* x, const float* scales, int columns, int inverse) {
    const u64 row = (u64)blockIdx.x * columns;
    const int eights = columns % 8 == 0 && aligned(y, x, scales) ? columns / 8 : 0;
#pragma unroll 4
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> u = load8(x + row + 8 * g);
        const Eight<float> s = load8(scales + 8 * g);
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = load(u.at[i]) * (inverse ? 1.0f / s.at[i] : s.at[i]);
        store8(y + row + 8 * g, pack8<X>(v));
    }
    for (int c = 8 * eights + threadIdx.x; c < columns; c += blockDim.x)
        store(&y[row + c], load(x[row + c]) * (inverse ? 1.0f / scales[c] : scales[c]));
}

// Grid (rows). Threads stride like the threads of `multiply_columns`.
extern "C" __global__ void add_unscaled_columns(X* sum, const float* x, const float* scales, int columns) {
    const u64 row = (u64)blockIdx.x * columns;
    const int eights = columns % 8 == 0 && aligned(sum, x, scales) ? columns / 8 : 0;
#pragma unroll 4
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> u = load8(sum + row + 8 * g);
        const Eight<float> v = load8(x + row + 8 * g), s = load8(scales + 8 * g);
        float w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = load(u.at[i]) + v.at[i] * (1.0f / s.at[i]);
        store8(sum + row + 8 * g, pack8<X>(w));
    }
    for (int c = 8 * eights + threadIdx.x; c < columns; c += blockDim.x)
        store(&sum[row + c], load(sum[row + c]) + x[row + c] * (1.0f / scales[c]));
}
