// Transposes tiles of 64 x 64 through shared memory. Grid (columns / 64, rows / 64), 256 threads. `WORD` has the size of an element.
// If sizes allow it, a thread moves 16 bytes at a time: N elements of a row when reading, and of a column when writing.
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

// Transposes bytes in tiles of 128 x 128. Sizes must be multiples of 128. Grid (columns / 128, rows / 128), 256 threads. Threads transpose 4 x 4
// bytes in registers, so that shared memory is read and written in words.
extern "C" __global__ void __launch_bounds__(256) transpose_bytes(unsigned char* __restrict__ y, const unsigned char* __restrict__ x, int rows,
                                                                  int columns) {
    // Words of four rows, stored by column. Their order within a column is mixed, so that no two threads of a warp write to the same bank.
    __shared__ uint4 tile[TILE][8];
    const int group = threadIdx.x % 8, four = threadIdx.x / 8;
    const unsigned char* from = x + (u64)(blockIdx.y * TILE + four * 4) * columns + blockIdx.x * TILE + group * 16;
    union { uint4 row; u32 at[4]; } in[4];
#pragma unroll
    for (int r = 0; r < 4; r++) in[r].row = *(const uint4*)(from + (u64)r * columns);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const u32 low01 = __byte_perm(in[0].at[k], in[1].at[k], 0x5140), high01 = __byte_perm(in[0].at[k], in[1].at[k], 0x7362);
        const u32 low23 = __byte_perm(in[2].at[k], in[3].at[k], 0x5140), high23 = __byte_perm(in[2].at[k], in[3].at[k], 0x7362);
        const u32 words[4] = {__byte_perm(low01, low23, 0x5410), __byte_perm(low01, low23, 0x7632), __byte_perm(high01, high23, 0x5410),
                              __byte_perm(high01, high23, 0x7632)};
#pragma unroll
        for (int j = 0; j < 4; j++) ((u32*)tile[group * 16 + k * 4 + j])[four ^ (group * 4)] = words[j];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int column = threadIdx.x / 8 + 32 * i;
        *(uint4*)(y + (u64)(blockIdx.x * TILE + column) * rows + blockIdx.y * TILE + group * 16) = tile[column][group ^ (column / 16)];
    }
}
