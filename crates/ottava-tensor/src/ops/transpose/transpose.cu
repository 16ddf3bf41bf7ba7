// Tiles of 32 x 32 through shared memory; grid (columns / 32, rows / 32), 256 threads. `WORD` has the size of an element.
extern "C" __global__ void transpose(WORD* y, const WORD* x, int rows, int columns) {
    __shared__ WORD tile[32][33];
    const int row0 = blockIdx.y * 32, column0 = blockIdx.x * 32;
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) {
        const int r = row0 + i / 32, c = column0 + i % 32;
        if (r < rows && c < columns) tile[i / 32][i % 32] = x[(u64)r * columns + c];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) {
        const int c = column0 + i / 32, r = row0 + i % 32;
        if (r < rows && c < columns) y[(u64)c * rows + r] = tile[i % 32][i / 32];
    }
}
