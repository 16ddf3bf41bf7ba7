// The update of eight elements. Compiled without FMA contraction, so each operation rounds as on the CPU. `G` is the type of the gradient,
// `X` the type in which layers read weights; `WEIGHTS` and `MOMENTS` are the storage formats.
template <int kind> struct MomentTypes { typedef u8 M, V; };
template <> struct MomentTypes<Float32> { typedef f32 M, V; };
template <> struct MomentTypes<Bfloat16> { typedef bf16 M, V; };
template <> struct MomentTypes<ScaledMoments> { typedef e4m3 M; typedef f16 V; };
typedef WeightType<WEIGHTS>::T W;
typedef MomentTypes<MOMENTS>::M M;
typedef MomentTypes<MOMENTS>::V V;

// Whether the gradient, the weights and the moments have a scale.
constexpr bool SCALED_G = sizeof(G) == 1, SCALED_W = WEIGHTS == ScaledMaster, SCALED_M = MOMENTS == ScaledMoments;

// The scalars of a step, as in mod.rs.
struct Scalars {
    double learning_rate;
    u64 step;
    float step_size, take1, beta2, take2, correction2, epsilon, max_norm, unscale;
};

// The largest absolute values of a parameter's weights and moments, which determine their power-of-two scales.
struct Amaxes { float weight, m, v; };

struct Tensors {
    W* weight;
    X* copy;                // null if layers read the updated weights, or if no copy is stored
    M* m;
    V* v;
    const G* grad;
    u64 seed;
    double weight_decay;
    union {
        float* scale;       // of scaled weights
        short* rest;        // of split weights
    };
    float *m_scale, *v_scale;   // of scaled moments, or the groups of expanded moments
    const float* grad_scale;
    Amaxes* amaxes;         // null if neither weights nor moments are scaled
};

// The largest finite values of the types of scaled weights and moments.
constexpr float LARGEST_WEIGHT = max_finite<WeightType<ScaledMaster>::T>();
constexpr float LARGEST_M = max_finite<MomentTypes<ScaledMoments>::M>();
constexpr float LARGEST_V = max_finite<MomentTypes<ScaledMoments>::V>();

// Values that all elements of a parameter share.
struct Update {
    float clip, keep, step_size, take1, beta2, take2, correction2, epsilon, divisor, inverse;
    u64 seed, offset;
    bool usual;
    float grad_scale, scale, m_scale, v_scale;
    float power, m_power, v_power, new_scale;
};

__device__ __forceinline__ Update update_of(const Tensors& of, const Scalars& s, float norm) {
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
    // For `large_root`.
    how.divisor = s.correction2 * 0x1p40f;
    how.inverse = 1.0f / how.divisor;
    how.seed = hash(of.seed ^ hash(s.step));
    if (SCALED_G) how.grad_scale = *of.grad_scale;
    if (SCALED_W) {
        how.scale = *of.scale;
        how.power = power_for(of.amaxes->weight, LARGEST_WEIGHT);
        how.new_scale = power_back(of.amaxes->weight, LARGEST_WEIGHT);
    }
    if (SCALED_M) {
        how.m_scale = *of.m_scale;
        how.v_scale = *of.v_scale;
        how.m_power = power_for(of.amaxes->m, LARGEST_M);
        how.v_power = power_for(of.amaxes->v, LARGEST_V);
    }
    return how;
}

// The loaded values of eight elements.
struct Raw {
    Eight<G> g;
    Eight<W> w;
    Eight<M> m;
    Eight<V> v;
    Eight<bf16> rest;   // of split weights
    Levels levels[2];   // of expanded moments
};
template <bool WIDE> __device__ __forceinline__ void fetch_by(Raw& raw, const Tensors& of, const Place& place) {
    const u64 at = place.at;
    raw.g = fetch8(of.grad + at, place.valid, WIDE);
    raw.w = fetch8(of.weight + at, place.valid, WIDE);
    raw.m = fetch8(of.m + at, place.valid, WIDE);
    raw.v = fetch8(of.v + at, place.valid, WIDE);
    if (WEIGHTS == Split) raw.rest = fetch8((const bf16*)of.rest + at, place.valid, WIDE);
    if (MOMENTS == Expanded) {
        raw.levels[0] = ((const Levels*)of.m_scale)[place.group];
        raw.levels[1] = ((const Levels*)of.v_scale)[place.group];
    }
}
__device__ __forceinline__ void fetch(Raw& raw, const Tensors& of, const Place& place) {
    if (place.wide) fetch_by<true>(raw, of, place);
    else fetch_by<false>(raw, of, place);
}

// The weights and moments of eight elements. `plain` means that all values are finite and come from the fast path.
struct Values {
    float w[8], m[8], v[8];
    bool plain;
};

// Decodes the moments and the clipped gradient.
__device__ __forceinline__ void decode_moments(const Raw& raw, const Update& how, float* g, float* m, float* v) {
    unpack8(raw.g, g);
    if (SCALED_G) scale8(g, how.grad_scale);
    scale8(g, how.clip);
    if constexpr (MOMENTS == Expanded) {
        expand8<true>(raw.m, raw.levels[0], m);
        expand8<false>(raw.v, raw.levels[1], v);
    } else {
        unpack8(raw.m, m);
        unpack8(raw.v, v);
        if (SCALED_M) scale8(m, how.m_scale);
        if (SCALED_M) scale8(v, how.v_scale);
    }
}
// Decodes the weights, the moments and the clipped gradient.
__device__ __forceinline__ void decode(const Raw& raw, const Update& how, float* g, Values& old) {
    decode_moments(raw, how, g, old.m, old.v);
    decode_weights<WEIGHTS>(raw.w, raw.rest, how.scale, old.w);
}
// Updates the moments of eight elements in place.
__device__ __forceinline__ void moments8(const float* g, const Update& how, float* m, float* v) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        m[i] = m[i] + (g[i] - m[i]) * how.take1;
        v[i] = v[i] * how.beta2 + g[i] * g[i] * how.take2;
    }
}

// Returns the approximate maximum of |m| / √v of eight new moments, for a bound.
__device__ __forceinline__ float largest_ratio8(const float* m, const float* v) {
    float ratio = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float r;
        asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v[i]));
        // Zero times infinity is NaN, which is ignored.
        ratio = fmaxf(ratio, fabsf(m[i]) * r);
    }
    return ratio;
}
// Returns an upper bound of new weights whose old magnitude is at most `w`. A margin of 0.1 % covers rounding. Extreme inputs give infinity or NaN.
__device__ __forceinline__ float bound_of_weights(float w, float ratio, const Update& how) {
    return (w * fabsf(how.keep) + fabsf(how.step_size) * how.correction2 * ratio) * 1.001f;
}

// The slow path: computes new values with IEEE division and square root. The loop rotates the eight elements to keep the code small.
__device__ __forceinline__ void update_again(Values& x, const Tensors& of, const Place& place, const Update& how) {
    Raw raw;
    float g[8];
    fetch(raw, of, place);
    decode(raw, how, g, x);
    moments8(g, how, x.m, x.v);
#pragma unroll 1
    for (int k = 0; k < 8; k++) {
        const float m = x.m[0], v = x.v[0], w = x.w[0] * how.keep - how.step_size * (m / (sqrtf(v) / how.correction2 + how.epsilon));
#pragma unroll
        for (int i = 0; i < 7; i++) {
            x.w[i] = x.w[i + 1];
            x.m[i] = x.m[i + 1];
            x.v[i] = x.v[i + 1];
        }
        x.w[7] = w;
        x.m[7] = m;
        x.v[7] = v;
    }
}
// The fast path: computes new values in fewer operations, and calls the slow path if these operations may be inexact.
__device__ __forceinline__ void update8(const Raw& raw, Values& x, const Tensors& of, const Place& place, const Update& how) {
    float g[8], nothing = 0.0f, least = 1.0f;
    decode(raw, how, g, x);
    moments8(g, how, x.m, x.v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float denominator = quotient_by_nearest(large_root(x.v[i]), how.divisor, how.inverse) + how.epsilon;
        const float q = quotient(x.m[i], denominator, reciprocal(denominator));
        x.w[i] = x.w[i] * how.keep - how.step_size * q;
        least = fminf(least, fabsf(q));
        // Becomes NaN if an operand is infinite or NaN.
        nothing = __fmaf_rn(x.w[i], 0.0f, nothing);
    }
    bool exact = how.usual && nothing == 0.0f;
    // Quotients are exact unless they are tiny, and tiny quotients do not change a weight of normal size.
    if (exact && least < 0x1p-40f) {
#pragma unroll
        for (int i = 0; i < 8; i++) exact &= fabsf(x.w[i]) >= fabsf(how.step_size) * 0x1p-9f;
    }
    x.plain = exact;
    if (!exact) update_again(x, of, place, how);
}

// Returns eight values in their storage type. Stochastic rounding is for BF16; wide places use `chances`.
template <bool BY_CHANCE, u32 KIND, class T>
__device__ __forceinline__ Eight<T> stored8(const float* v, const Values& x, const Chances& chances, const Place& place, const Update& how) {
    if constexpr (!BY_CHANCE) return pack8<T>(v);
    else if (x.plain && place.wide) return chances.round8<KIND>(v);
    else return round_stochastically(v, how.seed, how.offset + place.at, KIND);
}

// Stores new values and returns the weights in the type that layers read, or zeros if `any` is false. Called by all threads of a warp; 16
// neighbouring
// threads share a group of expanded moments.
__device__ __forceinline__ Eight<X> write(Values& x, const Tensors& of, const Place& place, bool any, const Update& how) {
    constexpr bool MOMENTS_BY_CHANCE = MOMENTS == Bfloat16, WEIGHTS_BY_CHANCE = WEIGHTS == Chance;
    Chances chances;
    if (MOMENTS_BY_CHANCE || WEIGHTS_BY_CHANCE) chances = Chances::of(how.seed, how.offset + place.at);
    if constexpr (MOMENTS == Expanded) {
        Levels m, v;
        levels_of_groups(x.m, x.v, m, v);
        if (any) {
            write8(of.m + place.at, codes8<true, M>(x.m, m), place);
            write8(of.v + place.at, codes8<false, V>(x.v, v), place);
            if (threadIdx.x % 16 == 0) {
                ((Levels*)of.m_scale)[place.group] = m;
                ((Levels*)of.v_scale)[place.group] = v;
            }
        }
    } else if (any) {
        if (SCALED_M) scale8(x.m, how.m_power);
        if (SCALED_M) scale8(x.v, how.v_power);
        write8(of.m + place.at, stored8<MOMENTS_BY_CHANCE, 1, M>(x.m, x, chances, place, how), place);
        write8(of.v + place.at, stored8<MOMENTS_BY_CHANCE, 2, V>(x.v, x, chances, place, how), place);
    }
    Eight<X> read = {};
    if (!any) return read;
    if constexpr (WEIGHTS == Split) split8(x.w, (bf16*)of.rest + place.at, place);
    if (SCALED_W) scale8(x.w, how.power);
    const Eight<W> kept = stored8<WEIGHTS_BY_CHANCE, 0, W>(x.w, x, chances, place, how);
    write8(of.weight + place.at, kept, place);
    if (SCALED_W) {
        unpack8(kept, x.w);
        scale8(x.w, how.new_scale);
    }
    // Layers read the stored weights; there is no second rounding.
    if constexpr (WEIGHTS_BY_CHANCE) read.words[0] = kept.words[0];
    else read = pack8<X>(x.w);
    if (!place.wide) {
#pragma unroll
        for (int i = 0; i < 8; i++) if (i >= place.valid) read.at[i] = X{};
    }
    if (of.copy) write8(of.copy + place.at, read, place);
    return read;
}

__device__ __forceinline__ bool aligned(const Tensors& of) { return aligned(of.weight, of.copy, of.m, of.v, of.grad, WEIGHTS == Split ? of.rest : nullptr); }
