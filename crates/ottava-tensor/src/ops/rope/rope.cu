// Grid over rows; threads stride over the pairs of its rotated heads. `turn` is 1 or -1.
extern "C" __global__ void rope(X* x, const float* table, int width, int heads, int dim, int seq_len, int start, float turn) {
    X* row = x + (u64)blockIdx.x * width;
    const float* angles = table + (u64)(start + blockIdx.x % seq_len) * dim;
    const int half = dim / 2;
    for (int p = threadIdx.x; p < heads * half; p += blockDim.x) {
        X* first = row + p / half * dim + p % half;
        const float cos = angles[p % half], sin = angles[half + p % half] * turn;
        const float a = load(first[0]), b = load(first[half]);
        store(&first[0], a * cos - b * sin);
        store(&first[half], b * cos + a * sin);
    }
}
