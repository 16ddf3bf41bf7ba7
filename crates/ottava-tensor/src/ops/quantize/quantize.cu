// Tiles of 64 x 64: codes go out row by row as they are made, and once more from shared memory, column by column.
#define TILE 64

// grid (columns / 64, rows / 64) of the padded matrix, 256 threads. `codes` and `transposed` may be null.
extern "C" __global__ void quantize(unsigned char* codes, unsigned char* transposed, float* scale_inv, float* amax,
                                    u64* saturated, u64* underflowed, u64* elements, const X* x, const float* scale,
                                    int rows, int columns, int padded_rows, int padded_columns) {
    __shared__ unsigned char tile[TILE][TILE + 4];
    const int row0 = blockIdx.y * TILE, column0 = blockIdx.x * TILE;
    const float s = *scale;
    float largest = 0.0f;
    u32 beyond = 0, lost = 0;
    for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) {
        const int r = row0 + i / TILE, c = column0 + i % TILE;
        u32 code = 0;
        if (r < rows && c < columns) {
            const float v = load(x[(u64)r * columns + c]), scaled = v * s;
            code = encode<FORMAT>(scaled);
            largest = fmaxf(largest, fabsf(v));
            beyond += fabsf(scaled) > largest_finite<FORMAT>();
            lost += v != 0.0f && (code & 0x7F) == 0;
        }
        tile[i / TILE][i % TILE] = code;
        if (codes && r < padded_rows && c < padded_columns) codes[(u64)r * padded_columns + c] = code;
    }
    largest = block_max(largest);
    beyond = block_sum(beyond);
    lost = block_sum(lost);
    if (threadIdx.x == 0) {
        // Non-negative floats order as their bits do, so the result does not depend on the order of blocks.
        atomicMax((u32*)amax, __float_as_uint(largest));
        if (beyond) atomicAdd(saturated, (u64)beyond);
        if (lost) atomicAdd(underflowed, (u64)lost);
        if (blockIdx.x == 0 && blockIdx.y == 0) {
            *scale_inv = 1.0f / s;
            atomicAdd(elements, (u64)rows * columns);
        }
    }
    if (!transposed) return;
    for (int i = threadIdx.x; i < TILE * TILE; i += blockDim.x) {
        const int c = column0 + i / TILE, r = row0 + i % TILE;
        if (r < padded_rows && c < padded_columns) transposed[(u64)c * padded_rows + r] = tile[i % TILE][i / TILE];
    }
}

// One thread per element, in strides; `amax` starts at 0.
extern "C" __global__ void amax(float* amax, const X* x, u64 n) {
    float largest = 0.0f;
    for (u64 i = grid_start(); i < n; i += grid_step()) largest = fmaxf(largest, fabsf(load(x[i])));
    largest = block_max(largest);
    if (threadIdx.x == 0) atomicMax((u32*)amax, __float_as_uint(largest));
}

// One thread.
extern "C" __global__ void current_scale(float* scale, const float* amax, float largest, float epsilon, int power_of_two) {
    const float a = *amax < epsilon ? epsilon : *amax;
    float s = 1.0f;
    if (a != 0.0f && a <= 3.402823466e38f) {
        s = fminf(largest / a, 3.402823466e38f);
        if (power_of_two) s = __uint_as_float(__float_as_uint(s) & 0x7F800000);
    }
    *scale = s;
}
