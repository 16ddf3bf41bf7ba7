// The time steps of the state space duality (cpu/head.rs).

// Returns ln(1 + exp(x)), without overflow.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// NaN stays NaN, as on the CPU.
__device__ __forceinline__ float time_step(float raw, float least, float most) {
    const float step = softplus(raw);
    return step < least ? least : step > most ? most : step;
}
// Returns the derivative of the time step by `raw`. It is 0 where a limit has replaced the time step.
__device__ __forceinline__ float slope_of_step(float raw, float least, float most) {
    const float step = softplus(raw);
    return step < least || step > most ? 0.0f : 1.0f / (1.0f + expf(-raw));
}
