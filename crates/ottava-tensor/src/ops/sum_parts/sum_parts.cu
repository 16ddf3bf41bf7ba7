// Returns term p of the sum. Part number `place` is `own`, the other parts are the `count` parts of `others`, and the last term is the addend.
__device__ const X* term(int p, const X* own, const X* others, const X* addend, int place, int count, u64 n) {
    if (p == place) return own;
    const int other = p < place ? p : p - 1;
    return other < count ? others + other * n : addend;
}

// Grid-stride loop over eights. The remainder, and unaligned views, are summed element by element.
extern "C" __global__ void sum_parts(X* __restrict__ y, const X* __restrict__ own, const X* __restrict__ others, const X* __restrict__ addend, int place,
                                     int count, u64 n) {
    const u64 eights = n % 8 == 0 && aligned(y, own, others) && aligned(addend) ? n / 8 : 0;
    const int terms = count + 1 + (addend != nullptr);
    for (u64 g = grid_start(); g < eights; g += grid_step()) {
        float sum[8];
        unpack8(load8(term(0, own, others, addend, place, count, n) + 8 * g), sum);
        for (int p = 1; p < terms; p++) {
            float v[8];
            unpack8(load8(term(p, own, others, addend, place, count, n) + 8 * g), v);
#pragma unroll
            for (int i = 0; i < 8; i++) sum[i] += v[i];
        }
        store8(y + 8 * g, pack8<X>(sum));
    }
    for (u64 i = 8 * eights + grid_start(); i < n; i += grid_step()) {
        float sum = load(term(0, own, others, addend, place, count, n)[i]);
        for (int p = 1; p < terms; p++) sum += load(term(p, own, others, addend, place, count, n)[i]);
        store(&y[i], sum);
    }
}
