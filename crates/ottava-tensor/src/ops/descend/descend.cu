// Moves a parameter's weights along a direction. Threads stride over eights. `WEIGHTS` is the storage format of the weights, `X` the type
// that layers read. Compiled without FMA contraction, so each operation rounds as on the CPU.
typedef WeightType<WEIGHTS>::T W;
constexpr bool SCALED = WEIGHTS == ScaledMaster;

// The scalars of a step, as in momentum.cu.
struct Scalars {
    double learning_rate;
    u64 step;
    float take1, take2, max_norm, unscale;
};

// `rest` has the remainders of split weights, or the inverse scale of scaled weights. `copy` is null if no copy is stored.
template <bool stores> __device__ __forceinline__ void update(W* weight, X* copy, void* rest, float* amax, const bf16* direction, double weight_decay,
                                                              const float* norm, const Scalars& how, u64 seed, u64 offset, u64 n) {
    if (!finite(*norm)) return;
    const float rate = (float)how.learning_rate, keep = (float)(1.0 - how.learning_rate * weight_decay);
    const float scale = SCALED ? *(const float*)rest : 1.0f;
    const float power = SCALED && stores ? power_for(*amax, max_finite<f16>()) : 1.0f;
    const float new_scale = SCALED && stores ? power_back(*amax, max_finite<f16>()) : 1.0f;
    const u64 random = hash(seed ^ hash(how.step));
    const bool together = aligned(weight, copy, direction, WEIGHTS == Split ? (const bf16*)rest : nullptr);
    float largest = 0.0f;
    for (u64 at = 8 * grid_start(); at < n; at += 8 * grid_step()) {
        const int valid = min(n - at, 8ull);
        const Place place = {at, 0, valid, together && valid == 8};
        Eight<bf16> remainders = {};
        if (WEIGHTS == Split) remainders = fetch8((const bf16*)rest + at, valid, place.wide);
        float w[8], d[8];
        decode_weights<WEIGHTS>(fetch8(weight + at, valid, place.wide), remainders, scale, w);
        unpack8(fetch8(direction + at, valid, place.wide), d);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            w[i] = w[i] * keep - rate * d[i];
            largest = fmaxf(largest, fabsf(w[i]));
        }
        if constexpr (!stores) continue;
        if constexpr (WEIGHTS == Split) split8(w, (bf16*)rest + at, place);
        if (SCALED) scale8(w, power);
        const Eight<W> kept = stored8<WEIGHTS == Chance, 0, W>(w, random, offset + at);
        write8(weight + at, kept, place);
        if (!copy) continue;
        if (SCALED) {
            unpack8(kept, w);
            scale8(w, new_scale);
        }
        write8(copy + at, pack8<X>(w), place);
    }
    if (!stores) block_raise(amax, largest);
}

#define PARAMETERS                                                                                                                               \
    W *weight, X *copy, void *rest, float *amax, const bf16 *direction, double weight_decay, const float *norm, const Scalars *scalars, u64 seed, \
        u64 offset, u64 n
#define ARGUMENTS weight, copy, rest, amax, direction, weight_decay, norm, *scalars, seed, offset, n

extern "C" __global__ void __launch_bounds__(256) descend(PARAMETERS) { update<true>(ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(256) descend_amax(PARAMETERS) { update<false>(ARGUMENTS); }

// Stores the new inverse scale in a separate launch, because the update reads the old one. One thread.
extern "C" __global__ void descend_scale(float* scale, const float* amax, const float* norm) {
    if (threadIdx.x == 0 && finite(*norm)) *scale = power_back(*amax, max_finite<f16>());
}
