// `X` is the plain type, `Y` the stored type. Grid-stride loops over eights.
template <class From, class To> __device__ __forceinline__ void multiply(To* to, const From* __restrict__ from, float scale, u64 n) {
    const bool wide = aligned(from, to);
    for (u64 at = 8 * grid_start(); at < n; at += 8 * grid_step()) {
        const int valid = min(n - at, 8ull);
        float v[8];
        unpack8(fetch8(from + at, valid, wide && valid == 8), v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= scale;
        put8(to + at, pack8<To>(v), valid, wide && valid == 8);
    }
}

extern "C" __global__ void scaled(Y* y, float* scale_inv, const X* x, const float* amax, float largest, u64 n) {
    multiply(y, x, power_for(*amax, largest), n);
    if (grid_start() == 0) *scale_inv = power_back(*amax, largest);
}

extern "C" __global__ void unscaled(X* x, const Y* y, const float* scale_inv, u64 n) { multiply(x, y, *scale_inv, n); }

extern "C" __global__ void split(unsigned short* upper, unsigned short* rest, const float* __restrict__ x, u64 n) {
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const u32 bits = __float_as_uint(x[i]);
        upper[i] = (bits + 0x8000) >> 16;
        rest[i] = bits;
    }
}
