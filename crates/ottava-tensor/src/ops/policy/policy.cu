// One block per sequence; threads stride over its tokens. Ratios are computed in double, as in cpu.rs: near 1 they differ in digits that F32 lacks.
#define FARTHEST 20.0

struct Ratio { double w, slope; };
__device__ __forceinline__ Ratio ratio_of(double log) {
    const double w = exp(fmin(fmax(log, -FARTHEST), FARTHEST));
    return {w, fabs(log) <= FARTHEST ? w : 0.0};
}

// A loss, and its derivatives by the logarithm of the ratio and by the log-probability beside it.
struct Policy { double loss, by_ratio, by_lp; };
__device__ __forceinline__ Policy policy_at(int bound, Ratio ratio, double a, double lp, double lowest, double highest, double most) {
    const double clamped = fmin(fmax(ratio.w, lowest), highest);
    if (bound == CLIP) {
        const double unclipped = fmin(ratio.w, most) * a, clipped = clamped * a;
        return {-fmin(unclipped, clipped), unclipped <= clipped && ratio.w < most ? -ratio.slope * a : 0.0, 0.0};
    }
    if (bound == WEIGHT) return {-clamped * a * lp, 0.0, -clamped * a};
    return {-a * lp, 0.0, -a};
}

struct Kl { double value, by_lp; };
__device__ __forceinline__ Kl kl_at(int kl, Ratio own, double apart) {
    const double d = fmin(fmax(apart, -FARTHEST), FARTHEST), by = fabs(apart) <= FARTHEST ? -1.0 : 0.0;
    const double k3 = exp(d) - 1.0 - d;
    if (kl == K1) return {-own.w * d, -own.slope * d - own.w * by};
    if (kl == K2) return {d * d / 2.0, d * by};
    if (kl == K3) return {k3, (exp(d) - 1.0) * by};
    return {own.w * k3, own.slope * k3 + own.w * (exp(d) - 1.0) * by};
}

// The factor of a token from the logarithm of its ratio, or of its sequence's.
__device__ __forceinline__ double factor_of(double log, int is_mask, double least, double largest) {
    const double ratio = exp(log);
    if (is_mask) return least <= ratio && ratio <= largest ? ratio : 0.0;
    return fmin(ratio, largest);
}

extern "C" __global__ void policy_loss(float* bounded, float* factors, const float* losses, const int* targets, const float* old,
                                       const float* reference, const float* advantages, const float* corrections, const float* weights,
                                       const int* starts, const float* scale, float lowest, float highest, float most, float beta,
                                       float least, float largest, int bound, int of_sequence, int kl, int corrects, int by_sequence,
                                       int is_mask, int all) {
    const int first = min(max(starts[blockIdx.x], 0), all), tokens = min(max(starts[blockIdx.x + 1], first), all) - first;
    const auto weight = [&](u64 t) { return targets[t] == IGNORE_INDEX ? 0.0f : weights[t]; };
    const auto log_of_draw = [&](u64 t) { return -(double)losses[t] - (double)old[t]; };
    const auto log_ratio = [&](u64 t) { return corrects ? 0.0 : log_of_draw(t); };
    double log_of_all = 0.0;
    if (corrects && by_sequence) {
        double sum = 0.0;
        for (int i = threadIdx.x; i < tokens; i += blockDim.x)
            if (weight(first + i) != 0.0f) sum += log_of_draw(first + i);
        log_of_all = block_sum(sum);
    }
    const auto correction_of = [&](u64 t) {
        return corrects ? factor_of(by_sequence ? log_of_all : log_of_draw(t), is_mask, least, largest) : (double)corrections[t];
    };
    Ratio of_all = {1.0, 1.0};
    double slope = 0.0, length = 1.0;
    if (of_sequence) {
        double count = 0.0, sum = 0.0;
        for (int i = threadIdx.x; i < tokens; i += blockDim.x)
            if (weight(first + i) != 0.0f) {
                count += 1.0;
                sum += log_ratio(first + i);
            }
        length = fmax(block_sum(count), 1.0);
        of_all = ratio_of(block_sum(sum) / length);
        double by_ratio = 0.0;
        for (int i = threadIdx.x; i < tokens; i += blockDim.x) {
            const u64 t = first + i;
            if (weight(t) != 0.0f)
                by_ratio += (double)weight(t) * correction_of(t) * policy_at(bound, of_all, advantages[t], -losses[t], lowest, highest, most).by_ratio;
        }
        slope = block_sum(by_ratio);
    }
    for (int i = threadIdx.x; i < tokens; i += blockDim.x) {
        const u64 t = first + i;
        const double w = weight(t);
        if (w == 0.0) {
            bounded[t] = factors[t] = 0.0f;
            continue;
        }
        const double correction = correction_of(t);
        const Ratio own = ratio_of(log_ratio(t));
        const Policy policy = policy_at(bound, of_sequence ? of_all : own, advantages[t], -losses[t], lowest, highest, most);
        const Kl divergence = beta != 0.0f ? kl_at(kl, own, (double)reference[t] + (double)losses[t]) : Kl{0.0, 0.0};
        const double by_ratio = of_sequence ? slope / length : w * correction * policy.by_ratio;
        const double by_lp = by_ratio + w * (correction * policy.by_lp + (double)beta * divergence.by_lp);
        bounded[t] = (float)(w * (correction * policy.loss + (double)beta * divergence.value));
        factors[t] = (float)(-(double)*scale * by_lp);
    }
}
