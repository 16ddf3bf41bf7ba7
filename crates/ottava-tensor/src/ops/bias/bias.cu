// Grid over rows; threads stride over columns, eight at a time where rows are aligned.
extern "C" __global__ void add_bias(X* x, const X* bias, int columns) {
    X* row = x + (u64)blockIdx.x * columns;
    const int eights = columns % 8 == 0 && aligned(x, bias) ? columns / 8 : 0;
#pragma unroll 4
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> u = load8(row + 8 * g), v = load8(bias + 8 * g);
        float sum[8];
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] = load(u.at[i]) + load(v.at[i]);
        store8(row + 8 * g, pack8<X>(sum));
    }
    for (int c = 8 * eights + threadIdx.x; c < columns; c += blockDim.x) store(&row[c], load(row[c]) + load(bias[c]));
}

// Grid (columns / 256, chunks of rows), 8 warps. A lane sums eight columns of every eighth row of the chunk; then the
// sums of the warps are added in order.
extern "C" __global__ void partial_sums(float* partial, const X* dy, int rows, int columns, int chunk) {
    __shared__ float sums[8][256 + 8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 256 + 8 * lane;
    const int end = min(rows, (int)(blockIdx.y + 1) * chunk);
    const bool wide = columns % 8 == 0 && aligned(dy);
    float sum[8] = {};
    if (c < columns) {
#pragma unroll 4
        for (int r = blockIdx.y * chunk + warp; r < end; r += 8) {
            const X* from = dy + (u64)r * columns + c;
            Eight<X> x;
            if (wide) x = load8(from);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (wide || c + i < columns) sum[i] += load(wide ? x.at[i] : from[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sums[warp][8 * lane + i] = sum[i];
    __syncthreads();
    const int column = blockIdx.x * 256 + threadIdx.x;
    if (column >= columns) return;
    float total = 0.0f;
    for (int w = 0; w < 8; w++) total += sums[w][threadIdx.x];
    partial[(u64)blockIdx.y * columns + column] = total;
}

// Grid (columns / 32), 32 warps: `sum += ` the rows of `partial`, each warp every 32nd, then the warps in order.
extern "C" __global__ void __launch_bounds__(1024) add_partial_sums(float* sum, const float* partial, int columns, int chunks) {
    __shared__ float sums[32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 32 + lane;
    float total = 0.0f;
    if (c < columns) {
#pragma unroll 8
        for (int i = warp; i < chunks; i += 32) total += partial[(u64)i * columns + c];
    }
    sums[warp][lane] = total;
    __syncthreads();
    if (warp > 0 || c >= columns) return;
    total = sum[c];
    for (int w = 0; w < 32; w++) total += sums[w][lane];
    sum[c] = total;
}
