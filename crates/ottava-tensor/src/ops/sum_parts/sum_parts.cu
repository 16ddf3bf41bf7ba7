// Grid-stride loop over eights; the remainder and unaligned views element by element.
extern "C" __global__ void sum_parts(X* __restrict__ y, const X* __restrict__ parts, const X* __restrict__ addend, int count, u64 n) {
    const u64 eights = n % 8 == 0 && aligned(y, parts, addend) ? n / 8 : 0;
    for (u64 g = grid_start(); g < eights; g += grid_step()) {
        float sum[8];
        unpack8(load8(parts + 8 * g), sum);
        for (int p = 1; p <= count; p++) {
            const X* from = p < count ? parts + p * n : addend;
            if (!from) break;
            float v[8];
            unpack8(load8(from + 8 * g), v);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += v[i];
        }
        store8(y + 8 * g, pack8<X>(sum));
    }
    for (u64 i = 8 * eights + grid_start(); i < n; i += grid_step()) {
        float sum = load(parts[i]);
        for (int p = 1; p < count; p++) sum += load(parts[p * n + i]);
        store(&y[i], addend ? sum + load(addend[i]) : sum);
    }
}
