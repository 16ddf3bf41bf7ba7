// Groups of `lanes` threads (heads.cuh) stride over the `total` heads of all rows.

// The number of heads that a thread loads before it processes the first head.
#define LOADS 2

__device__ __forceinline__ float rstd_of(const float (&x)[8], int lanes, int dim, float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += x[j] * x[j];
    return 1.0f / sqrtf(group_sum(sum, lanes) / dim + eps);
}

// The heads of a group: `p`, and every `stride`-th head after it. `first` is the first head of the warp. All threads of a warp leave a loop over heads
// together, because they reduce together.
struct Heads {
    u64 first, p, stride;
    __device__ __forceinline__ explicit Heads(int lanes) {
        const int groups = blockDim.x / lanes, in_warp = 32 / lanes;
        stride = (u64)gridDim.x * groups;
        first = (u64)blockIdx.x * groups + threadIdx.x / 32 * in_warp;
        p = first + threadIdx.x % 32 / lanes;
    }
    __device__ __forceinline__ void advance() { first += stride, p += stride; }
};

// The pointers are not `__restrict__`, because reads could then move before the wait.
extern "C" __global__ void __launch_bounds__(256) gated_norm(X* y, const X* x, const X* z, const X* weight, u64 total, int dim, int lanes,
                                                             float eps) {
    start_successors();
    wait_for_predecessors();
    const Head head = {(int)threadIdx.x % lanes, dim, lanes * 8 == dim && aligned(y, x, z, weight)};
    float weights[8];
    head.read(weight, weights);
    Heads at(lanes);
    while (at.first < total) {
        float xs[LOADS][8] = {}, zs[LOADS][8] = {};
#pragma unroll
        for (int l = 0; l < LOADS; l++)
            if (at.p + l * at.stride < total) {
                head.read(x + (at.p + l * at.stride) * dim, xs[l]);
                head.read(z + (at.p + l * at.stride) * dim, zs[l]);
            }
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            float(&v)[8] = xs[l];
            const float rstd = rstd_of(v, lanes, dim, eps);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = v[j] * rstd * weights[j] * silu_and_slope(zs[l][j]).value;
            if (at.p < total) head.write(y + at.p * dim, v);
            at.advance();
        }
    }
}

// Each block writes its sums of the weight gradient to its row of `partial`, `[blocks, dim]`.
extern "C" __global__ void __launch_bounds__(256) gated_norm_backward(X* dx, X* dz, float* partial, const X* dy, const X* x, const X* z,
                                                                      const X* weight, u64 total, int dim, int lanes, float eps) {
    __shared__ float sums[256 * 8];
    const Head head = {(int)threadIdx.x % lanes, dim, lanes * 8 == dim && aligned(dx, dz, dy, x, z, weight)};
    float weights[8], sum[8] = {};
    head.read(weight, weights);
    Heads at(lanes);
    while (at.first < total) {
        float ds[LOADS][8] = {}, xs[LOADS][8] = {}, zs[LOADS][8] = {};
#pragma unroll
        for (int l = 0; l < LOADS; l++)
            if (at.p + l * at.stride < total) {
                head.read(dy + (at.p + l * at.stride) * dim, ds[l]);
                head.read(x + (at.p + l * at.stride) * dim, xs[l]);
                head.read(z + (at.p + l * at.stride) * dim, zs[l]);
            }
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            float(&d)[8] = ds[l], (&n)[8] = xs[l], (&gate)[8] = zs[l];
            const float rstd = rstd_of(n, lanes, dim, eps);
            float mean = 0.0f, u[8];
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const Silu silu = silu_and_slope(gate[j]);
                n[j] *= rstd;
                u[j] = d[j] * weights[j] * silu.value;
                mean += u[j] * n[j];
                if (at.p < total) sum[j] += d[j] * n[j] * silu.value;
                gate[j] = d[j] * n[j] * weights[j] * silu.slope;
            }
            mean = group_sum(mean, lanes) / dim;
#pragma unroll
            for (int j = 0; j < 8; j++) d[j] = rstd * (u[j] - n[j] * mean);
            if (at.p < total) {
                head.write(dx + at.p * dim, d);
                head.write(dz + at.p * dim, gate);
            }
            at.advance();
        }
    }
    // Each group writes a row of sums. The rows are added in the order of the groups.
    const int groups = blockDim.x / lanes, group = threadIdx.x / lanes, padded = lanes * 8;
#pragma unroll
    for (int j = 0; j < 8; j++) sums[group * padded + head.column(j)] = sum[j];
    __syncthreads();
    for (int c = threadIdx.x; c < dim; c += blockDim.x) {
        float total_of_block = 0.0f;
        for (int g = 0; g < groups; g++) total_of_block += sums[g * padded + c];
        partial[(u64)blockIdx.x * dim + c] = total_of_block;
    }
}
