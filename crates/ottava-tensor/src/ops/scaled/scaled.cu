// `X` is the plain type, `Y` the stored one. Eight elements per thread, in strides.
extern "C" __global__ void scaled(Y* y, float* scale_inv, const X* __restrict__ x, const float* amax, float largest, u64 n) {
    const float power = power_for(*amax, largest);
    const bool wide = aligned(x, y);
    for (u64 at = 8 * grid_start(); at < n; at += 8 * grid_step()) {
        const int valid = min(n - at, 8ull);
        float v[8];
        unpack8(fetch8(x + at, valid, wide && valid == 8), v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= power;
        put8(y + at, pack8<Y>(v), valid, wide && valid == 8);
    }
    if (grid_start() == 0) *scale_inv = power_back(*amax, largest);
}

extern "C" __global__ void unscaled(X* x, const Y* __restrict__ y, const float* scale_inv, u64 n) {
    const float scale = *scale_inv;
    const bool wide = aligned(x, y);
    for (u64 at = 8 * grid_start(); at < n; at += 8 * grid_step()) {
        const int valid = min(n - at, 8ull);
        float v[8];
        unpack8(fetch8(y + at, valid, wide && valid == 8), v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= scale;
        put8(x + at, pack8<X>(v), valid, wide && valid == 8);
    }
}

extern "C" __global__ void split(unsigned short* upper, unsigned short* rest, const float* __restrict__ x, u64 n) {
    for (u64 i = grid_start(); i < n; i += grid_step()) {
        const u32 bits = __float_as_uint(x[i]);
        upper[i] = (bits + 0x8000) >> 16;
        rest[i] = bits;
    }
}
