// INTERLEAVED selects the kind of pairs (pairs.cuh).
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif

// With PARTIAL, only the first `rotated` elements of each head are rotated. This is the width of the table.
#ifndef PARTIAL
#define AND_ROTATED
#define ROTATED(dim) (dim)
#else
#define AND_ROTATED , int rotated
#define ROTATED(dim) (rotated)
#endif

#ifndef FORMAT
__device__ __forceinline__ void turn1(X& first, X& second, float cos, float sin, float turn) {
    const float a = load(first), b = load(second), s = sin * turn;
    store(&first, a * cos - b * s);
    store(&second, b * cos + a * s);
}

// Grid (rows). Threads stride over the pairs of a row's rotated heads, and over eights of pairs if rows are aligned.
extern "C" __global__ void __launch_bounds__(256) rope(X* x, const float* table, int width, int heads, int dim, const int* __restrict__ positions, float turn AND_ROTATED) {
    X* row = x + (u64)blockIdx.x * width;
    const float* angles = table + (u64)positions[blockIdx.x] * ROTATED(dim);
    const int half = ROTATED(dim) / 2;
    if (half % 8 == 0 && dim % 8 == 0 && width % 8 == 0 && aligned(x, table)) {
        const int eights = half / 8;
#pragma unroll 2
        for (int p = threadIdx.x; p < heads * eights; p += blockDim.x) {
            X* at = row + p / eights * dim + at_of<INTERLEAVED>(p % eights * 8);
            Eight<X> first = load8(at), second = load8(at + distance<INTERLEAVED>(half, 8));
            turn8<INTERLEAVED>(first, second, load8(angles + p % eights * 8), load8(angles + half + p % eights * 8), turn);
            store8(at, first);
            store8(at + distance<INTERLEAVED>(half, 8), second);
        }
        return;
    }
    for (int p = threadIdx.x; p < heads * half; p += blockDim.x) {
        X* at = row + p / half * dim + at_of<INTERLEAVED>(p % half);
        turn1(at[0], at[distance<INTERLEAVED>(half, 1)], angles[p % half], angles[half + p % half], turn);
    }
}

#ifndef PARTIAL
// Raises the amax of the rotated matrix, which is not written. Each block processes every gridDim-th row.
extern "C" __global__ void __launch_bounds__(256) rope_amax(float* amax, const X* __restrict__ x, const float* __restrict__ table, int rows,
                                                            int width, int heads, int dim, const int* __restrict__ positions, float turn) {
    const int half = dim / 2, turned = heads * dim;
    const bool wide = half % 8 == 0 && width % 8 == 0 && aligned(x, table);
    float largest = 0.0f;
    for (int t = blockIdx.x; t < rows; t += gridDim.x) {
        const X* row = x + (u64)t * width;
        const float* angles = table + (u64)positions[t] * dim;
        if (wide) {
            const int eights = half / 8;
#pragma unroll 2
            for (int p = threadIdx.x; p < heads * eights; p += blockDim.x) {
                const X* at = row + p / eights * dim + at_of<INTERLEAVED>(p % eights * 8);
                Eight<X> first = load8(at), second = load8(at + distance<INTERLEAVED>(half, 8));
                turn8<INTERLEAVED>(first, second, load8(angles + p % eights * 8), load8(angles + half + p % eights * 8), turn);
                largest = fmaxf(largest, fmaxf(largest8(first), largest8(second)));
            }
#pragma unroll 2
            for (int c = turned + 8 * threadIdx.x; c < width; c += 8 * blockDim.x) largest = fmaxf(largest, largest8(load8(row + c)));
        } else {
            for (int p = threadIdx.x; p < heads * half; p += blockDim.x) {
                const X* at = row + p / half * dim + at_of<INTERLEAVED>(p % half);
                X first = at[0], second = at[distance<INTERLEAVED>(half, 1)];
                turn1(first, second, angles[p % half], angles[half + p % half], turn);
                largest = fmaxf(largest, fmaxf(fabsf(load(first)), fabsf(load(second))));
            }
            for (int c = turned + threadIdx.x; c < width; c += blockDim.x) largest = fmaxf(largest, fabsf(load(row[c])));
        }
    }
    block_raise(amax, largest);
}
#endif
#else
// Grid (W / 256, T / 128), 256 threads. A block has two adjacent tiles, so that the table is read once for both tiles. A thread rotates eight
// pairs of a row of each tile. `dim` is 16, 32, 64 or 128 and therefore divides a tile. W is a multiple of `dim`.
extern "C" __global__ void __launch_bounds__(256, 3)
    rope_codes(const X* x, const float* table, int heads, int dim, const int* __restrict__ positions, float turn, const __grid_constant__ Destination to) {
    const int row0 = first_row(), half = dim / 2, pair = threadIdx.x % 8 * 8;
    const int first = pair / half * dim + at_of<INTERLEAVED>(pair % half);
    const float scale = given_scale(to);
    Seen seen;
    const TileCast<FORMAT> tiles[2] = {{to, tiles_of_the_launch[0], seen, row0, (int)blockIdx.x * 2 * TILE},
                                       {to, tiles_of_the_launch[1], seen, row0, (int)(blockIdx.x * 2 + 1) * TILE}};
    const int columns[2] = {first, first + distance<INTERLEAVED>(half, 8)};
#pragma unroll
    for (int k = 0; k < 2; k++) tiles[k].begin();
    if (SHARING == PerRow) __syncthreads();
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < TILE; row += 32) {
        // Both elements of eight pairs, in each of two tiles.
        Eight<X> x8[2][2] = {};
        Eight<float> cos, sin;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int column = (blockIdx.x * 2 + k) * TILE + first;
            if (row0 + row >= to.rows || column >= to.columns) continue;
            const X* from = x + (u64)(row0 + row) * to.columns + column;
            x8[k][0] = load8(from);
            x8[k][1] = load8(from + distance<INTERLEAVED>(half, 8));
        }
        if (row0 + row < to.rows && (blockIdx.x * 2 * TILE + first) < heads * dim) {
            const float* angles = table + (u64)positions[row0 + row] * dim + pair % half;
            cos = load8(angles);
            sin = load8(angles + half);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (row0 + row < to.rows && (blockIdx.x * 2 + k) * TILE + first < heads * dim) turn8<INTERLEAVED>(x8[k][0], x8[k][1], cos, sin, turn);
            tiles[k].cast(row, columns, x8[k], scale);
        }
    }
    // A barrier is needed, because the threads that cast a tile are not the threads that filled it.
    if (HOLDS) __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; k++) tiles[k].finish(columns);
    measure(to, seen, [&] {
#pragma unroll
        for (int k = 0; k < 2; k++) tiles[k].flush();
    });
}
#endif
