// One block per sequence; threads stride over its tokens. The sum runs in double, as in cpu.rs.
extern "C" __global__ void sequence_log_probs(float* sums, const float* losses, int tokens) {
    const float* row = losses + (u64)blockIdx.x * tokens;
    double sum = 0.0;
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) sum += row[t];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = (float)-sum;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + logf(1.0f + expf(-fabsf(x))); }

// One block per sequence, whose threads compute the same derivative and stride over the factors of its tokens.
extern "C" __global__ void preference_loss(float* losses, float* factors, const float* policy, const float* reference,
                                           const float* lengths, const float* labels, const float* kl, const float* scale, float beta,
                                           float first, float second, int formula, int tokens) {
    const int s = blockIdx.x, chosen = formula == KTO ? s : s - s % 2;
    const auto ratio = [&](int s) { return policy[s] - reference[s]; };
    float loss, derivative;
    if (formula == KTO) {
        const bool desirable = labels[s] > 0.0f;
        const float x = desirable ? ratio(s) - *kl : *kl - ratio(s), weight = desirable ? first : second;
        const float rest = sigmoid(-(beta * x)), share = sigmoid(beta * x);
        loss = weight * rest;
        derivative = -(weight * beta * share * rest);
        if (!desirable) derivative = -derivative;
    } else if (formula == IPO) {
        const float apart = ratio(chosen) / lengths[chosen] - ratio(chosen + 1) / lengths[chosen + 1] - first;
        loss = apart * apart;
        derivative = 2.0f * apart / lengths[s];
    } else {
        const float x = beta * (ratio(chosen) - ratio(chosen + 1));
        if (formula == HINGE) {
            loss = x < 1.0f ? 1.0f - x : 0.0f;
            derivative = x < 1.0f ? -1.0f : 0.0f;
        } else if (formula == CENTERED) {
            loss = first * softplus(-x);
            derivative = -(first * sigmoid(-x));
        } else {
            loss = first * softplus(-x) + second * softplus(x);
            derivative = second * sigmoid(x) - first * sigmoid(-x);
        }
        derivative *= beta;
    }
    if (s != chosen) derivative = -derivative;
    if (formula == CENTERED) {
        const float both = policy[chosen] + policy[chosen + 1];
        loss += second * both * both;
        derivative += 2.0f * second * both;
    }
    if (threadIdx.x == 0) losses[s] = s == chosen ? loss : 0.0f;
    const float factor = -derivative * *scale;
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) factors[(u64)s * tokens + t] = factor;
}
