// What an update reads, computes and writes of eight elements. Compiled without contraction, so each operation rounds as on the CPU.
// `G` is the type of the gradient, `X` that of the weights that layers read; `WEIGHTS` and `MOMENTS` say how those are kept.
enum KeptWeights { Master, ScaledMaster, Split, Chance };
enum KeptMoments { Float32, Bfloat16, ScaledMoments, Expanded };

template <int kind> struct WeightType { typedef bf16 T; };
template <> struct WeightType<Master> { typedef f32 T; };
template <> struct WeightType<ScaledMaster> { typedef f16 T; };
template <int kind> struct MomentTypes { typedef e4m3 M, V; };
template <> struct MomentTypes<Float32> { typedef f32 M, V; };
template <> struct MomentTypes<Bfloat16> { typedef bf16 M, V; };
template <> struct MomentTypes<ScaledMoments> { typedef e4m3 M; typedef f16 V; };
typedef WeightType<WEIGHTS>::T W;
typedef MomentTypes<MOMENTS>::M M;
typedef MomentTypes<MOMENTS>::V V;

// What multiplies stored gradients, weights and moments back, if anything does.
constexpr bool SCALED_G = sizeof(G) == 1, SCALED_W = WEIGHTS == ScaledMaster, SCALED_M = MOMENTS == ScaledMoments;

// What changes from step to step, as in mod.rs.
struct Scalars {
    double learning_rate;
    u64 step;
    float step_size, take1, beta2, take2, correction2, epsilon, max_norm, unscale;
};

struct Tensors {
    W* weight;
    X* copy;                // null where layers read what is updated, or nothing is kept
    M* m;
    V* v;
    const G* grad;
    u64 seed;
    double weight_decay;
    union {
        float* scale;       // of a scaled weight
        short* rest;        // of a split one
    };
    float *m_scale, *v_scale;   // of scaled moments, or the groups of expanded ones
    const float* grad_scale;
};

// Largest values of weights and moments, which powers of two follow from: three for each parameter of the launch.
struct Amaxes { float weight, m, v; };
#define LARGEST_WEIGHT 65504.0f
#define LARGEST_M 448.0f
#define LARGEST_V 65504.0f

// What all elements of a parameter share.
struct Update {
    float clip, keep, step_size, take1, beta2, take2, correction2, epsilon, inverse2;
    u64 seed;
    bool usual;
    float grad_scale, scale, m_scale, v_scale;
    float power, m_power, v_power, new_scale;
};

// Reciprocal, quotient and root by the compiler's own steps, without its test of each operand for exponents where they would not
// do and the branch after it: `compute` makes one test for all. `r` is the reciprocal of `x`.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}
__device__ __forceinline__ float quotient(float a, float x, float r) {
    float q = a * r;
    q = __fmaf_rn(r, __fmaf_rn(-x, q, a), q);
    // One correction leaves about one quotient in 10^8 a bit off.
    return __fmaf_rn(r, __fmaf_rn(-x, q, a), q);
}
// Of any number that is not infinite: small ones are multiplied by a power of two and back, both exactly.
__device__ __forceinline__ float root(float x) {
    const bool small = x < 0x1p-80f;
    if (small) x *= 0x1p80f;
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    float y = x * r;
    y = __fmaf_rn(__fmaf_rn(-y, y, x), r * 0.5f, y);
    if (small) y *= 0x1p-40f;
    return x == 0.0f ? x : y;
}

__device__ __forceinline__ Update update_of(const Tensors& of, const Scalars& s, float norm, const Amaxes* amaxes) {
    Update how = {};
    how.clip = (s.max_norm == 0.0f ? 1.0f : fminf(s.max_norm / (norm * s.unscale + 1e-6f), 1.0f)) * s.unscale;
    how.keep = (float)(1.0 - s.learning_rate * of.weight_decay);
    how.usual = s.correction2 >= 0x1p-20f && s.correction2 <= 1.0f && s.epsilon >= 0x1p-50f && s.epsilon <= 1.0f;
    how.step_size = s.step_size;
    how.take1 = s.take1;
    how.beta2 = s.beta2;
    how.take2 = s.take2;
    how.correction2 = s.correction2;
    how.epsilon = s.epsilon;
    how.inverse2 = reciprocal(s.correction2);
    how.seed = hash(of.seed ^ hash(s.step));
    if (SCALED_G) how.grad_scale = *of.grad_scale;
    if (SCALED_W) {
        how.scale = *of.scale;
        how.power = power_for(amaxes->weight, LARGEST_WEIGHT);
        how.new_scale = power_back(amaxes->weight, LARGEST_WEIGHT);
    }
    if (SCALED_M) {
        how.m_scale = *of.m_scale;
        how.v_scale = *of.v_scale;
        how.m_power = power_for(amaxes->m, LARGEST_M);
        how.v_power = power_for(amaxes->v, LARGEST_V);
    }
    return how;
}

// Up with the probability of the dropped bits: as many random bits are added, and what they carry over stays. A hash has the bits
// of four elements: one for each would cost more than the memory. `kind` tells weights and both moments apart: those of one element
// have bits of their own, and share them with those of its neighbours.
__device__ __forceinline__ float by_chance(float x, u64 four, u32 lane) {
    return finite(x) ? __uint_as_float(__float_as_uint(x) + (u32)(four >> (16 * (lane % 4)) & 0xFFFF) & 0xFFFF0000) : x;
}
__device__ __forceinline__ void round_by_chance(float* x, u64 seed, u64 at, u32 kind) {
    if (at % 4 == 0) {
        const u64 four[2] = {hash(seed ^ (at / 4)), hash(seed ^ (at / 4 + 1))};
#pragma unroll
        for (u32 i = 0; i < 8; i++) x[i] = by_chance(x[i], four[i / 4], i + kind);
    } else {
        // A row that does not start at a multiple of four.
#pragma unroll
        for (u32 i = 0; i < 8; i++) x[i] = by_chance(x[i], hash(seed ^ (at + i) / 4), at + i + kind);
    }
}

// Eight neighbours of a parameter: the first `valid`, `wide` where that is all of them, at addresses for
// wide accesses; and the group that expanded ones are in.
struct Place {
    u64 at, group;
    int valid;
    bool wide;
};

// What an update reads of them.
struct Raw {
    Eight<G> g;
    Eight<W> w;
    Eight<M> m;
    Eight<V> v;
    uint4 rest;     // of a split weight
};
__device__ __forceinline__ void fetch(Raw& raw, const Tensors& of, const Place& place) {
    const u64 at = place.at;
    raw.g = fetch8(of.grad + at, place.valid, place.wide);
    raw.w = fetch8(of.weight + at, place.valid, place.wide);
    raw.m = fetch8(of.m + at, place.valid, place.wide);
    raw.v = fetch8(of.v + at, place.valid, place.wide);
    if (WEIGHTS == Split) {
        const Eight<bf16> rest = fetch8((const bf16*)of.rest + at, place.valid, place.wide);
        raw.rest = rest.words[0];
    }
}

// Values of weights and moments.
struct Values { float w[8], m[8], v[8]; };

__device__ __forceinline__ void scale8(float* x, float scale) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale;
}
// Logarithms of codes, for expanded moments.
__device__ __forceinline__ void fill_logarithms(float* logarithms) {
    if (MOMENTS != Expanded) return;
    for (int i = threadIdx.x; i < 128; i += blockDim.x) {
        float v[8];
        Eight<e4m3> code = {};
        code.at[0].bits = i;
        unpack8(code, v);
        logarithms[i] = log2_of(v[0]);
    }
    __syncthreads();
}
template <class T> __device__ __forceinline__ void expand8(const Eight<T>& codes, const float* groups, const float* logarithms, float* x) {
    const Curve curve = {groups[0], groups[1], groups[2]};
    const float root = 1.0f / curve.power;
    const uint2 words = *(const uint2*)&codes;
    if (curve.bad()) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = (i < 4 ? words.x : words.y) >> (i % 4 * 8) & 0x7F ? curve.step : 0.0f;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = stretched_back((i < 4 ? words.x : words.y) >> (i % 4 * 8) & 0xFF, logarithms, curve, root);
}

// The gradient, clipped, and what there is of weights and moments.
__device__ __forceinline__ void decode(const Raw& raw, const Tensors& of, const Place& place, const Update& how, const float* logarithms, float* g, Values& old) {
    unpack8(raw.g, g);
    if (SCALED_G) scale8(g, how.grad_scale);
    scale8(g, how.clip);
    unpack8(raw.w, old.w);
    if (SCALED_W) scale8(old.w, how.scale);
    if (WEIGHTS == Split) {
        const u32 pairs[4] = {raw.rest.x, raw.rest.y, raw.rest.z, raw.rest.w};
#pragma unroll
        for (int i = 0; i < 8; i++) old.w[i] = __uint_as_float(__float_as_uint(old.w[i]) + (int)(short)(pairs[i / 2] >> (i % 2 * 16)));
    }
    if constexpr (MOMENTS == Expanded) {
        expand8(raw.m, of.m_scale + 3 * place.group, logarithms, old.m);
        expand8(raw.v, of.v_scale + 3 * place.group, logarithms, old.v);
    } else {
        unpack8(raw.m, old.m);
        unpack8(raw.v, old.v);
        if (SCALED_M) scale8(old.m, how.m_scale);
        if (SCALED_M) scale8(old.v, how.v_scale);
    }
}

// The new values of eight elements, in place of the old ones.
__device__ __forceinline__ void compute(const Raw& raw, const Tensors& of, const Place& place, const Update& how, const float* logarithms, Values& x) {
    float g[8], nothing = 0.0f;
    bool exact = how.usual;
    decode(raw, of, place, how, logarithms, g, x);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x.m[i] = x.m[i] + (g[i] - x.m[i]) * how.take1;
        x.v[i] = x.v[i] * how.beta2 + g[i] * g[i] * how.take2;
        const float denominator = quotient(root(x.v[i]), how.correction2, how.inverse2) + how.epsilon;
        const float q = quotient(x.m[i], denominator, reciprocal(denominator));
        const float decayed = x.w[i] * how.keep, step = how.step_size * q;
        x.w[i] = decayed - step;
        // A quotient is right unless it is tiny, and then it is far from changing a weight of ordinary size.
        exact &= fabsf(q) >= 0x1p-40f || fabsf(step) < fabsf(decayed) * 0x1p-30f;
        // Infinity and NaN make it NaN.
        nothing = __fmaf_rn(x.w[i], 0.0f, nothing);
    }
    if (exact && nothing == 0.0f) return;
    // Once more, from memory, with the compiler's own division and root; one by one, by turning them round.
    Raw again;
    fetch(again, of, place);
    decode(again, of, place, how, logarithms, g, x);
#pragma unroll 1
    for (int k = 0; k < 8; k++) {
        const float m = x.m[0] + (g[0] - x.m[0]) * how.take1, v = x.v[0] * how.beta2 + g[0] * g[0] * how.take2;
        const float w = x.w[0] * how.keep - how.step_size * (m / (sqrtf(v) / how.correction2 + how.epsilon));
#pragma unroll
        for (int i = 0; i < 7; i++) {
            g[i] = g[i + 1];
            x.w[i] = x.w[i + 1];
            x.m[i] = x.m[i + 1];
            x.v[i] = x.v[i + 1];
        }
        x.w[7] = w;
        x.m[7] = m;
        x.v[7] = v;
    }
}

// The curve of a group, whose values sixteen neighbouring threads have. All threads of a warp come here. As integers, absolute values
// are in order, and one less makes zero the largest.
__device__ __forceinline__ Curve curve_of_group(const float* x, bool any) {
    u32 largest = 0, smallest = 0xFFFFFFFF;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 bits = any ? __float_as_uint(x[i]) & 0x7FFFFFFF : 0;
        largest = max(largest, bits);
        smallest = min(smallest, bits - 1);
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2) {
        largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, step));
        smallest = min(smallest, __shfl_xor_sync(0xFFFFFFFF, smallest, step));
    }
    return curve_of(__uint_as_float(largest), __uint_as_float(smallest + 1));
}
template <class T> __device__ __forceinline__ void write_expanded(T* codes, float* groups, const Place& place, const float* x, const Curve& curve) {
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = curve.bad() ? (x[i] == 0.0f ? 0.0f : curve.step) : stretched(x[i], curve);
    put8(codes + place.at, pack8<T>(y), place.valid, place.wide);
    if (threadIdx.x % 16 == 0) {
        groups[3 * place.group] = curve.step;
        groups[3 * place.group + 1] = curve.power;
        groups[3 * place.group + 2] = curve.middle;
    }
}

// Writes new values, and gives the weights as layers read them, zero where there are none. All threads of a warp come here, each
// with a row's eight, or without `any`; sixteen neighbours have a group of what is expanded.
__device__ __forceinline__ Eight<X> write(Values& x, const Tensors& of, const Place& place, bool any, const Update& how) {
    if constexpr (MOMENTS == Expanded) {
        const Curve m = curve_of_group(x.m, any), v = curve_of_group(x.v, any);
        if (any) write_expanded(of.m, of.m_scale, place, x.m, m);
        if (any) write_expanded(of.v, of.v_scale, place, x.v, v);
    } else if (any) {
        if (SCALED_M) scale8(x.m, how.m_power);
        if (SCALED_M) scale8(x.v, how.v_power);
        if (MOMENTS == Bfloat16) round_by_chance(x.m, how.seed, place.at, 1);
        if (MOMENTS == Bfloat16) round_by_chance(x.v, how.seed, place.at, 2);
        put8(of.m + place.at, pack8<M>(x.m), place.valid, place.wide);
        put8(of.v + place.at, pack8<V>(x.v), place.valid, place.wide);
    }
    Eight<X> read = {};
    if (!any) return read;
    if (WEIGHTS == Chance) round_by_chance(x.w, how.seed, place.at, 0);
    if constexpr (WEIGHTS == Split) {
        u32 rest[4] = {};
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 bits = __float_as_uint(x.w[i]);
            rest[i / 2] |= (bits & 0xFFFF) << (i % 2 * 16);
            x.w[i] = __uint_as_float((bits + 0x8000) & 0xFFFF0000);
        }
        Eight<bf16> rests;
        rests.words[0] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
        put8((bf16*)of.rest + place.at, rests, place.valid, place.wide);
    }
    if (SCALED_W) scale8(x.w, how.power);
    const Eight<W> kept = pack8<W>(x.w);
    put8(of.weight + place.at, kept, place.valid, place.wide);
    if (SCALED_W) {
        unpack8(kept, x.w);
        scale8(x.w, how.new_scale);
    }
    read = pack8<X>(x.w);
    if (!place.wide) {
#pragma unroll
        for (int i = 0; i < 8; i++) if (i >= place.valid) read.at[i] = X{};
    }
    if (of.copy) put8(of.copy + place.at, read, place.valid, place.wide);
    return read;
}

__device__ __forceinline__ bool aligned(const Tensors& of) { return aligned(of.weight, of.copy, of.m, of.v, of.grad, WEIGHTS == Split ? of.rest : nullptr); }
