// Many parameters in one launch. Compiled without contraction, so each operation rounds as on the CPU.
// `M` and `V` are the types of the moments, `G` that of the gradient. `COPY` is the type of the rounded copy of F32 weights, which may be null; or, with
// `STOCHASTIC`, there are no F32 weights and `COPY` weights are rounded up or down by chance.
// As many parameters as the arguments of a kernel hold; `CAPACITY` is also in cuda.rs. `end` counts blocks.
#define CAPACITY 56
struct Part {
    float* master;
    COPY* copy;
    M* m;
    V* v;
    const G* grad;
    u64 n, end, seed;
    float keep, unused;
};
struct Parts { Part at[CAPACITY]; };

struct Scalars { float step_size, take1, beta2, take2, correction2, epsilon; };

__device__ __forceinline__ float updated(float w, float& m, float& v, float g, float keep, const Scalars& how) {
    const float decayed = w * keep;
    m = m + (g - m) * how.take1;
    v = v * how.beta2 + g * g * how.take2;
    return decayed - how.step_size * (m / (sqrtf(v) / how.correction2 + how.epsilon));
}

// Up with the probability of the dropped bits: as many random bits are added, and what they carry over stays.
__device__ __forceinline__ float by_chance(float x, u64 seed, u64 i) {
    const u32 bits = __float_as_uint(x);
    if ((bits & 0x7F800000) == 0x7F800000) return x;
    return __uint_as_float(bits + (u32)(hash(seed ^ i) >> 48) & 0xFFFF0000);
}

extern "C" __global__ void __launch_bounds__(256) adamw(const float* norm, float max_norm, float step_size, float take1, float beta2,
                                                        float take2, float correction2, float epsilon, int count, u64 chunk,
                                                        const __grid_constant__ Parts parts) {
    const Scalars how = {step_size, take1, beta2, take2, correction2, epsilon};
    const float total = *norm;
    if (!(fabsf(total) <= 3.402823466e38f)) return;
    const float clip = max_norm == 0.0f ? 1.0f : fminf(max_norm / (total + 1e-6f), 1.0f);
    int t = 0;
    while (t + 1 < count && blockIdx.x >= parts.at[t].end) t++;
    const Part& part = parts.at[t];
    const u64 start = (blockIdx.x - (t > 0 ? parts.at[t - 1].end : 0)) * chunk;
    const u64 left = part.n - start, n = left < chunk ? left : chunk;
    M* m = part.m + start;
    V* v = part.v + start;
    const G* grad = part.grad + start;
    COPY* copy = part.copy ? part.copy + start : nullptr;
#ifdef STOCHASTIC
    const u64 eights = aligned(m, v, grad, copy) ? n / 8 : 0;
#else
    float* master = part.master + start;
    const u64 eights = aligned(m, v, grad, copy, master) ? n / 8 : 0;
#endif
    for (u64 g = threadIdx.x; g < eights; g += blockDim.x) {
        const u64 at = 8 * g;
        float w8[8], m8[8], v8[8], g8[8];
        unpack8(load8(grad + at), g8);
#ifdef STOCHASTIC
        unpack8(load8(copy + at), w8);
#else
        unpack8(load8(master + at), w8);
#endif
        unpack8(load8(m + at), m8);
        unpack8(load8(v + at), v8);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            w8[i] = updated(w8[i], m8[i], v8[i], g8[i] * clip, part.keep, how);
#ifdef STOCHASTIC
            w8[i] = by_chance(w8[i], part.seed, start + at + i);
#endif
        }
        store8(m + at, pack8<M>(m8));
        store8(v + at, pack8<V>(v8));
#ifndef STOCHASTIC
        store8(master + at, pack8<f32>(w8));
#endif
        if (copy) store8(copy + at, pack8<COPY>(w8));
    }
    for (u64 i = 8 * eights + threadIdx.x; i < n; i += blockDim.x) {
        float m1 = load(m[i]), v1 = load(v[i]);
#ifdef STOCHASTIC
        const float w = by_chance(updated(load(copy[i]), m1, v1, load(grad[i]) * clip, part.keep, how), part.seed, start + i);
#else
        const float w = updated(master[i], m1, v1, load(grad[i]) * clip, part.keep, how);
        master[i] = w;
#endif
        store(&m[i], m1);
        store(&v[i], v1);
        if (copy) store(&copy[i], w);
    }
}
