// Threads stride over tokens. With a stride of 0, all tokens read one value.
extern "C" __global__ void negate_targets(X* y, const float* x, const int* targets, int tokens, int stride) {
    for (int t = grid_start(); t < tokens; t += grid_step()) store(&y[t], targets[t] == IGNORE_INDEX ? 0.0f : -x[t * stride]);
}
