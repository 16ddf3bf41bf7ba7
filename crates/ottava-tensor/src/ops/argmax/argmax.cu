struct Larger { __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; } };

// One block per row. Element and column are one number, which orders as the element does and prefers small columns.
extern "C" __global__ void argmax(int* at, const float* x, int C) {
    const float* row = x + (u64)blockIdx.x * C;
    u64 best = 0;
    bool finite = true;
    for (int c = threadIdx.x; c < C; c += blockDim.x) {
        // The sum makes the two zeros equal.
        const u32 bits = __float_as_uint(row[c] + 0.0f);
        finite &= (bits & 0x7FFFFFFF) < 0x7F800000;
        const u32 ordered = bits >> 31 ? ~bits : bits | 0x80000000;
        const u64 both = (u64)ordered << 32 | (0xFFFFFFFF - c);
        best = both > best ? both : best;
    }
    best = block_reduce(best, Larger());
    finite = __syncthreads_and(finite);
    if (threadIdx.x == 0) at[blockIdx.x] = finite && C > 0 ? (int)(0xFFFFFFFF - (u32)best) : -1;
}
