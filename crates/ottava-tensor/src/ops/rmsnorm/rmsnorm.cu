#ifndef FORMAT
// A row lies in the registers of its block, `GROUPS` times eight channels per thread, where it is aligned and short enough.
#define GROUPS 2

// One block per row. Any of `y`, `sum`, `residual` and `amax` may be null: with `residual` the row that is normalised is
// x + residual, which goes to `sum`; `amax` is raised to the largest absolute value of y.
extern "C" __global__ void __launch_bounds__(512) rmsnorm(X* y, float* rstd, X* sum, float* amax, const X* x, const X* residual,
                                                          const X* weight, int C, float eps) {
    const u64 row = (u64)blockIdx.x * C;
    float squares = 0.0f, largest = 0.0f;
    if (C % 8 == 0 && C <= 8 * GROUPS * blockDim.x && aligned(y, sum, x, residual, weight)) {
        Eight<X> v[GROUPS], w[GROUPS];
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            if (c >= C) continue;
            v[k] = load8(x + row + c);
            if (residual) w[k] = load8(residual + row + c);
        }
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            if (c >= C) continue;
            if (residual) {
#pragma unroll
                for (int i = 0; i < 8; i++) store(&v[k].at[i], load(v[k].at[i]) + load(w[k].at[i]));
                store8(sum + row + c, v[k]);
            }
            if (y) w[k] = load8(weight + c);
#pragma unroll
            for (int i = 0; i < 8; i++) squares += load(v[k].at[i]) * load(v[k].at[i]);
        }
        const float r = 1.0f / sqrtf(block_sum(squares) / C + eps);      // as in cpu.rs; rsqrtf rounds differently
        if (threadIdx.x == 0) rstd[blockIdx.x] = r;
        if (!y) return;
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            if (c >= C) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                store(&v[k].at[i], load(v[k].at[i]) * r * load(w[k].at[i]));
                largest = fmaxf(largest, fabsf(load(v[k].at[i])));
            }
            store8(y + row + c, v[k]);
        }
    } else {
        const X* in = residual ? sum : x;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            if (residual) store(&sum[row + c], load(x[row + c]) + load(residual[row + c]));
            squares += load(in[row + c]) * load(in[row + c]);
        }
        const float r = 1.0f / sqrtf(block_sum(squares) / C + eps);
        if (threadIdx.x == 0) rstd[blockIdx.x] = r;
        if (!y) return;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            store(&y[row + c], load(in[row + c]) * r * load(weight[c]));
            largest = fmaxf(largest, fabsf(load(y[row + c])));
        }
    }
    if (!amax) return;
    largest = block_max(largest);
    if (threadIdx.x == 0) atomicMax((u32*)amax, __float_as_uint(largest));
}

// The sum of one value per thread with a single barrier: `warps` must be another one than in the call before.
__device__ __forceinline__ float row_sum(float x, float* warps) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, offset);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
    for (int w = 1; w < blockDim.x / 32; w++) x += warps[w];
    return x;
}

// Each block takes every gridDim-th row and leaves its part of dweight in its row of `partial`. `residual`, if not null, is
// added to dx. While one row is worked on, the next is on its way.
extern "C" __global__ void __launch_bounds__(512) rmsnorm_backward(X* dx, float* partial, const X* dy, const X* x, const X* weight,
                                                                   const float* rstd, const X* residual, int rows, int C) {
    __shared__ float warps[2][16];
    partial += (u64)blockIdx.x * C;
    int turn = 0;
    if (C % 8 == 0 && C <= 8 * GROUPS * blockDim.x && aligned(dx, partial, dy, x, weight, residual)) {
        Eight<X> w[GROUPS], next_d[GROUPS], next_v[GROUPS];
        float sums[GROUPS][8] = {};
        const auto fetch = [&](int row) {
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                const int c = 8 * (threadIdx.x + k * blockDim.x);
                if (c >= C || row >= rows) continue;
                next_d[k] = load8(dy + (u64)row * C + c);
                next_v[k] = load8(x + (u64)row * C + c);
            }
        };
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            if (c < C) w[k] = load8(weight + c);
        }
        fetch(blockIdx.x);
        for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
            const float r = rstd[row];
            Eight<X> d[GROUPS], v[GROUPS], add[GROUPS];
            float sum = 0.0f;
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                const int c = 8 * (threadIdx.x + k * blockDim.x);
                if (c >= C) continue;
                d[k] = next_d[k];
                v[k] = next_v[k];
                if (residual) add[k] = load8(residual + (u64)row * C + c);
            }
            fetch(row + gridDim.x);
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                if (8 * (threadIdx.x + k * blockDim.x) >= C) continue;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const float normed = load(v[k].at[i]) * r;
                    sum += load(d[k].at[i]) * load(w[k].at[i]) * normed;
                    sums[k][i] += load(d[k].at[i]) * normed;
                }
            }
            const float projection = row_sum(sum, warps[turn]) / C;
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                const int c = 8 * (threadIdx.x + k * blockDim.x);
                if (c >= C) continue;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    store(&v[k].at[i], r * (load(d[k].at[i]) * load(w[k].at[i]) - load(v[k].at[i]) * r * projection));
                    if (residual) store(&v[k].at[i], load(v[k].at[i]) + load(add[k].at[i]));
                }
                store8(dx + (u64)row * C + c, v[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            const int c = 8 * (threadIdx.x + k * blockDim.x);
            if (c >= C) continue;
            Eight<float> out;
#pragma unroll
            for (int i = 0; i < 8; i++) out.at[i] = sums[k][i];
            store8(partial + c, out);
        }
        return;
    }
    for (int c = threadIdx.x; c < C; c += blockDim.x) partial[c] = 0.0f;
    for (int row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        const X *d = dy + (u64)row * C, *v = x + (u64)row * C;
        const float r = rstd[row];
        float sum = 0.0f;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            sum += load(d[c]) * load(weight[c]) * (load(v[c]) * r);
            partial[c] += load(d[c]) * (load(v[c]) * r);
        }
        const float projection = row_sum(sum, warps[turn]) / C;
        for (int c = threadIdx.x; c < C; c += blockDim.x) {
            X* out = dx + (u64)row * C + c;
            store(out, r * (load(d[c]) * load(weight[c]) - load(v[c]) * r * projection));
            if (residual) store(out, load(*out) + load(residual[(u64)row * C + c]));
        }
    }
}
#else
struct Normed {
    const X *x, *weight;
    const float* rstd;
    int C;
    bool wide;
    struct Raw { Eight<X> x, weight; float rstd; };
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        return {fetch8(x + (u64)row * C + column, C - column, wide), fetch8(weight + column, C - column, wide), rstd[row]};
    }
    __device__ __forceinline__ void values(const Raw& raw, float* v) const {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = stored(load(raw.x.at[i]) * raw.rstd * load(raw.weight.at[i]));
    }
};

// Grid (C / 128, T / 128), 256 threads.
extern "C" __global__ void __launch_bounds__(256) rmsnorm_codes(DESTINATION, const X* x, const X* weight, const float* rstd) {
    const Destination to = THE_DESTINATION;
    quantize_tile(to, Normed{x, weight, rstd, columns, columns % 8 == 0 && aligned(x, weight)});
}
#endif
