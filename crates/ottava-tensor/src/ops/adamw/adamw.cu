// One thread per element, in strides. Compiled without contraction, so each operation rounds as on the CPU.
// `COPY` is the type of the rounded copy; `copy` may be null.
extern "C" __global__ void adamw(float* master, float* m, float* v, COPY* copy, const float* grad, const float* norm,
                                 u64 n, float keep, float step_size, float take1, float beta2, float take2,
                                 float correction2, float epsilon, float max_norm) {
    const float total = *norm;
    if (!(fabsf(total) <= 3.402823466e38f)) return;
    const float clip = max_norm == 0.0f ? 1.0f : fminf(max_norm / (total + 1e-6f), 1.0f);
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const float g = grad[i] * clip, decayed = master[i] * keep;
        const float m1 = m[i] + (g - m[i]) * take1;
        const float v1 = v[i] * beta2 + g * g * take2;
        const float w = decayed - step_size * (m1 / (sqrtf(v1) / correction2 + epsilon));
        m[i] = m1;
        v[i] = v1;
        master[i] = w;
        if (copy) store(&copy[i], w);
    }
}
