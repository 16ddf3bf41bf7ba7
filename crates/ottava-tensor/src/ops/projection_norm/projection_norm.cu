// A row has queries, keys and values. Queries are normalised over all their elements, and so are keys. Ranks may divide the elements into equal
// parts; then `squares` and `dots`, `[rows, 2]`, are sums over all `ranks`. A thread processes eight neighbouring elements at a time.

// With ADDS_ONE, a normalised value is multiplied by one plus its weight.
#ifndef ADDS_ONE
#define ADDS_ONE 0
#endif

__device__ __forceinline__ float gain(float weight) { return ADDS_ONE ? 1.0f + weight : weight; }

__device__ __forceinline__ float rstd_of(float square, int n, int ranks, float eps) { return 1.0f / sqrtf(square / (n * ranks) + eps); }

// The numbers of elements of a row.
struct Widths {
    int queries, keys, values;
    __device__ __forceinline__ int all() const { return queries + keys + values; }
    // Return the width, and the first column, of the queries (part 0) or of the keys (part 1).
    __device__ __forceinline__ int of(int part) const { return part ? keys : queries; }
    __device__ __forceinline__ int first(int part) const { return part ? queries : 0; }
    // Returns whether all eights are whole and aligned in rows at these addresses.
    template <class... P> __device__ __forceinline__ bool wide(const P*... p) const { return (queries | keys | values) % 8 == 0 && aligned(p...); }
};

__device__ __forceinline__ void fetch(float* v, const X* x, int column, int n, bool wide) { unpack8(fetch8(x + column, n - column, wide), v); }

// Copies the values of a row.
__device__ __forceinline__ void copy_values(X* y, const X* x, Widths of, bool wide) {
    y += of.queries + of.keys, x += of.queries + of.keys;
    for (int c = 8 * threadIdx.x; c < of.values; c += 8 * blockDim.x) put8(y + c, fetch8(x + c, of.values - c, wide), of.values - c, wide);
}

// One block per row.
extern "C" __global__ void __launch_bounds__(256) projection_squares(float* squares, const X* x, int queries, int keys, int values) {
    start_successors();
    wait_for_predecessors();
    const Widths of = {queries, keys, values};
    const bool wide = of.wide(x);
    x += (u64)blockIdx.x * of.all();
    float sums[2] = {};
#pragma unroll
    for (int part = 0; part < 2; part++) {
        for (int c = 8 * threadIdx.x; c < of.of(part); c += 8 * blockDim.x) {
            float v[8];
            fetch(v, x + of.first(part), c, of.of(part), wide);
#pragma unroll
            for (int i = 0; i < 8; i++) sums[part] += v[i] * v[i];
        }
    }
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const float sum = block_sum(sums[part]);
        if (threadIdx.x == 0) squares[2 * (u64)blockIdx.x + part] = sum;
    }
}

// One block per row.
extern "C" __global__ void __launch_bounds__(256) projection_norm(X* y, const X* x, const X* wq, const X* wk, const float* squares,
                                                                  int queries, int keys, int values, int ranks, float eps) {
    start_successors();
    wait_for_predecessors();
    const Widths of = {queries, keys, values};
    const bool wide = of.wide(y, x, wq, wk);
    y += (u64)blockIdx.x * of.all();
    x += (u64)blockIdx.x * of.all();
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const int n = of.of(part);
        const float rstd = rstd_of(squares[2 * (u64)blockIdx.x + part], n, ranks, eps);
        for (int c = 8 * threadIdx.x; c < n; c += 8 * blockDim.x) {
            float v[8], weights[8];
            fetch(v, x + of.first(part), c, n, wide);
            fetch(weights, part ? wk : wq, c, n, wide);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = v[i] * rstd * gain(weights[i]);
            put8(y + of.first(part) + c, pack8<X>(v), n - c, wide);
        }
    }
    copy_values(y, x, of, wide);
}

// Sums the products of normalised values and the gradients by them. One block per row.
extern "C" __global__ void __launch_bounds__(256) projection_dots(float* dots, const X* dy, const X* x, const X* wq, const X* wk,
                                                                  const float* squares, int queries, int keys, int values, int ranks,
                                                                  float eps) {
    const Widths of = {queries, keys, values};
    const bool wide = of.wide(dy, x, wq, wk);
    dy += (u64)blockIdx.x * of.all();
    x += (u64)blockIdx.x * of.all();
    float sums[2] = {};
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const int n = of.of(part);
        const float rstd = rstd_of(squares[2 * (u64)blockIdx.x + part], n, ranks, eps);
        for (int c = 8 * threadIdx.x; c < n; c += 8 * blockDim.x) {
            float d[8], v[8], weights[8];
            fetch(d, dy + of.first(part), c, n, wide);
            fetch(v, x + of.first(part), c, n, wide);
            fetch(weights, part ? wk : wq, c, n, wide);
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (c + i < n) sums[part] += d[i] * gain(weights[i]) * (v[i] * rstd);
        }
    }
#pragma unroll
    for (int part = 0; part < 2; part++) {
        const float sum = block_sum(sums[part]);
        if (threadIdx.x == 0) dots[2 * (u64)blockIdx.x + part] = sum;
    }
}

// Each block processes every gridDim-th row, and writes its sums of the weight gradients to its row of `partial_q` and `partial_k`.
// A thread adds the gradients of its columns in registers.
extern "C" __global__ void __launch_bounds__(256) projection_norm_backward(X* dx, float* partial_q, float* partial_k, const X* dy, const X* x,
                                                                           const X* wq, const X* wk, const float* squares, const float* dots,
                                                                           int rows, int queries, int keys, int values, int ranks, float eps) {
    const Widths of = {queries, keys, values};
    const bool wide = of.wide(dx, dy, x, wq, wk);
    for (int part = 0; part < 2; part++) {
        const int n = of.of(part);
        float* const partial = (part ? partial_k : partial_q) + (u64)blockIdx.x * n;
        for (int c = 8 * threadIdx.x; c < n; c += 8 * blockDim.x) {
            float weights[8], sums[8] = {};
            fetch(weights, part ? wk : wq, c, n, wide);
#pragma unroll 2
            for (int t = blockIdx.x; t < rows; t += gridDim.x) {
                const u64 at = (u64)t * of.all() + of.first(part);
                const float rstd = rstd_of(squares[2 * (u64)t + part], n, ranks, eps), projection = dots[2 * (u64)t + part] / (n * ranks);
                float d[8], v[8];
                fetch(d, dy + at, c, n, wide);
                fetch(v, x + at, c, n, wide);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float normed = v[i] * rstd;
                    sums[i] += d[i] * normed;
                    v[i] = rstd * (d[i] * gain(weights[i]) - normed * projection);
                }
                put8(dx + at + c, pack8<X>(v), n - c, wide);
            }
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (c + i < n) partial[c + i] = sums[i];
        }
    }
    for (int t = blockIdx.x; t < rows; t += gridDim.x) copy_values(dx + (u64)t * of.all(), dy + (u64)t * of.all(), of, wide);
}
