// Runs of columns: run i of `from` begins at column `from_first + i * from_step`.

// Grid of rows; threads stride over the columns of all runs.
extern "C" __global__ void move_columns(X* to, const X* from, int to_columns, int from_columns, int to_first, int to_step, int from_first,
                                        int from_step, int count, int width) {
    to += (u64)blockIdx.x * to_columns + to_first;
    from += (u64)blockIdx.x * from_columns + from_first;
    for (int c = threadIdx.x; c < count * width; c += blockDim.x) {
        const int i = c / width, at = c - i * width;
        to[i * to_step + at] = from[i * from_step + at];
    }
}

// Grid of rows; threads stride over the columns of the sum.
extern "C" __global__ void sum_columns(X* y, const X* x, int columns, int first, int step, int count, int width) {
    x += (u64)blockIdx.x * columns + first;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        float sum = 0.0f;
        for (int i = 0; i < count; i++) sum += load(x[i * step + c]);
        store(&y[(u64)blockIdx.x * width + c], sum);
    }
}
