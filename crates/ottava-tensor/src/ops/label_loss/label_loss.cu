// One block per token. Threads stride over its labels. Arithmetic is double, as in cpu.rs.
extern "C" __global__ void label_loss(float* losses, float* scores, const int* targets, const float* labels, const float* scale, int count,
                                      int loss) {
    float* x = scores + (u64)blockIdx.x * count;
    const int target = targets[blockIdx.x];
    if (target == IGNORE_INDEX) {
        for (int l = threadIdx.x; l < count; l += blockDim.x) x[l] = 0.0f;
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        return;
    }
    const float* y = labels + (u64)target * count;
    const double factor = *scale;
    double lse = 0.0, mass = 0.0, total = 0.0;
    if (loss == SINGLE_LABEL) {
        float largest = __int_as_float(0xFF800000);
        double sum = 0.0;
        for (int l = threadIdx.x; l < count; l += blockDim.x) largest = fmaxf(largest, x[l]);
        largest = block_max(largest);
        for (int l = threadIdx.x; l < count; l += blockDim.x) sum += exp((double)x[l] - largest), mass += y[l];
        lse = largest + log(block_sum(sum));
        mass = block_sum(mass);
    }
    for (int l = threadIdx.x; l < count; l += blockDim.x) {
        const double score = x[l], label = y[l];
        double slope;
        if (loss == SINGLE_LABEL) {
            total += label == 0.0 ? 0.0 : label * (lse - score);
            slope = mass * exp(score - lse) - label;
        } else if (loss == MULTI_LABEL) {
            total += (fmax(score, 0.0) - score * label + log1p(exp(-fabs(score)))) / count;
            slope = (1.0 / (1.0 + exp(-score)) - label) / count;
        } else {
            total += (score - label) * (score - label) / count;
            slope = 2.0 * (score - label) / count;
        }
        x[l] = (float)(factor * slope);
    }
    total = block_sum(total);
    if (threadIdx.x == 0) losses[blockIdx.x] = (float)total;
}
