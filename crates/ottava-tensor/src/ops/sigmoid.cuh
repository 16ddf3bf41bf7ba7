// Sigmoids of values that are stored as X, and SiLU (swiglu/cpu.rs).

__device__ __forceinline__ float sigmoid(float x) {
    float e, y;
    // Rounding the exponent has a relative error of at most 2^-17, which is below the precision of 16-bit types.
    if constexpr (sizeof(X) == 2) asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269504f));
    else e = expf(-x);
    // The approximation is at most one ulp from the IEEE quotient.
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
    return y;
}

// The value of SiLU and its derivative.
struct Silu { float value, slope; };
__device__ __forceinline__ Silu silu_and_slope(float x) {
    const float s = sigmoid(x);
    return {x * s, s * (1.0f + x * (1.0f - s))};
}
