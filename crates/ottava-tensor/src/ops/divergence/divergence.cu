// One block per row of logits; threads stride over the vocabulary. The rows are read three times, mostly from L2: for the log-sum-exps, for the sums
// of the divergence, and for the gradient.
#define LOWEST -3.402823466e38f

// A running maximum and the sum of e^(x - maximum). A NaN makes the sum NaN.
struct Softmax { float largest, sum; };
__device__ __forceinline__ Softmax merge(Softmax a, Softmax b) {
    const float largest = fmaxf(a.largest, b.largest);
    return {largest, a.sum * expf(a.largest - largest) + b.sum * expf(b.largest - largest)};
}

// The logarithm of the sum of the exponentials of `at(0)` to `at(count - 1)`.
template <class At> __device__ __forceinline__ float lse_of(int count, At at) {
    __shared__ Softmax warps[32];
    Softmax s = {LOWEST, 0.0f};
    for (int v = threadIdx.x; v < count; v += blockDim.x) {
        const float x = at(v);
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
    const float lse_of_own = lse_of(V, [&](int v) { return load(own[v]) / temperature; });
    const float lse_of_other = lse_of(V, [&](int v) { return load(other[v]) / temperature; });
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

// As `row_of_top` in cpu.rs. `logits` keeps the student's logits of the teacher's tokens; in the row, they are -infinity until the end, so that the row
// has the tokens of the last bucket.
extern "C" __global__ void divergence_gradient_of_top(float* divergences, X* student, float* logits, const int* ids, const float* log_probs,
                                                      const float* rests, const int* targets, const float* scale_of_loss, float beta,
                                                      float temperature, int V, int k, int of_student) {
    X* own = student + (u64)blockIdx.x * of_student;
    if (targets[blockIdx.x] == IGNORE_INDEX) {
        for (int v = threadIdx.x; v < V; v += blockDim.x) store(&own[v], 0.0f);
        if (threadIdx.x == 0) divergences[blockIdx.x] = 0.0f;
        return;
    }
    const u64 first = (u64)blockIdx.x * k;
    const int* top = ids + first;
    const float* teacher = log_probs + first;
    float* at_top = logits + first;
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        at_top[j] = load(own[top[j]]) / temperature;
        store(&own[top[j]], __int_as_float(0xff800000));
    }
    const float lse_of_top = lse_of(k, [&](int j) { return at_top[j]; });
    const float lse_of_rest = lse_of(V, [&](int v) { return load(own[v]) / temperature; });
    const float more = fmaxf(lse_of_top, lse_of_rest), lse = more + logf(expf(lse_of_top - more) + expf(lse_of_rest - more));
    const float own_rest = lse_of_rest - lse;
    const Terms of_rest = terms_of(beta, own_rest, rests[blockIdx.x]);
    float sum_of_teacher = 0.0f, sum_of_student = 0.0f;
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        const Terms terms = terms_of(beta, at_top[j] - lse, teacher[j]);
        sum_of_teacher += terms.teacher;
        sum_of_student += terms.student;
    }
    sum_of_teacher = block_sum(sum_of_teacher) + of_rest.teacher;
    sum_of_student = block_sum(sum_of_student) + of_rest.student;
    if (threadIdx.x == 0) divergences[blockIdx.x] = beta == 0.0f ? sum_of_teacher : sum_of_teacher + sum_of_student;
    const float scale = *scale_of_loss, slope = (of_rest.student - expf(own_rest) * sum_of_student) / temperature;
    // Without tokens in the last bucket, the log-sum-exp is -infinity, and no infinities may be subtracted.
    const float base = lse_of_rest < LOWEST ? 0.0f : lse_of_rest;
    for (int v = threadIdx.x; v < V; v += blockDim.x) store(&own[v], scale * (expf(load(own[v]) / temperature - base) * slope));
    __syncthreads();
    for (int j = threadIdx.x; j < k; j += blockDim.x) {
        const float of_student_at = at_top[j] - lse;
        store(&own[top[j]], scale * ((terms_of(beta, of_student_at, teacher[j]).student - expf(of_student_at) * sum_of_student) / temperature));
    }
}
