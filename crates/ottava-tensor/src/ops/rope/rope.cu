// Pair i of a head of 2h elements is (i, i + h), or with INTERLEAVED (2i, 2i + 1). Eights of pairs are two eights of elements, from
// `at_of(i)` on and `distance(h, 8)` behind that.
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
__device__ __forceinline__ int at_of(int i) { return INTERLEAVED ? 2 * i : i; }
__device__ __forceinline__ int distance(int half, int n) { return INTERLEAVED ? n : half; }

// Rotates eight pairs; `turn` is 1 or -1.
__device__ __forceinline__ void turn8(Eight<X>& first, Eight<X>& second, const Eight<float>& cos, const Eight<float>& sin, float turn) {
    float u[8], v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        X a8 = first.at[i], b8 = second.at[i];
        if (INTERLEAVED) {
            a8 = i < 4 ? first.at[2 * i % 8] : second.at[2 * i % 8];
            b8 = i < 4 ? first.at[(2 * i + 1) % 8] : second.at[(2 * i + 1) % 8];
        }
        const float a = load(a8), b = load(b8), s = sin.at[i] * turn;
        u[i] = a * cos.at[i] - b * s;
        v[i] = b * cos.at[i] + a * s;
    }
    if (INTERLEAVED) {
        float lower[8], upper[8];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            lower[2 * i] = u[i], lower[2 * i + 1] = v[i];
            upper[2 * i] = u[i + 4], upper[2 * i + 1] = v[i + 4];
        }
        first = pack8<X>(lower);
        second = pack8<X>(upper);
        return;
    }
    first = pack8<X>(u);
    second = pack8<X>(v);
}

#ifndef FORMAT
__device__ __forceinline__ void turn1(X& first, X& second, float cos, float sin, float turn) {
    const float a = load(first), b = load(second), s = sin * turn;
    store(&first, a * cos - b * s);
    store(&second, b * cos + a * s);
}

// Grid over rows; threads stride over the pairs of its rotated heads, eight at a time where rows are aligned.
extern "C" __global__ void __launch_bounds__(256) rope(X* x, const float* table, int width, int heads, int dim, const int* __restrict__ positions, float turn) {
    X* row = x + (u64)blockIdx.x * width;
    const float* angles = table + (u64)positions[blockIdx.x] * dim;
    const int half = dim / 2;
    if (half % 8 == 0 && width % 8 == 0 && aligned(x, table)) {
        const int eights = half / 8;
#pragma unroll 2
        for (int p = threadIdx.x; p < heads * eights; p += blockDim.x) {
            X* at = row + p / eights * dim + at_of(p % eights * 8);
            Eight<X> first = load8(at), second = load8(at + distance(half, 8));
            turn8(first, second, load8(angles + p % eights * 8), load8(angles + half + p % eights * 8), turn);
            store8(at, first);
            store8(at + distance(half, 8), second);
        }
        return;
    }
    for (int p = threadIdx.x; p < heads * half; p += blockDim.x) {
        X* at = row + p / half * dim + at_of(p % half);
        turn1(at[0], at[distance(half, 1)], angles[p % half], angles[half + p % half], turn);
    }
}

// Amax of the rotated matrix, which is not written. Each block processes every gridDim-th row.
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
                const X* at = row + p / eights * dim + at_of(p % eights * 8);
                Eight<X> first = load8(at), second = load8(at + distance(half, 8));
                turn8(first, second, load8(angles + p % eights * 8), load8(angles + half + p % eights * 8), turn);
                largest = fmaxf(largest, fmaxf(largest8(first), largest8(second)));
            }
#pragma unroll 2
            for (int c = turned + 8 * threadIdx.x; c < width; c += 8 * blockDim.x) largest = fmaxf(largest, largest8(load8(row + c)));
        } else {
            for (int p = threadIdx.x; p < heads * half; p += blockDim.x) {
                const X* at = row + p / half * dim + at_of(p % half);
                X first = at[0], second = at[distance(half, 1)];
                turn1(first, second, angles[p % half], angles[half + p % half], turn);
                largest = fmaxf(largest, fmaxf(fabsf(load(first)), fabsf(load(second))));
            }
            for (int c = turned + threadIdx.x; c < width; c += blockDim.x) largest = fmaxf(largest, fabsf(load(row[c])));
        }
    }
    block_raise(amax, largest);
}
#else
// Grid (W / 256, T / 128), 256 threads: two adjacent tiles, so that the table is read once for both. A thread rotates eight
// pairs of a row of each. `dim` is 16, 32, 64 or 128 and so divides a tile; W is a multiple of `dim`.
extern "C" __global__ void __launch_bounds__(256, 3)
    rope_codes(const X* x, const float* table, int heads, int dim, const int* __restrict__ positions, float turn, const __grid_constant__ Destination to) {
    const int row0 = first_row(), half = dim / 2, pair = threadIdx.x % 8 * 8;
    const int first = pair / half * dim + at_of(pair % half);
    const float scale = given_scale(to);
    Seen seen;
    const TileCast<FORMAT> tiles[2] = {{to, tiles_of_the_launch[0], seen, row0, (int)blockIdx.x * 2 * TILE},
                                       {to, tiles_of_the_launch[1], seen, row0, (int)(blockIdx.x * 2 + 1) * TILE}};
    const int columns[2] = {first, first + distance(half, 8)};
#pragma unroll
    for (int k = 0; k < 2; k++) tiles[k].begin();
    if (SHARING == PerRow) __syncthreads();
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < TILE; row += 32) {
        // Both elements of eight pairs, in two tiles.
        Eight<X> x8[2][2] = {};
        Eight<float> cos, sin;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int column = (blockIdx.x * 2 + k) * TILE + first;
            if (row0 + row >= to.rows || column >= to.columns) continue;
            const X* from = x + (u64)(row0 + row) * to.columns + column;
            x8[k][0] = load8(from);
            x8[k][1] = load8(from + distance(half, 8));
        }
        if (row0 + row < to.rows && (blockIdx.x * 2 * TILE + first) < heads * dim) {
            const float* angles = table + (u64)positions[row0 + row] * dim + pair % half;
            cos = load8(angles);
            sin = load8(angles + half);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            if (row0 + row < to.rows && (blockIdx.x * 2 + k) * TILE + first < heads * dim) turn8(x8[k][0], x8[k][1], cos, sin, turn);
            tiles[k].cast(row, columns, x8[k], scale);
        }
    }
    // Other threads than those that filled a tile cast it.
    if (HOLDS) __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; k++) tiles[k].finish(columns);
    measure(to, seen, [&] {
#pragma unroll
        for (int k = 0; k < 2; k++) tiles[k].flush();
    });
}
#endif
