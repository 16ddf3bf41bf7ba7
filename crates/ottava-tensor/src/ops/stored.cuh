// Values in few bits, as in stored.rs. Every operation rounds as on the CPU.

__device__ __forceinline__ bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }

// What values with this amax are multiplied by, for a type with this largest value: a power of two.
__device__ __forceinline__ float power_for(float amax, float largest) {
    if (amax == 0.0f || !finite(amax)) return 1.0f;
    return __uint_as_float(__float_as_uint(fminf(largest / amax, 0x1p126f)) & 0x7F800000);
}
// What multiplies them back.
__device__ __forceinline__ float power_back(float amax, float largest) {
    return finite(amax) ? 1.0f / power_for(amax, largest) : __int_as_float(0x7FFFFFFF);
}

// As in expanded.rs, which explains them.
__device__ __forceinline__ float log2_of(float x) {
    const int bits = (int)__float_as_uint(fmaxf(x, 0x1p-125f)) - 0x3F3504F3;
    const float f = __uint_as_float((u32)(bits & 0x7FFFFF) + 0x3F3504F3u) - 1.0f;
    float q = -0.2114953f;
    q = __fmaf_rn(q, f, 0.31982413f);
    q = __fmaf_rn(q, f, -0.3658607f);
    q = __fmaf_rn(q, f, 0.47967133f);
    q = __fmaf_rn(q, f, -0.72122335f);
    q = __fmaf_rn(q, f, 1.442703f);
    // The exponent by an addition, since conversions are slow.
    return __fmaf_rn(q, f, __uint_as_float(0x4B400000 + (bits >> 23)) - 12582912.0f);
}
__device__ __forceinline__ float exp2_of(float x) {
    const float shifted = x + 12582912.0f, f = x - (shifted - 12582912.0f);
    float p = 0.009685697f;
    p = __fmaf_rn(p, f, 0.055922024f);
    p = __fmaf_rn(p, f, 0.24021865f);
    p = __fmaf_rn(p, f, 0.693121f);
    p = __fmaf_rn(p, f, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

struct Curve {
    float step, power, middle;
    __device__ __forceinline__ bool bad() const { return step != step; }
};

// Of the largest and the smallest absolute value of a group, zero aside.
__device__ __forceinline__ Curve curve_of(float largest, float smallest) {
    if (!finite(largest)) return {__int_as_float(0x7FFFFFFF), 1.0f, 0.0f};
    if (largest == 0.0f) return {0.0f, 1.0f, 0.0f};
    const float high = log2_of(largest), low = log2_of(smallest), range = high - low, middle = 0.5f * (high + low);
    const float power = range > 0.0f ? fminf(fmaxf(floorf(265.835358f / range), 1.0f), 256.0f) * 0.0625f : 16.0f;
    return {power * (high - middle) - 8.80735492f, power, middle};
}

// `logarithms` are those of the absolute values of the 128 codes without a sign. `root` is the reciprocal of the power.
__device__ __forceinline__ float stretched_back(u32 code, const float* logarithms, const Curve& curve, float root) {
    const u32 size = code & 0x7F;
    const float x = exp2_of(__fmaf_rn(logarithms[size] + curve.step, root, curve.middle));
    return size == 0 ? 0.0f : __uint_as_float(__float_as_uint(x) | (code & 0x80) << 24);
}
__device__ __forceinline__ float stretched(float x, const Curve& curve) {
    const float y = exp2_of(curve.power * (log2_of(fabsf(x)) - curve.middle) - curve.step);
    return x == 0.0f ? x : copysignf(y, x);
}
