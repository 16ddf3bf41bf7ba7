// Threads stride over tokens. Arithmetic is double, as in cpu.rs.
extern "C" __global__ void value_loss(float* losses, float* gradient, const float* values, const int* targets, const float* old,
                                      const float* returns, const float* weights, const float* scale, float coefficient, float range,
                                      int tokens) {
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < tokens; t += gridDim.x * blockDim.x) {
        const double weight = targets[t] == IGNORE_INDEX ? 0.0 : (double)weights[t];
        if (weight == 0.0) {
            losses[t] = gradient[t] = 0.0f;
            continue;
        }
        const double value = values[t], lowest = (double)old[t] - range, highest = (double)old[t] + range;
        const double error = value - (double)returns[t], bounded = fmin(fmax(value, lowest), highest) - (double)returns[t];
        losses[t] = (float)(weight * 0.5 * fmax(error * error, bounded * bounded));
        gradient[t] = (float)(error * error >= bounded * bounded ? (double)coefficient * *scale * weight * error : 0.0);
    }
}
