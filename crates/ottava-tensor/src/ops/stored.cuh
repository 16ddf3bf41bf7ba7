// Scaled storage, as in stored.rs. Every operation rounds as on the CPU.

__device__ __forceinline__ bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// Returns the power-of-two scale for this amax and largest finite value.
__device__ __forceinline__ float power_for(float amax, float largest) {
    if (amax == 0.0f || !finite(amax)) return 1.0f;
    return __uint_as_float(__float_as_uint(fminf(largest / amax, 0x1p126f)) & 0x7F800000);
}
// Returns the inverse scale.
__device__ __forceinline__ float power_back(float amax, float largest) {
    return finite(amax) ? 1.0f / power_for(amax, largest) : __int_as_float(0x7FFFFFFF);
}

// Reciprocal, quotient and square root by the instruction sequences of the compiler, but without the branch for extreme exponents. Callers know the
// range of their operands, or test many operands at once. `r` is the reciprocal of `x`.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}
__device__ __forceinline__ float quotient(float a, float x, float r) {
    float q = a * r;
    q = __fmaf_rn(r, __fmaf_rn(-x, q, a), q);
    // With only one correction, about one quotient in 10^8 is off by one bit.
    return __fmaf_rn(r, __fmaf_rn(-x, q, a), q);
}
// With a correctly rounded reciprocal, one correction is enough (Markstein 1990).
__device__ __forceinline__ float quotient_by_nearest(float a, float x, float nearest) {
    const float q = a * nearest;
    return __fmaf_rn(nearest, __fmaf_rn(-x, q, a), q);
}
// Returns 2^40 * sqrt(x), scaled so that no intermediate is subnormal. The result is NaN for x >= 2^48.
__device__ __forceinline__ float large_root(float x) {
    x *= 0x1p80f;
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    // The reciprocal root of 0 is infinite; the reciprocal root of any other value is far below 2^60.
    r = fminf(r, 0x1p60f);
    const float y = x * r;
    return __fmaf_rn(__fmaf_rn(-y, y, x), r * 0.5f, y);
}

// Compares packed pairs, as for BF16.
template <> __device__ __forceinline__ float largest8<f16>(const Eight<f16>& e) {
    const auto larger = [](u32 a, u32 b) {
        u32 c;
        BY_MAGNITUDE("max", "f16x2", c, a, b);
        return c;
    };
    const u32 pair = larger(larger(e.words[0].x, e.words[0].y), larger(e.words[0].z, e.words[0].w));
    return fmaxf(0.0f, fmaxf(fabsf(load(f16{(unsigned short)pair})), fabsf(load(f16{(unsigned short)(pair >> 16)}))));
}
