// Updates the momentum of a parameter with `rows` rows of `columns` elements; there is one row unless the momentum is expanded. A block processes up
// to CHUNK elements of a row, and a thread eight neighbours at a time. `G` is the type of the gradient, `M` and `MOMENTS` the type and storage format
// of the momentum, and `RULE` the rule for the direction. Compiled without FMA contraction, so each operation rounds as on the CPU.
enum Rule { Nesterov, Sign };

struct Scalars {
    double learning_rate;
    u64 step;
    float take1, take2, max_norm, unscale;
};

// `scale` has the groups of an expanded momentum, or the inverse scale of a scaled momentum.
template <bool stores> __device__ __forceinline__ void update(bf16* direction, M* momentum, float* scale, float* amax, const G* grad, const float* grad_scale,
                                                              const float* norm, const Scalars& how, u64 seed, u64 offset, u64 columns, u64 rows) {
    if (!finite(*norm)) return;
    const float clip = (how.max_norm == 0.0f ? 1.0f : fminf(how.max_norm / (*norm * how.unscale + 1e-6f), 1.0f)) * how.unscale;
    const float g_scale = sizeof(G) == 1 ? *grad_scale : 1.0f, m_scale = MOMENTS == ScaledMoments ? *scale : 1.0f;
    const float power = MOMENTS == ScaledMoments && stores ? power_for(*amax, max_finite<e4m3>()) : 1.0f;
    const u64 random = hash(seed ^ hash(how.step)), across = (columns + CHUNK - 1) / CHUNK;
    const u64 row = blockIdx.x / across, start = blockIdx.x % across * CHUNK, end = min(start + CHUNK, columns);
    const bool together = aligned(direction, momentum, grad) && (rows == 1 || columns % 8 == 0);
    float largest = 0.0f;
    for (u64 first = start; first < end; first += 8 * blockDim.x) {
        const u64 at = first + 8 * threadIdx.x;
        const int valid = at < end ? min(end - at, 8ull) : 0;
        const Place place = {row * columns + at, row * ((columns + 127) / 128) + at / 128, valid, together && valid == 8};
        float g[8] = {}, m[8] = {}, d[8];
        if (valid > 0) {
            unpack8(fetch8(grad + place.at, valid, place.wide), g);
            if (sizeof(G) == 1) scale8(g, g_scale);
            scale8(g, clip);
            const Eight<M> raw = fetch8(momentum + place.at, valid, place.wide);
            if constexpr (MOMENTS == Expanded) expand8<true>(raw, ((const Levels*)scale)[place.group], m);
            else unpack8(raw, m);
            if (MOMENTS == ScaledMoments) scale8(m, m_scale);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float old = m[i];
            m[i] = old + (g[i] - old) * how.take2;
            const float mean = old + (g[i] - old) * how.take1;
            d[i] = RULE == Nesterov ? m[i] + (g[i] - m[i]) * how.take1 : mean == 0.0f ? 0.0f : copysignf(1.0f, mean);
            largest = fmaxf(largest, fabsf(m[i]));
        }
        if (valid > 0) write8(direction + place.at, pack8<bf16>(d), place);
        if constexpr (!stores) continue;
        if constexpr (MOMENTS == Expanded) {
            Levels levels, same;
            levels_of_groups(m, m, levels, same);
            if (valid == 0) continue;
            write8(momentum + place.at, codes8<true, M>(m, levels), place);
            if (threadIdx.x % 16 == 0) ((Levels*)scale)[place.group] = levels;
        } else if (valid > 0) {
            if (MOMENTS == ScaledMoments) scale8(m, power);
            write8(momentum + place.at, stored8<MOMENTS == Bfloat16, 1, M>(m, random, offset + place.at), place);
        }
    }
    if (!stores && MOMENTS == ScaledMoments) block_raise(amax, largest);
}

#define PARAMETERS                                                                                                                                   \
    bf16 *direction, M *momentum, float *scale, float *amax, const G *grad, const float *grad_scale, const float *norm, const Scalars *scalars, u64 seed, \
        u64 offset, u64 columns, u64 rows
#define ARGUMENTS direction, momentum, scale, amax, grad, grad_scale, norm, *scalars, seed, offset, columns, rows

extern "C" __global__ void __launch_bounds__(256) momentum(PARAMETERS) { update<true>(ARGUMENTS); }
extern "C" __global__ void __launch_bounds__(256) momentum_amax(PARAMETERS) { update<false>(ARGUMENTS); }

// Stores the new inverse scale in a separate launch, because the update reads the old one. One thread.
extern "C" __global__ void momentum_scale(float* scale, const float* amax, const float* norm) {
    if (threadIdx.x == 0 && finite(*norm)) *scale = power_back(*amax, max_finite<e4m3>());
}
