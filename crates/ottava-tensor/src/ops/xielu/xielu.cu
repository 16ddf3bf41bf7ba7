// The formula is in mod.rs. `alphas` of a launch are two numbers on the device.
#define BETA 0.5f
#define EPS -1e-6f

__device__ __forceinline__ float softplus(float a) { return fmaxf(a, 0.0f) + logf(1.0f + expf(-fabsf(a))); }
__device__ __forceinline__ float term(float x) { return expm1f(x < EPS ? x : EPS) - x; }

// One thread per element.
extern "C" __global__ void xielu(X* y, const X* x, const X* alpha_p, const X* alpha_n, u64 n) {
    const float P = softplus(load(*alpha_p)), N = BETA + softplus(load(*alpha_n));
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const float v = load(x[i]);
        store(&y[i], (v > 0.0f ? P * v * v : N * term(v)) + BETA * v);
    }
}

// Grid (PARTS). A block writes its two parts of the sums.
extern "C" __global__ void xielu_backward(X* dx, float* parts, const X* dy, const X* x, const X* alpha_p, const X* alpha_n, u64 n) {
    const float P = softplus(load(*alpha_p)), N = BETA + softplus(load(*alpha_n));
    float positive = 0.0f, negative = 0.0f;
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const float d = load(dy[i]), v = load(x[i]);
        float slope;
        if (v > 0.0f) {
            positive += d * v * v;
            slope = 2.0f * P * v;
        } else {
            negative += d * term(v);
            slope = N * (v < EPS ? expm1f(v) : -1.0f);
        }
        store(&dx[i], d * (slope + BETA));
    }
    positive = block_sum(positive);
    __syncthreads();
    negative = block_sum(negative);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = positive;
        parts[PARTS + blockIdx.x] = negative;
    }
}

// Grid (2), PARTS threads: the first block adds to the gradient of `alpha_p`, the second to the gradient of `alpha_n`.
extern "C" __global__ void xielu_alphas(float* dpositive, float* dnegative, const float* parts, const X* alpha_p, const X* alpha_n) {
    const float sum = block_sum(parts[blockIdx.x * PARTS + threadIdx.x]), alpha = load(blockIdx.x ? *alpha_n : *alpha_p);
    if (threadIdx.x == 0) *(blockIdx.x ? dnegative : dpositive) += sum / (1.0f + expf(-alpha));
}
