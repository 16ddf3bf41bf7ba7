// One block per row of logits; threads stride over the vocabulary. The rows are read three times, mostly from L2: for the log-sum-exps, for the sums
// of the divergence, and for the gradient.
#define LOWEST -3.402823466e38f

// A running maximum and the sum of e^(x - maximum). A NaN makes the sum NaN.
struct Softmax { float largest, sum; };
__device__ __forceinline__ Softmax merge(Softmax a, Softmax b) {
    const float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

__device__ __forceinline__ float lse_of(const X* row, int V, float temperature) {
    __shared__ Softmax warps[32];
    Softmax s = {LOWEST, 0.0f};
    for (int v = threadIdx.x; v < V; v += blockDim.x) {
        const float x = load(row[v]) / temperature;
        if (x > s.largest) s = {x, s.sum * expf(s.largest - x)};
        s.sum += expf(x - s.largest);
    }
    for (int offset = 16; offset > 0; offset /= 2)
        s = merge(s, {__shfl_xor_sync(0xFFFFFFFF, s.largest, offset), __shfl_xor_sync(0xFFFFFFFF, s.sum, offset)});
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
    __syncthreads();
    s = warps[0];
    for (int w = 1; w < blockDim.x / 32; w++) s = merge(s, warps[w]);
    return s.largest + logf(s.sum);
}

// As `terms` in cpu.rs.
struct Terms { float teacher, student; };
__device__ __forceinline__ float weighted(float probability, float log_ratio) { return probability > 0.0f ? probability * log_ratio : 0.0f; }
__device__ __forceinline__ Terms terms_of(float beta, float s, float t) {
    const float of_student = expf(s), of_teacher = expf(t);
    if (beta == 0.0f) return {weighted(of_teacher, t - s), -of_teacher};
    if (beta == 1.0f) return {0.0f, weighted(of_student, s - t)};
    const float rest = 1.0f - beta, a = s + logf(rest), b = t + logf(beta), more = fmaxf(a, b);
    const float mixture = more + logf(1.0f + expf(fminf(a, b) - more));
    return {beta * weighted(of_teacher, t - mixture), rest * weighted(of_student, s - mixture)};
}

extern "C" __global__ void divergence_gradient(float* divergences, X* student, const X* teacher, const int* targets, const float* scale_of_loss,
                                               float beta, float temperature, int V, int of_student, int of_teacher) {
    X* own = student + (u64)blockIdx.x * of_student;
    const X* other = teacher + (u64)blockIdx.x * of_teacher;
    if (targets[blockIdx.x] == IGNORE_INDEX) {
        for (int v = threadIdx.x; v < V; v += blockDim.x) store(&own[v], 0.0f);
        if (threadIdx.x == 0) divergences[blockIdx.x] = 0.0f;
        return;
    }
    const float lse_of_own = lse_of(own, V, temperature), lse_of_other = lse_of(other, V, temperature);
    const auto terms_at = [&](int v) { return terms_of(beta, load(own[v]) / temperature - lse_of_own, load(other[v]) / temperature - lse_of_other); };
    float sum_of_teacher = 0.0f, sum_of_student = 0.0f;
    for (int v = threadIdx.x; v < V; v += blockDim.x) {
        const Terms terms = terms_at(v);
        sum_of_teacher += terms.teacher;
        sum_of_student += terms.student;
    }
    sum_of_teacher = block_sum(sum_of_teacher);
    sum_of_student = block_sum(sum_of_student);
    if (threadIdx.x == 0) divergences[blockIdx.x] = beta == 0.0f ? sum_of_teacher : sum_of_teacher + sum_of_student;
    const float scale = *scale_of_loss;
    for (int v = threadIdx.x; v < V; v += blockDim.x) {
        const float probability = expf(load(own[v]) / temperature - lse_of_own);
        store(&own[v], scale * ((terms_at(v).student - probability * sum_of_student) / temperature));
    }
}
