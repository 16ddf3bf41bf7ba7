// One block per row of logits; threads stride over the vocabulary. The row is read four times, mostly from L2: for the maximum, for the log-sum-exp, for
// the entropy, and for the gradient.
#define LOWEST -3.402823466e38f

__device__ __forceinline__ float weighted(float p, float by) { return p > 0.0f ? p * by : 0.0f; }

extern "C" __global__ void entropy_gradient(float* entropies, X* logits, const int* targets, const float* factors, const float* weights,
                                            const float* scale, float coefficient, int vocabulary, int pitch) {
    X* row = logits + (u64)blockIdx.x * pitch;
    const int target = targets[blockIdx.x];
    if (target == IGNORE_INDEX) {
        for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) store(&row[v], 0.0f);
        if (threadIdx.x == 0) entropies[blockIdx.x] = 0.0f;
        return;
    }
    float largest = LOWEST;
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) largest = fmaxf(largest, load(row[v]));
    largest = block_max(largest);
    // A NaN makes the sum NaN, and with it the gradient: the trainer stops on NaN.
    float sum = 0.0f;
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) sum += expf(load(row[v]) - largest);
    const float lse = largest + logf(block_sum(sum));
    float negative = 0.0f;
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
        const float log = load(row[v]) - lse;
        negative += weighted(expf(log), log);
    }
    const float entropy = -block_sum(negative);
    if (threadIdx.x == 0) entropies[blockIdx.x] = entropy;
    const float factor = factors[blockIdx.x], bonus = coefficient * *scale * weights[blockIdx.x];
    for (int v = threadIdx.x; v < vocabulary; v += blockDim.x) {
        const float log = load(row[v]) - lse, p = expf(log);
        store(&row[v], factor * (p - (v == target ? 1.0f : 0.0f)) + bonus * weighted(p, log + entropy));
    }
}
