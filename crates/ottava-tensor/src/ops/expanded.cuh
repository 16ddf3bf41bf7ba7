// Dynamic range expansion, by the formulas of expanded.rs: groups of 128 neighbours of a row, eight per thread, 16 threads per group.
// Needs `stored.cuh`.

__device__ __forceinline__ float log2_of(float x) {
    const int bits = (int)__float_as_uint(fmaxf(x, 0x1p-125f)) - 0x3F3504F3;
    const float f = __uint_as_float((u32)(bits & 0x7FFFFF) + 0x3F3504F3u) - 1.0f;
    float q = -0.2114953f;
    q = __fmaf_rn(q, f, 0.31982413f);
    q = __fmaf_rn(q, f, -0.3658607f);
    q = __fmaf_rn(q, f, 0.47967133f);
    q = __fmaf_rn(q, f, -0.72122335f);
    q = __fmaf_rn(q, f, 1.442703f);
    // Converts the exponent by an addition, since conversions are slow.
    return __fmaf_rn(q, f, __uint_as_float(0x4B400000 + (bits >> 23)) - 12582912.0f);
}
// Adding and subtracting this rounds to the nearest integer, which is in the low bits of the sum.
#define ROUND 12582912.0f
__device__ __forceinline__ float exp2_of(float x) {
    const float shifted = x + ROUND, f = x - (shifted - ROUND);
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

// `largest` is the amax of a group, `high` its log2, `low` the log2 of the smallest nonzero value.
__device__ __forceinline__ Curve curve_of(float largest, float high, float low) {
    const float range = high - low, middle = 0.5f * (high + low);
    // The range is zero or large enough for the fast division.
    const float sixteenths = floorf(quotient(265.835358f, range, reciprocal(range)));
    const float power = range > 0.0f ? fminf(fmaxf(sixteenths, 1.0f), 256.0f) * 0.0625f : 16.0f;
    if (!finite(largest)) return {__int_as_float(0x7FFFFFFF), 1.0f, 0.0f};
    if (largest == 0.0f) return {0.0f, 1.0f, 0.0f};
    return {power * (high - middle) - 8.80735492f, power, middle};
}

// Largest and smallest nonzero magnitude of eight values, as bits. The smallest is stored as ~(bits - 1), so that zeros drop out and both
// are reduced by maximum.
struct Extremes { u32 largest, smallest; };
__device__ __forceinline__ Extremes extremes8(const float* x) {
    u32 largest = 0, smallest = 0xFFFFFFFF;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 bits = __float_as_uint(x[i]) & 0x7FFFFFFF;
        largest = max(largest, bits);
        smallest = min(smallest, bits - 1);
    }
    return {largest, ~smallest};
}

// The curves of the two groups of 16 neighbouring threads; threads without values pass zeros. Called by all threads of a warp. A quarter
// of the 16 threads reduces each extreme, and half of them computes each curve.
__device__ __forceinline__ void curves_of_groups(const float* x, const float* y, Curve& of_x, Curve& of_y) {
    const u32 all = 0xFFFFFFFF;
    const bool second = threadIdx.x & 8, low = threadIdx.x & 4;
    const Extremes a = extremes8(x), b = extremes8(y);
    const u32 largest = max(second ? b.largest : a.largest, __shfl_xor_sync(all, second ? a.largest : b.largest, 8));
    const u32 smallest = max(second ? b.smallest : a.smallest, __shfl_xor_sync(all, second ? a.smallest : b.smallest, 8));
    u32 extreme = max(low ? smallest : largest, __shfl_xor_sync(all, low ? largest : smallest, 4));
    extreme = max(extreme, __shfl_xor_sync(all, extreme, 2));
    extreme = max(extreme, __shfl_xor_sync(all, extreme, 1));
    const float logarithm = log2_of(__uint_as_float(low ? -extreme : extreme));
    const Curve curve = curve_of(__uint_as_float(extreme), logarithm, __shfl_xor_sync(all, logarithm, 4));
    const auto of_thread = [&](int thread) {
        return Curve{__shfl_sync(all, curve.step, thread, 16), __shfl_sync(all, curve.power, thread, 16),
                     __shfl_sync(all, curve.middle, thread, 16)};
    };
    of_x = of_thread(0);
    of_y = of_thread(8);
}

// log2 of the magnitude of each code; that of code 0 is low enough for its power to be zero.
struct alignas(512) Logarithms {
    float of[128];
    __device__ __forceinline__ void fill() {
        for (int i = threadIdx.x; i < 128; i += blockDim.x) {
            float v[8];
            Eight<e4m3> code = {};
            code.at[0].bits = i;
            unpack8(code, v);
            of[i] = i == 0 ? -1e30f : log2_of(v[0]);
        }
        __syncthreads();
    }
};

// The values of eight codes of one byte.
template <class T> __device__ __forceinline__ void expand8(const Eight<T>& codes, const Curve& curve, const Logarithms& logarithms, float* x) {
    const u32* const words = (const u32*)&codes;
    // The power is a multiple of 1/16.
    const float root = reciprocal(curve.power);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 word = words[i / 4], shift = i % 4 * 8;
        const float y = exp2_of(fmaxf(__fmaf_rn(logarithms.of[word >> shift & 0x7F] + curve.step, root, curve.middle), -127.0f));
        x[i] = __uint_as_float(__float_as_uint(y) | (word << (24 - shift) & 0x80000000));
    }
    if (!curve.bad()) return;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = words[i / 4] >> i % 4 * 8 & 0x7F ? curve.step : 0.0f;
}

// The expanded value, before rounding to a code.
__device__ __forceinline__ float stretched(float x, const Curve& curve) {
    const float y = curve.bad() ? curve.step : exp2_of(curve.power * (log2_of(fabsf(x)) - curve.middle) - curve.step);
    return x == 0.0f ? x : copysignf(y, x);
}
// The codes of eight values. The hardware log2 and exp2 differ slightly from the CPU's polynomials, so lower and upper bounds are computed
// with them. If the bounds round to different codes, for one value in a thousand, `stretched` decides.
template <class T> __device__ __forceinline__ Eight<T> stretched8(const float* x, const Curve& curve) {
    // Values are scaled to around 1, where the hardware log2 is most accurate. The error is at most 6.1e-6 · power + 8.2e-6.
    const float shifted = curve.middle + ROUND, scale = __uint_as_float(0x3F800000 - (__float_as_uint(shifted) << 23));
    const float error = __fmaf_rn(curve.power, 7e-6f, 10e-6f), apart = 1.0f + 2.0f * error;
    const float offset = curve.power * (shifted - ROUND - curve.middle) - curve.step - 1.5f * error;
    // Exponents are far from the limits of F32.
    const bool usual = curve.power >= 0.25f && fabsf(curve.middle) <= 64.0f && !curve.bad();
    Eight<T> codes;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        float below[4], above[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float logarithm, y;
            asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(fabsf(x[4 * w + i]) * scale));
            asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__fmaf_rn(curve.power, logarithm, offset)));
            below[i] = copysignf(y, x[4 * w + i]);
            above[i] = below[i] * apart;
        }
        u32 four = encode<e4m3>(below[0], below[1]) | encode<e4m3>(below[2], below[3]) << 16;
        u32 differ = four ^ (encode<e4m3>(above[0], above[1]) | encode<e4m3>(above[2], above[3]) << 16);
        if (!usual) differ = 0xFFFFFFFF;
        while (differ) {
            const int shift = __ffs(differ) - 1 & 24;
            const float even = shift & 16 ? x[4 * w + 2] : x[4 * w], odd = shift & 16 ? x[4 * w + 3] : x[4 * w + 1];
            const u32 mask = 0xFFu << shift;
            four = four & ~mask | (encode<e4m3>(stretched(shift & 8 ? odd : even, curve), 0.0f) & 0xFF) << shift;
            differ &= ~mask;
        }
        ((u32*)&codes)[w] = four;
    }
    return codes;
}
