// Tiles of 64 x 64 through shared memory; grid (columns / 64, rows / 64), 256 threads. `WORD` has the size of an element.
// A thread moves 16 bytes at a time, N elements of a row when reading and of a column when writing, if sizes allow it.
#define N (16 / (int)sizeof(WORD))
union Sixteen { uint4 word; WORD at[N]; };

extern "C" __global__ void transpose(WORD* __restrict__ y, const WORD* __restrict__ x, int rows, int columns) {
    // One bank of padding avoids most bank conflicts in both directions.
    __shared__ WORD tile[64][64 + (sizeof(WORD) < 4 ? 4 / sizeof(WORD) : 1)];
    const int row0 = blockIdx.y * 64, column0 = blockIdx.x * 64;
    const bool wide = columns % N == 0 && rows % N == 0 && aligned(x, y);
#pragma unroll 4
    for (int i = threadIdx.x; i < 64 * 64 / N; i += blockDim.x) {
        const int r = i / (64 / N), c = i % (64 / N) * N;
        if (row0 + r >= rows || column0 + c >= columns) continue;
        const WORD* from = x + (u64)(row0 + r) * columns + column0 + c;
        Sixteen s;
        if (wide) s.word = *(const uint4*)from;
        else for (int j = 0; j < N; j++) if (column0 + c + j < columns) s.at[j] = from[j];
#pragma unroll
        for (int j = 0; j < N; j++) tile[r][c + j] = s.at[j];
    }
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < 64 * 64 / N; i += blockDim.x) {
        const int c = i / (64 / N), r = i % (64 / N) * N;
        if (row0 + r >= rows || column0 + c >= columns) continue;
        WORD* to = y + (u64)(column0 + c) * rows + row0 + r;
        Sixteen s;
#pragma unroll
        for (int j = 0; j < N; j++) s.at[j] = tile[r + j][c];
        if (wide) *(uint4*)to = s.word;
        else for (int j = 0; j < N; j++) if (row0 + r + j < rows) to[j] = s.at[j];
    }
}
