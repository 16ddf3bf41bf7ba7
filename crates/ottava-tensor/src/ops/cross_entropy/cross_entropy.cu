// One block per row; threads stride over the vocabulary.
#define IGNORE_INDEX -100

// A NaN must come through, so this maximum keeps it.
struct KeepNan { __device__ float operator()(float a, float b) const { return a != a || b > a ? (a != a ? a : b) : (b != b ? b : a); } };

__device__ __forceinline__ float log_sum_exp(const X* logits, int V) {
    float largest = load(logits[0]);
    for (int v = threadIdx.x; v < V; v += blockDim.x) largest = KeepNan()(largest, load(logits[v]));
    largest = block_reduce(largest, KeepNan());
    float sum = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) sum += expf(load(logits[v]) - largest);
    return largest + logf(block_sum(sum));
}

extern "C" __global__ void cross_entropy(float* losses, const X* logits, const int* targets, int V) {
    const X* row = logits + (u64)blockIdx.x * V;
    const int target = targets[blockIdx.x];
    const float lse = log_sum_exp(row, V);
    if (threadIdx.x == 0) losses[blockIdx.x] = target == IGNORE_INDEX ? 0.0f : lse - load(row[target]);
}

extern "C" __global__ void cross_entropy_gradient(float* losses, X* logits, const int* targets, int V, float scale) {
    X* row = logits + (u64)blockIdx.x * V;
    const int target = targets[blockIdx.x];
    if (target == IGNORE_INDEX) {
        for (int v = threadIdx.x; v < V; v += blockDim.x) store(&row[v], 0.0f);
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        return;
    }
    const float lse = log_sum_exp(row, V);
    if (threadIdx.x == 0) losses[blockIdx.x] = lse - load(row[target]);
    __syncthreads();
    for (int v = threadIdx.x; v < V; v += blockDim.x)
        store(&row[v], (expf(load(row[v]) - lse) - (v == target ? 1.0f : 0.0f)) * scale);
}
