// The time steps of the state space duality (cpu/head.rs).

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
