// `X` is the type of a tensor and of its reference.
struct Sums { double at[4]; };

__device__ __forceinline__ void block_sums(double* into, const Sums& sums) {
    for (int k = 0; k < 4; k++) {
        const double sum = block_sum(sums.at[k]);
        if (threadIdx.x == 0) into[k] = sum;
    }
}

// Each block writes four sums: x·x, r·r, x·r and the squared error, in F64.
extern "C" __global__ void __launch_bounds__(256) compare(double* partial, const X* x, const X* reference, u64 n) {
    const bool wide = aligned(x, reference);
    Sums sums = {};
    for (u64 at = 8 * grid_start(); at < n; at += 8 * grid_step()) {
        const int valid = n - at < 8 ? n - at : 8;
        float a[8], r[8];
        unpack8(fetch8(x + at, valid, wide && valid == 8), a);
        unpack8(fetch8(reference + at, valid, wide && valid == 8), r);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const double p = a[i], q = r[i];
            sums.at[0] += p * p;
            sums.at[1] += q * q;
            sums.at[2] += p * q;
            sums.at[3] += (p - q) * (p - q);
        }
    }
    block_sums(partial + 4 * blockIdx.x, sums);
}

// One block.
extern "C" __global__ void __launch_bounds__(256) total(double* sums, const double* partial, int n) {
    Sums all = {};
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        for (int k = 0; k < 4; k++) all.at[k] += partial[4 * i + k];
    block_sums(sums, all);
}
