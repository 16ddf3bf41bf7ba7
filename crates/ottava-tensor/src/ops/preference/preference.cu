// One block per sequence. Threads stride over its tokens. The sum is double, as in cpu.rs.
extern "C" __global__ void sequence_log_probs(float* sums, const float* losses, int tokens) {
    const float* row = losses + (u64)blockIdx.x * tokens;
    double sum = 0.0;
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) sum += row[t];
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = (float)-sum;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + logf(1.0f + expf(-fabsf(x))); }

__device__ __forceinline__ float slope(float x) { return sigmoid(x) * sigmoid(-x); }

// A loss, and its derivatives by the value of the chosen sequence and by the value of the rejected sequence.
struct Loss { float value, chosen, rejected; };

// Returns the loss of x = beta * h. The field `chosen` is its derivative by x.
__device__ __forceinline__ Loss loss_of_margin(int formula, float x, float first, float second) {
    if (formula == HINGE) return {x < 1.0f ? 1.0f - x : 0.0f, x < 1.0f ? -1.0f : 0.0f};
    if (formula == EXO) {
        const float share = sigmoid(x), rest = sigmoid(-x);
        return {share * (-softplus(-x) - first) + rest * (-softplus(x) - second), share * rest * (x - first + second)};
    }
    if (formula == DISCOPOP) {
        const float y = x / first, share = sigmoid(y), rest = sigmoid(-y), logistic = softplus(-x);
        const float exponential = expf(-x - softplus(-y));
        return {logistic * rest + exponential, (exponential - logistic * share) * rest / first - rest * sigmoid(-x) - exponential};
    }
    if (formula == CENTERED) return {first * softplus(-x), -(first * sigmoid(-x))};
    return {first * softplus(-x) + second * softplus(x), second * sigmoid(x) - first * sigmoid(-x)};
}

// Returns the odds-ratio loss of mean log-probabilities below 0, in double as in cpu.rs.
__device__ __forceinline__ Loss loss_of_odds(double beta, double chosen, double rejected) {
    const double rest_chosen = 1.0 - exp(chosen), rest_rejected = 1.0 - exp(rejected);
    const double apart = (chosen - log(rest_chosen)) - (rejected - log(rest_rejected));
    const double slope = beta / (1.0 + exp(apart));
    return {(float)(beta * (fmax(-apart, 0.0) + log(1.0 + exp(-fabs(apart))))), (float)-(slope / rest_chosen), (float)(slope / rest_rejected)};
}

// Returns the loss of a pair with these values.
__device__ __forceinline__ Loss loss_of_pair(int formula, float beta, float first, float second, float margin, float chosen, float rejected) {
    const float a = beta * chosen, b = beta * rejected, h = beta * (chosen - rejected) - margin;
    switch (formula) {
    case IPO: {
        const float apart = chosen - rejected - first;
        return {apart * apart, 2.0f * apart, -2.0f * apart};
    }
    case SPPO: {
        const float up = chosen - first, down = rejected + first;
        return {up * up + down * down, 2.0f * up, 2.0f * down};
    }
    case NCA:
        return {softplus(-a) + 0.5f * softplus(a) + 0.5f * softplus(b), beta * (0.5f * sigmoid(a) - sigmoid(-a)),
                beta * 0.5f * sigmoid(b)};
    case BCO: return {softplus(-a) + softplus(b), -(beta * sigmoid(-a)), beta * sigmoid(b)};
    case APO_ZERO: return {sigmoid(-a) + sigmoid(b), -(beta * slope(a)), beta * slope(b)};
    case APO_DOWN: return {sigmoid(a) + sigmoid(-h), beta * (slope(a) - slope(h)), beta * slope(h)};
    case SFT: return {-chosen, -1.0f, 0.0f};
    case ODDS: return loss_of_odds(beta, fmin((double)chosen, (double)first), fmin((double)rejected, (double)first));
    }
    const Loss of_margin = loss_of_margin(formula, h, first, second);
    return {of_margin.value, beta * of_margin.chosen, -(beta * of_margin.chosen)};
}

// Returns the number of `values` that precede the one at `place` in sorted order. A NaN is the largest.
template <class Values> __device__ __forceinline__ int rank_of(const Values& values, int count, int place) {
    const float own = values(place);
    int rank = 0;
    for (int i = 0; i < count; i++) {
        const float other = values(i);
        const bool before = own == own ? other < own : other == other;
        const bool equal = own == own ? other == own : other != other;
        rank += before || (equal && i < place);
    }
    return rank;
}

// Returns the element of `others` whose rank is the rank of the value at `place` among `values`. Threads stride over `others`.
template <class Values, class Others>
__device__ __forceinline__ float at_equal_rank(const Values& values, const Others& others, int count, int place) {
    __shared__ float found;
    const int rank = rank_of(values, count, place);
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        if (rank_of(others, count, i) == rank) found = others(i);
    __syncthreads();
    return found;
}

// One block per sequence. Its threads compute the same derivative, and stride over the factors of the sequence's tokens. With `adds`, results are
// added to the results of earlier losses.
extern "C" __global__ void preference_loss(float* losses, float* factors, const float* policy, const float* reference,
                                           const float* lengths, const float* labels, const float* kl, const float* scale, float beta,
                                           float first, float second, float margin, float weight, int formula, int compares, int adds,
                                           int tokens) {
    const int s = blockIdx.x, pairs = gridDim.x / 2;
    const bool labelled = formula == KTO || formula == UNSHIFTED, is_rejected = !labelled && s % 2 == 1;
    const int chosen = labelled ? s : s - s % 2;
    const auto ratio = [&](int s) { return policy[s] - reference[s]; };
    float loss, derivative;
    if (labelled) {
        const float divergence = formula == KTO ? *kl : 0.0f;
        const bool desirable = labels[s] > 0.0f;
        const float x = desirable ? ratio(s) - divergence : divergence - ratio(s), of_label = desirable ? first : second;
        const float rest = sigmoid(-(beta * x)), share = sigmoid(beta * x);
        loss = of_label * rest;
        derivative = -(of_label * beta * share * rest);
        if (!desirable) derivative = -derivative;
    } else {
        float a, b, divisor = 1.0f;
        if (compares == PER_TOKEN) {
            a = ratio(chosen) / lengths[chosen];
            b = ratio(chosen + 1) / lengths[chosen + 1];
            divisor = lengths[s];
        } else if (compares == RANKED_MARGINS) {
            const auto own = [&](int i) { return policy[2 * i] - policy[2 * i + 1]; };
            a = own(s / 2);
            b = at_equal_rank(own, [&](int i) { return reference[2 * i] - reference[2 * i + 1]; }, pairs, s / 2);
        } else if (compares == RANKED_SIDES) {
            const auto own = [&](int i) { return ratio(2 * i + s % 2); };
            const float other = at_equal_rank(own, [&](int i) { return ratio(2 * i + 1 - s % 2); }, pairs, s / 2);
            a = is_rejected ? other : ratio(s);
            b = is_rejected ? ratio(s) : other;
        } else if (compares == CHOSEN) {
            float all = 0.0f;
            for (int i = 0; i < pairs; i++) all += lengths[2 * i];
            divisor = all / pairs;
            a = policy[chosen] / divisor;
            b = 0.0f;
        } else {
            a = ratio(chosen);
            b = ratio(chosen + 1);
        }
        const Loss of_pair = loss_of_pair(formula, beta, first, second, margin, a, b);
        loss = of_pair.value;
        derivative = (is_rejected ? of_pair.rejected : of_pair.chosen) / divisor;
        if (formula == CENTERED) {
            const float both = policy[chosen] + policy[chosen + 1];
            loss += second * both * both;
            derivative += 2.0f * second * both;
        }
    }
    if (threadIdx.x == 0) losses[s] = (adds ? losses[s] : 0.0f) + (is_rejected ? 0.0f : weight * loss);
    const float factor = -(weight * derivative) * *scale;
    for (int t = threadIdx.x; t < tokens; t += blockDim.x) {
        float* of_token = &factors[(u64)s * tokens + t];
        *of_token = (adds ? *of_token : 0.0f) + factor;
    }
}
