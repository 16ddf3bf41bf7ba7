// One block per row. Threads stride over columns, and over eights of columns if rows are aligned. `change` may be null.
extern "C" __global__ void row_squares(float* squares, const X* w, const X* change, int rows, int columns) {
    const int r = blockIdx.x;
    if (r >= rows) return;
    const u64 row = (u64)r * columns;
    const int eights = columns % 8 == 0 && aligned(w) && (!change || aligned(change)) ? columns / 8 : 0;
    float sum = 0.0f;
#pragma unroll 4
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> u = load8(w + row + 8 * g);
        Eight<X> v;
        if (change) v = load8(change + row + 8 * g);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float x = load(u.at[i]) + (change ? load(v.at[i]) : 0.0f);
            sum += x * x;
        }
    }
    for (int c = 8 * eights + threadIdx.x; c < columns; c += blockDim.x) {
        const float x = load(w[row + c]) + (change ? load(change[row + c]) : 0.0f);
        sum += x * x;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) squares[r] = sum;
}

// One thread per row. If `magnitude` is null, computes norms.
extern "C" __global__ void magnitude_factors(float* result, const float* squares, const float* magnitude, int rows) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    const float norm = sqrtf(squares[r]);
    result[r] = !magnitude ? norm : norm == 0.0f ? 0.0f : magnitude[r] / norm;
}

// Sums `dy · x / magnitude` over the rows of a chunk. Grid (columns / 256, chunks of rows), 256 threads, one per column.
extern "C" __global__ void partial_gradients(float* partial, const X* dy, const X* x, const float* magnitude, int rows, int columns, int chunk) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns) return;
    const int end = min(rows, (int)(blockIdx.y + 1) * chunk);
    float sum = 0.0f;
#pragma unroll 8
    for (int r = blockIdx.y * chunk; r < end; r++) sum += load(dy[(u64)r * columns + c]) * load(x[(u64)r * columns + c]);
    partial[(u64)blockIdx.y * columns + c] = magnitude[c] == 0.0f ? 0.0f : sum / magnitude[c];
}
