// `X` is the type of the tensors of one launch. E4M3 tensors have a scale.
// `Parts` is a table of `CAPACITY` tensors (cuda.rs). `end` is the number of blocks of this tensor and of the preceding tensors.
// `LOADS` is the number of loads in flight per thread.
#define LOADS 4
struct Part { const X* x; const float* scale; u64 n, end; };
struct Parts { Part at[CAPACITY]; };

// Sums eight squares in F32, and these sums in F64, because converting every element would cost more than reading it. Each block writes the
// sum of squares of `chunk` elements of one tensor.
extern "C" __global__ void __launch_bounds__(256) sum_of_squares(double* partial, int count, u64 chunk, const __grid_constant__ Parts parts) {
    int t = 0;
    while (t + 1 < count && blockIdx.x >= parts.at[t].end) t++;
    const u64 start = (blockIdx.x - (t > 0 ? parts.at[t - 1].end : 0)) * chunk;
    const X* x = parts.at[t].x + start;
    const u64 left = parts.at[t].n - start, n = left < chunk ? left : chunk, eights = aligned(x) ? n / 8 : 0;
    const float scale = sizeof(X) == 1 ? *parts.at[t].scale : 1.0f;
    double sum = 0.0;
    for (u64 g = threadIdx.x; g < eights; g += LOADS * blockDim.x) {
        Eight<X> raw[LOADS] = {};
#pragma unroll
        for (int k = 0; k < LOADS; k++) if (g + k * blockDim.x < eights) raw[k] = load8(x + 8 * (g + k * blockDim.x));
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            float e[8], eight = 0.0f;
            unpack8(raw[k], e);
#pragma unroll
            for (int i = 0; i < 8; i++) if (sizeof(X) == 1) e[i] *= scale;
#pragma unroll
            for (int i = 0; i < 8; i++) eight += e[i] * e[i];
            if (eight > 1e-30f && eight < 1e30f) {
                sum += (double)eight;
            } else {
                // Here the F32 sum overflowed or lost precision.
#pragma unroll
                for (int i = 0; i < 8; i++) sum += (double)e[i] * (double)e[i];
            }
        }
    }
    for (u64 i = 8 * eights + threadIdx.x; i < n; i += blockDim.x) {
        float e[8];
        unpack8(fetch8(x + i, 1, false), e);
        e[0] *= scale;
        sum += (double)e[0] * (double)e[0];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__device__ __forceinline__ double total(const double* partial, int n) {
    double sum = 0.0;
#pragma unroll 8
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
    return block_sum(sum);
}
// One block.
extern "C" __global__ void __launch_bounds__(1024) root_of_sum(float* norm, const double* partial, int n) {
    const double sum = total(partial, n);
    if (threadIdx.x == 0) *norm = (float)sqrt(sum);
}
// One block.
extern "C" __global__ void __launch_bounds__(1024) sum(double* all, const double* partial, int n) {
    const double sum = total(partial, n);
    if (threadIdx.x == 0) *all = sum;
}
// One thread.
extern "C" __global__ void limit_norm(float* limited, const float* norm, const float* limit) {
    *limited = *norm <= *limit ? *norm : __int_as_float(0x7F800000);
}
