// Norms of groups of any size, with the gate before the norm (BEFORE) or after it. A block has a group of every gridDim.x-th row. A thread has pieces of
// eight neighbouring elements. The elements are read twice: the second time, they are in the cache.
// Grid: blocks that share the rows; groups of a row.

// Reads a piece. Its first `left` elements are in the group.
__device__ __forceinline__ void read_piece(float (&v)[8], const X* from, int left, bool wide) {
    if (wide) return unpack8(load8(from), v);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = j < left ? load(from[j]) : 0.0f;
}
__device__ __forceinline__ void write_piece(X* to, const float (&v)[8], int left, bool wide) {
    if (wide) return store8(to, pack8<X>(v));
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (j < left) store(&to[j], v[j]);
}

// The first weight of group `g`. All groups have the same weights, or each has its own.
__device__ __forceinline__ const X* weights_of(const X* weight, int weights, int g, int size) { return weight + (weights > size ? (u64)g * size : 0); }

// The pointers are not `__restrict__`, because reads could then move before the wait.
extern "C" __global__ void __launch_bounds__(256) wide_gated_norm(X* y, const X* x, const X* z, const X* weight, int rows, int size, int weights,
                                                                  float eps) {
    start_successors();
    wait_for_predecessors();
    const bool wide = size % 8 == 0 && aligned(y, x, z, weight);
    const X* const of_group = weights_of(weight, weights, blockIdx.y, size);
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const u64 first = ((u64)row * gridDim.y + blockIdx.y) * size;
        float square = 0.0f;
        for (int c = threadIdx.x * 8; c < size; c += 256 * 8) {
            float u[8], gate[8];
            read_piece(u, x + first + c, size - c, wide);
            if (BEFORE) read_piece(gate, z + first + c, size - c, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                if (BEFORE) u[j] *= silu_and_slope(gate[j]).value;
                square += u[j] * u[j];
            }
        }
        const float rstd = 1.0f / sqrtf(block_sum(square) / size + eps);
        for (int c = threadIdx.x * 8; c < size; c += 256 * 8) {
            float u[8], gate[8], w[8];
            read_piece(u, x + first + c, size - c, wide);
            read_piece(gate, z + first + c, size - c, wide);
            read_piece(w, of_group + c, size - c, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float silu = silu_and_slope(gate[j]).value;
                u[j] = BEFORE ? u[j] * silu * rstd * w[j] : u[j] * rstd * w[j] * silu;
            }
            write_piece(y + first + c, u, size - c, wide);
        }
    }
}

// A thread's piece of a group in backward: the gradient, the input, the gate and the weights.
struct Piece {
    float d[8], u[8], gate[8], w[8];
    __device__ __forceinline__ Piece(const X* dy, const X* x, const X* z, const X* weight, u64 first, int c, int left, bool wide) {
        read_piece(d, dy + first + c, left, wide);
        read_piece(u, x + first + c, left, wide);
        read_piece(gate, z + first + c, left, wide);
        read_piece(w, weight + c, left, wide);
    }
};

// Each block writes its sums of the weight gradient to `partial`, `[blocks, groups, size]`.
extern "C" __global__ void __launch_bounds__(256) wide_gated_norm_backward(X* dx, X* dz, float* partial, const X* dy, const X* x, const X* z,
                                                                           const X* weight, int rows, int size, int weights, float eps) {
    // A thread reads and writes its own pieces only, each with room for eight sums.
    extern __shared__ float sums[];
    const bool wide = size % 8 == 0 && aligned(dx, dz, dy, x, z, weight);
    const X* const of_group = weights_of(weight, weights, blockIdx.y, size);
    for (int c = threadIdx.x * 8; c < size; c += 256 * 8)
        for (int j = 0; j < 8; j++) sums[c + j] = 0.0f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const u64 first = ((u64)row * gridDim.y + blockIdx.y) * size;
        float square = 0.0f, dot = 0.0f;
        for (int c = threadIdx.x * 8; c < size; c += 256 * 8) {
            Piece of(dy, x, z, of_group, first, c, size - c, wide);
            float(&d)[8] = of.d, (&u)[8] = of.u, (&gate)[8] = of.gate, (&w)[8] = of.w;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float silu = silu_and_slope(gate[j]).value;
                if (BEFORE) u[j] *= silu;
                square += u[j] * u[j];
                dot += d[j] * w[j] * (BEFORE ? 1.0f : silu) * u[j];
            }
        }
        const float rstd = 1.0f / sqrtf(block_sum(square) / size + eps), mean = block_sum(dot) * rstd / size;
        for (int c = threadIdx.x * 8; c < size; c += 256 * 8) {
            Piece of(dy, x, z, of_group, first, c, size - c, wide);
            float(&d)[8] = of.d, (&u)[8] = of.u, (&gate)[8] = of.gate, (&w)[8] = of.w;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const Silu silu = silu_and_slope(gate[j]);
                const float n = (BEFORE ? u[j] * silu.value : u[j]) * rstd, t = d[j] * w[j] * (BEFORE ? 1.0f : silu.value), dv = rstd * (t - n * mean);
                sums[c + j] += d[j] * n * (BEFORE ? 1.0f : silu.value);
                gate[j] = BEFORE ? dv * u[j] * silu.slope : d[j] * n * w[j] * silu.slope;
                d[j] = BEFORE ? dv * silu.value : dv;
            }
            write_piece(dx + first + c, d, size - c, wide);
            write_piece(dz + first + c, gate, size - c, wide);
        }
    }
    float* const to = partial + ((u64)blockIdx.x * gridDim.y + blockIdx.y) * size;
    for (int c = threadIdx.x * 8; c < size; c += 256 * 8)
        for (int j = 0; j < min(8, size - c); j++) to[c + j] = sums[c + j];
}
