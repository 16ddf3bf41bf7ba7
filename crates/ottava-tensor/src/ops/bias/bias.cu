// Grid over rows; threads stride over columns.
extern "C" __global__ void add_bias(X* x, const X* bias, int columns) {
    X* row = x + (u64)blockIdx.x * columns;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) store(&row[c], load(row[c]) + load(bias[c]));
}

// Grid (columns / 256, chunks of rows): each thread sums one column of one chunk.
extern "C" __global__ void partial_sums(float* partial, const X* dy, int rows, int columns, int chunk) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns) return;
    const int end = min(rows, (int)(blockIdx.y + 1) * chunk);
    float sum = 0.0f;
    for (int r = blockIdx.y * chunk; r < end; r++) sum += load(dy[(u64)r * columns + c]);
    partial[(u64)blockIdx.y * columns + c] = sum;
}

// Grid (columns / 256): adds the chunks in order.
extern "C" __global__ void add_partial_sums(float* sum, const float* partial, int columns, int chunks) {
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= columns) return;
    float total = sum[c];
    for (int i = 0; i < chunks; i++) total += partial[(u64)i * columns + c];
    sum[c] = total;
}
