// Moves the average of a parameter towards its weights. Threads stride over eights. `WEIGHTS` is the storage format of the weights. Compiled without FMA
// contraction, so each operation rounds as on the CPU.
typedef WeightType<WEIGHTS>::T W;

// `rest` has the remainders of split weights, or the inverse scale of scaled weights.
extern "C" __global__ void __launch_bounds__(256) ema(float* average, const W* weight, const void* rest, const float* share, const float* norm, u64 n) {
    const float part = *share;
    if (!finite(*norm) || part == 0.0f) return;
    const float scale = WEIGHTS == ScaledMaster ? *(const float*)rest : 1.0f;
    const bool together = aligned(average, weight, WEIGHTS == Split ? (const bf16*)rest : nullptr);
    for (u64 at = 8 * grid_start(); at < n; at += 8 * grid_step()) {
        const int valid = min(n - at, 8ull);
        const Place place = {at, 0, valid, together && valid == 8};
        Eight<bf16> remainders = {};
        if (WEIGHTS == Split) remainders = fetch8((const bf16*)rest + at, valid, place.wide);
        float w[8], a[8];
        decode_weights<WEIGHTS>(fetch8(weight + at, valid, place.wide), remainders, scale, w);
        unpack8(fetch8(average + at, valid, place.wide), a);
#pragma unroll
        for (int i = 0; i < 8; i++) a[i] = part == 1.0f ? w[i] : a[i] + part * (w[i] - a[i]);
        write8(average + at, pack8<f32>(a), place);
    }
}
