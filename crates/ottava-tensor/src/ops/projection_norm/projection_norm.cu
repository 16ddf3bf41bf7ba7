// A row has queries, keys and values; queries, and keys, are normalised over all their elements. Ranks may divide the elements: then each
// has equal parts, and `squares` and `dots`, `[rows, 2]`, are sums over all `ranks`.

// With ADDS_ONE a normalised value is multiplied by one plus its weight.
#ifndef ADDS_ONE
#define ADDS_ONE 0
#endif

__device__ __forceinline__ float gain(X weight) { return ADDS_ONE ? 1.0f + load(weight) : load(weight); }

__device__ __forceinline__ float rstd_of(float square, int n, int ranks, float eps) { return 1.0f / sqrtf(square / (n * ranks) + eps); }

// One block per row.
extern "C" __global__ void __launch_bounds__(256) projection_squares(float* squares, const X* x, int queries, int keys, int values) {
    const u64 row = (u64)blockIdx.x * (queries + keys + values);
    for (int part = 0; part < 2; part++) {
        const X* const from = x + row + (part ? queries : 0);
        const int n = part ? keys : queries;
        float sum = 0.0f;
        for (int c = threadIdx.x; c < n; c += blockDim.x) sum += load(from[c]) * load(from[c]);
        sum = block_sum(sum);
        if (threadIdx.x == 0) squares[2 * (u64)blockIdx.x + part] = sum;
    }
}

// One block per row; threads stride over its elements.
extern "C" __global__ void __launch_bounds__(256) projection_norm(X* y, const X* x, const X* wq, const X* wk, const float* squares,
                                                                  int queries, int keys, int values, int ranks, float eps) {
    const u64 row = (u64)blockIdx.x * (queries + keys + values);
    for (int part = 0; part < 2; part++) {
        const u64 at = row + (part ? queries : 0);
        const int n = part ? keys : queries;
        const X* weight = part ? wk : wq;
        const float rstd = rstd_of(squares[2 * (u64)blockIdx.x + part], n, ranks, eps);
        for (int c = threadIdx.x; c < n; c += blockDim.x) store(&y[at + c], load(x[at + c]) * rstd * gain(weight[c]));
    }
    for (int c = queries + keys + threadIdx.x; c < queries + keys + values; c += blockDim.x) y[row + c] = x[row + c];
}

// Sums of products of the gradient by the normalised values and the normalised values, one block per row.
extern "C" __global__ void __launch_bounds__(256) projection_dots(float* dots, const X* dy, const X* x, const X* wq, const X* wk,
                                                                  const float* squares, int queries, int keys, int values, int ranks,
                                                                  float eps) {
    const u64 row = (u64)blockIdx.x * (queries + keys + values);
    for (int part = 0; part < 2; part++) {
        const u64 at = row + (part ? queries : 0);
        const int n = part ? keys : queries;
        const X* weight = part ? wk : wq;
        const float rstd = rstd_of(squares[2 * (u64)blockIdx.x + part], n, ranks, eps);
        float sum = 0.0f;
        for (int c = threadIdx.x; c < n; c += blockDim.x) sum += load(dy[at + c]) * gain(weight[c]) * (load(x[at + c]) * rstd);
        sum = block_sum(sum);
        if (threadIdx.x == 0) dots[2 * (u64)blockIdx.x + part] = sum;
    }
}

// Each block processes every gridDim-th row, and writes its sums of the gradients of the weights to its row of `partial_q` and `partial_k`,
// to which a thread adds the elements of its columns.
extern "C" __global__ void __launch_bounds__(256) projection_norm_backward(X* dx, float* partial_q, float* partial_k, const X* dy, const X* x,
                                                                           const X* wq, const X* wk, const float* squares, const float* dots,
                                                                           int rows, int queries, int keys, int values, int ranks, float eps) {
    partial_q += (u64)blockIdx.x * queries;
    partial_k += (u64)blockIdx.x * keys;
    for (int c = threadIdx.x; c < queries; c += blockDim.x) partial_q[c] = 0.0f;
    for (int c = threadIdx.x; c < keys; c += blockDim.x) partial_k[c] = 0.0f;
    for (int t = blockIdx.x; t < rows; t += gridDim.x) {
        const u64 row = (u64)t * (queries + keys + values);
        for (int part = 0; part < 2; part++) {
            const u64 at = row + (part ? queries : 0);
            const int n = part ? keys : queries;
            const X* weight = part ? wk : wq;
            float* const partial = part ? partial_k : partial_q;
            const float rstd = rstd_of(squares[2 * (u64)t + part], n, ranks, eps);
            const float projection = dots[2 * (u64)t + part] / (n * ranks);
            for (int c = threadIdx.x; c < n; c += blockDim.x) {
                const float d = load(dy[at + c]), normed = load(x[at + c]) * rstd;
                store(&dx[at + c], rstd * (d * gain(weight[c]) - normed * projection));
                partial[c] += d * normed;
            }
        }
        for (int c = queries + keys + threadIdx.x; c < queries + keys + values; c += blockDim.x) dx[row + c] = dy[row + c];
    }
}
