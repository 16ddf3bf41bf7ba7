// Copies a padded product without its padding: grid over rows, threads stride over columns.
extern "C" __global__ void crop(X* out, const X* padded, int columns, int padded_columns, int add) {
    const u64 to = (u64)blockIdx.x * columns, from = (u64)blockIdx.x * padded_columns;
    for (int c = threadIdx.x; c < columns; c += blockDim.x) {
        const float value = load(padded[from + c]);
        store(&out[to + c], add ? value + load(out[to + c]) : value);
    }
}
