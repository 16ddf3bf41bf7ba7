// Random numbers of the tokens of a step, as in cpu.rs. Grid (rows). Threads stride over columns, and over eights of columns if rows are aligned.

// Returns the number from which the random numbers of a row follow.
__device__ __forceinline__ u64 row_draw(const int* numbers, const int* seed, u64 key) {
    const u64 s = (u64)(u32)seed[0] | (u64)(u32)seed[1] << 32;
    return hash(s ^ key ^ hash((u64)(u32)numbers[blockIdx.x]));
}

// Returns the random number of a column. Each hash gives the numbers of two columns.
__device__ __forceinline__ u32 drawn(u64 of_row, u64 column) {
    return (u32)(hash(of_row ^ (column / 2)) >> (32 * (column % 2)));
}

// Stores map(x, random number) of each element of the row.
template <class M> __device__ __forceinline__ void each(X* y, const X* x, u64 of_row, int columns, u64 first, M map) {
    const u64 row = (u64)blockIdx.x * columns;
    const int eights = columns % 8 == 0 && first % 2 == 0 && aligned(y, x) ? columns / 8 : 0;
#pragma unroll 2
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> u = load8(x + row + 8 * g);
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const u64 two = hash(of_row ^ ((first + 8 * g + i) / 2));
            v[i] = map(load(u.at[i]), (u32)two);
            v[i + 1] = map(load(u.at[i + 1]), (u32)(two >> 32));
        }
        store8(y + row + 8 * g, pack8<X>(v));
    }
    for (int c = 8 * eights + threadIdx.x; c < columns; c += blockDim.x)
        store(&y[row + c], map(load(x[row + c]), drawn(of_row, first + c)));
}

extern "C" __global__ void dropout(X* y, const X* x, const int* numbers, const int* seed, int columns, u64 key, u64 first,
                                   u64 threshold, float factor) {
    each(y, x, row_draw(numbers, seed, key), columns, first,
         [=](float x, u32 drawn) { return drawn < (u32)threshold ? 0.0f : x * factor; });
}

extern "C" __global__ void add_noise(X* y, const X* x, const int* numbers, const int* seed, int columns, u64 key, u64 first,
                                     float size) {
    each(y, x, row_draw(numbers, seed, key), columns, first, [=](float x, u32 drawn) {
        return x + size * (((float)(drawn >> 8) - 8388607.5f) * (1.0f / 8388608.0f));
    });
}
