// Adds the bias to the row of this block. Threads stride over columns, and over eights of columns if rows are aligned.
__device__ __forceinline__ void add_to_row(X* x, const X* bias, int columns) {
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

// Grid (rows).
extern "C" __global__ void add_bias(X* x, const X* bias, int columns) { add_to_row(x, bias, columns); }

// Returns the group of a row, or -1 for padding. Offsets ascend.
__device__ __forceinline__ int group_of(int row, const int* offsets, const int* counts, int groups) {
    int low = 0, high = groups;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (offsets[middle] <= row) low = middle;
        else high = middle;
    }
    return row < offsets[low] + counts[low] ? low : -1;
}

// Grid (rows).
extern "C" __global__ void add_grouped_bias(X* x, const X* bias, const int* offsets, const int* counts, int groups, int columns) {
    const int group = group_of(blockIdx.x, offsets, counts, groups);
    if (group >= 0) add_to_row(x, bias + (u64)group * columns, columns);
}

// Computes the dot product of a row and the bias of its group. Grid (rows).
extern "C" __global__ void grouped_bias_dots(float* dots, const X* dy, const X* bias, const int* offsets, const int* counts, int groups,
                                             int columns) {
    const int group = group_of(blockIdx.x, offsets, counts, groups);
    if (group < 0) return;
    dy += (u64)blockIdx.x * columns;
    bias += (u64)group * columns;
    const int eights = columns % 8 == 0 && aligned(dy, bias) ? columns / 8 : 0;
    float sum = 0.0f;
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> u = load8(dy + 8 * g), v = load8(bias + 8 * g);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += load(u.at[i]) * load(v.at[i]);
    }
    for (int c = 8 * eights + threadIdx.x; c < columns; c += blockDim.x) sum += load(dy[c]) * load(bias[c]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) dots[blockIdx.x] += sum;
}

// Sums the columns of a chunk of rows. Grid (columns / 256, chunks of rows), 8 warps. A lane sums eight columns of every eighth row of the chunk.
// Then the
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

// Adds the rows of `partial` to `sum`. A block has 32 columns and 32 warps. Each warp adds every 32nd row, and then the sums of the warps are added
// in order.
__device__ __forceinline__ void add_rows(float* sum, const float* partial, int columns, int chunks) {
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

// Adds all chunks. Grid (columns / 32).
extern "C" __global__ void __launch_bounds__(1024) add_partial_sums(float* sum, const float* partial, int columns, int chunks) {
    add_rows(sum, partial, columns, chunks);
}

// Adds the chunks of each group. Grid (columns / 32, groups).
extern "C" __global__ void __launch_bounds__(1024)
    add_group_sums(float* sum, const float* partial, const int* offsets, int columns, int chunk) {
    const int first = offsets[blockIdx.y] / chunk, end = offsets[blockIdx.y + 1] / chunk;
    add_rows(sum + (u64)blockIdx.y * columns, partial + (u64)first * columns, columns, end - first);
}
