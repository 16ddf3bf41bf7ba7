// Groups of `lanes` threads (heads.cuh) stride over the heads of all rows.

// With CENTERED, this is LayerNorm with a weight per head. The number of groups is a multiple of the number of heads, so each group has one head of
// all rows.
#ifndef CENTERED
#define CENTERED 0
#endif

// With ADDS_ONE, a normalised value is multiplied by one plus its weight.
#ifndef ADDS_ONE
#define ADDS_ONE 0
#endif

// The number of heads that a thread loads before it processes the first head.
#define FORWARD_LOADS 4
#define BACKWARD_LOADS 2

// Returns the rstd of a head. LayerNorm first subtracts the mean of the head, unless it is a value head. Elements beyond the head stay zero.
__device__ __forceinline__ float rstd_of(float (&x)[8], const Head& head, int lanes, float eps, bool centers = true) {
    float sum = 0.0f;
    if constexpr (CENTERED) {
#pragma unroll
        for (int j = 0; j < 8; j++) sum += x[j];
        const float mean = group_sum(sum, lanes) / head.dim;
        sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (centers && (head.wide || head.column(j) < head.dim)) x[j] -= mean;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) sum += x[j] * x[j];
    return 1.0f / sqrtf(group_sum(sum, lanes) / head.dim + eps);
}

// Reads the weights of queries and keys. For LayerNorm, reads the weight of the group's head `h` into `q` or `k`, depending on the kind of the head.
__device__ __forceinline__ void read_weights(const Head& head, const X* wq, const X* wk, u64 h, int heads, int kv_heads, float (&q)[8],
                                             float (&k)[8]) {
    if constexpr (CENTERED) {
        h %= heads + 2 * kv_heads;
        if (h < heads) head.read(wq + h * head.dim, q);
        else if (h < heads + kv_heads) head.read(wk + (h - heads) * head.dim, k);
    } else {
        head.read(wq, q);
        head.read(wk, k);
        if constexpr (ADDS_ONE) {
#pragma unroll
            for (int j = 0; j < 8; j++) q[j] += 1.0f, k[j] += 1.0f;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) head_norm(X* y, const X* x, const X* wq, const X* wk, int rows, int heads, int kv_heads,
                                                            int dim, int lanes, float eps) {
    const Head head = {(int)threadIdx.x % lanes, dim, lanes * 8 == dim && aligned(y, x, wq, wk)};
    const int all = heads + 2 * kv_heads, groups = blockDim.x / lanes, in_warp = 32 / lanes;
    const u64 total = (u64)rows * all;
    float q[8] = {}, k[8] = {};
    read_weights(head, wq, wk, (u64)blockIdx.x * groups + threadIdx.x / lanes, heads, kv_heads, q, k);
    const u64 stride = (u64)gridDim.x * groups;
    const int advance = stride % all;
    u64 first = (u64)blockIdx.x * groups + threadIdx.x / 32 * in_warp, p = first + threadIdx.x % 32 / lanes;
    int h = p % all;
    // All threads of a warp leave the loop together, because they reduce together.
    while (first < total) {
        float v[FORWARD_LOADS][8] = {};
#pragma unroll
        for (int l = 0; l < FORWARD_LOADS; l++)
            if (p + l * stride < total) head.read(x + (p + l * stride) * dim, v[l]);
#pragma unroll
        for (int l = 0; l < FORWARD_LOADS; l++) {
            const float rstd = rstd_of(v[l], head, lanes, eps, h < heads + kv_heads);
            if (h < heads + kv_heads)
#pragma unroll
                for (int j = 0; j < 8; j++) v[l][j] = v[l][j] * rstd * (h < heads ? q[j] : k[j]);
            if (p < total) head.write(y + p * dim, v[l]);
            first += stride;
            p += stride;
            h += advance;
            if (h >= all) h -= all;
        }
    }
}

// Each block writes its sums of the weight gradients to its row of `partial_q` and `partial_k`, `[blocks, dim]`. For LayerNorm, each group writes the
// sums of its head, `[groups / all heads, heads, dim]`.
extern "C" __global__ void __launch_bounds__(256) head_norm_backward(X* dx, float* partial_q, float* partial_k, const X* dy, const X* x,
                                                                     const X* wq, const X* wk, int rows, int heads, int kv_heads, int dim,
                                                                     int lanes, float eps) {
    __shared__ float sums[2][256 * 8];
    const Head head = {(int)threadIdx.x % lanes, dim, lanes * 8 == dim && aligned(dx, dy, x, wq, wk)};
    const int all = heads + 2 * kv_heads, groups = blockDim.x / lanes, in_warp = 32 / lanes;
    const u64 total = (u64)rows * all;
    float q[8] = {}, k[8] = {}, sum_q[8] = {}, sum_k[8] = {};
    read_weights(head, wq, wk, (u64)blockIdx.x * groups + threadIdx.x / lanes, heads, kv_heads, q, k);
    const u64 stride = (u64)gridDim.x * groups;
    const int advance = stride % all;
    u64 first = (u64)blockIdx.x * groups + threadIdx.x / 32 * in_warp, p = first + threadIdx.x % 32 / lanes;
    int h = p % all;
    while (first < total) {
        float xs[BACKWARD_LOADS][8] = {}, gs[BACKWARD_LOADS][8] = {};
#pragma unroll
        for (int l = 0; l < BACKWARD_LOADS; l++)
            if (p + l * stride < total) {
                head.read(x + (p + l * stride) * dim, xs[l]);
                head.read(dy + (p + l * stride) * dim, gs[l]);
            }
#pragma unroll
        for (int l = 0; l < BACKWARD_LOADS; l++) {
            float(&v)[8] = xs[l], (&g)[8] = gs[l];
            const float rstd = rstd_of(v, head, lanes, eps);
            float projection = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) projection += g[j] * (h < heads ? q[j] : k[j]) * (v[j] * rstd);
            projection = group_sum(projection, lanes) / dim;
            float shift = 0.0f;
            if constexpr (CENTERED) {
#pragma unroll
                for (int j = 0; j < 8; j++) shift += g[j] * (h < heads ? q[j] : k[j]);
                shift = group_sum(shift, lanes) / dim;
            }
            if (p < total && h < heads + kv_heads) {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    const float normed = v[j] * rstd, dw = g[j] * normed;
                    if (h < heads) sum_q[j] += dw;
                    else sum_k[j] += dw;
                    const float centered = g[j] * (h < heads ? q[j] : k[j]) - normed * projection;
                    g[j] = rstd * (CENTERED ? centered - shift : centered);
                }
            }
            if (p < total) head.write(dx + p * dim, g);
            first += stride;
            p += stride;
            h += advance;
            if (h >= all) h -= all;
        }
    }
    if constexpr (CENTERED) {
        const u64 own = (u64)blockIdx.x * groups + threadIdx.x / lanes;
        const int of = own % all;
        if (of >= heads + kv_heads) return;
        float* to = of < heads ? partial_q + (own / all * heads + of) * dim : partial_k + (own / all * kv_heads + of - heads) * dim;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (head.wide || head.column(j) < dim) to[head.column(j)] = of < heads ? sum_q[j] : sum_k[j];
        return;
    }
    // Each group writes a row of sums. The rows are added in the order of the groups.
    const int group = threadIdx.x / lanes, padded = lanes * 8;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sums[0][group * padded + head.column(j)] = sum_q[j];
        sums[1][group * padded + head.column(j)] = sum_k[j];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < dim; c += blockDim.x) {
        float of_q = 0.0f, of_k = 0.0f;
        for (int g = 0; g < groups; g++) {
            of_q += sums[0][g * padded + c];
            of_k += sums[1][g * padded + c];
        }
        partial_q[(u64)blockIdx.x * dim + c] = of_q;
        partial_k[(u64)blockIdx.x * dim + c] = of_k;
    }
}
