// Grid-stride loops over eights. Compiled without FMA contraction, so each operation rounds as on the CPU.
extern "C" __global__ void __launch_bounds__(256) normalize(bf16* __restrict__ y, const bf16* __restrict__ x, const float* norm, float epsilon, u64 n) {
    const float divisor = fmaxf(*norm, epsilon);
    const bool together = aligned(y, x);
    for (u64 at = 8 * grid_start(); at < n; at += 8 * grid_step()) {
        const int valid = min(n - at, 8ull);
        const bool wide = together && valid == 8;
        float v[8];
        unpack8(fetch8(x + at, valid, wide), v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] /= divisor;
        put8(y + at, pack8<bf16>(v), valid, wide);
    }
}

// Replaces `gram` by factor · (a·I + b·gram + c·square). The matrices have `n` rows and columns, and `elements` elements.
extern "C" __global__ void __launch_bounds__(256)
polynomial(bf16* __restrict__ gram, const float* __restrict__ square, float a, float b, float c, float factor, u64 n, u64 elements) {
    const bool together = aligned(gram, square);
    for (u64 at = 8 * grid_start(); at < elements; at += 8 * grid_step()) {
        const int valid = min(elements - at, 8ull);
        const bool wide = together && valid == 8;
        float g[8], s[8];
        unpack8(fetch8(gram + at, valid, wide), g);
        unpack8(fetch8(square + at, valid, wide), s);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float sum = b * g[i] + c * s[i];
            // Every (n + 1)-th element is on the diagonal.
            g[i] = factor * ((at + i) % (n + 1) == 0 ? a + sum : sum);
        }
        put8(gram + at, pack8<bf16>(g), valid, wide);
    }
}
