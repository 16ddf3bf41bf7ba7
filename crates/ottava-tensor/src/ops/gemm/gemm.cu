// Copies a padded product without its padding. Grid (rows). Threads stride over columns.
extern "C" __global__ void crop(X* out, const X* padded, int columns, int padded_columns, int add) {
    const u64 to = (u64)blockIdx.x * columns, from = (u64)blockIdx.x * padded_columns;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const float value = load(padded[from + c]);
        store(&out[to + c], add ? value + load(out[to + c]) : value);
    }
}

// Computes `out = sums · (a_scale · b_scale) + addend`, with one scale per row of `a` and one per row of `b`. Rows of `sums` are padded to whole
// eights. A thread has eight columns. Grid (columns, rows).
extern "C" __global__ void scale_and_add(X* out, const float* sums, const float* a_scale, const float* b_scale, const X* addend, int columns,
                                         int padded_columns) {
    start_successors();
    const int c = 8 * (blockIdx.x * blockDim.x + threadIdx.x), valid = columns - c;
    if (valid <= 0) return;
    const u64 at = (u64)blockIdx.y * columns + c, from = (u64)blockIdx.y * padded_columns + c;
    const bool wide = columns % 8 == 0 && aligned(out, sums, b_scale, addend);
    float scales[8], values[8], added[8];
    unpack8(fetch8(b_scale + c, valid, wide), scales);
    wait_for_predecessors();
    unpack8(fetch8(sums + from, valid, wide), values);
    if (addend) unpack8(fetch8(addend + at, valid, wide), added);
    const float of_row = a_scale[blockIdx.y];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        values[i] *= of_row * scales[i];
        if (addend) values[i] += added[i];
    }
    put8(out + at, pack8<X>(values), valid, wide);
}
