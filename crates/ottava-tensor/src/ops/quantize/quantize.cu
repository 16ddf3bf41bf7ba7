struct Values {
    const X* x;
    int columns;
    bool wide;
    typedef Eight<X> Raw;
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        return fetch8(x + (u64)row * columns + column, columns - column, wide);
    }
    __device__ __forceinline__ Eight<X> values(const Raw& raw, int, int) const { return raw; }
    __device__ __forceinline__ bool is_copy() const { return true; }
    __device__ __forceinline__ const X* address(int row, int column) const { return x + ((u64)(u32)row * (u32)columns + column); }
};
template <> constexpr bool MAY_COPY<Values> = true;

// A source of values of another type, multiplied by a scale and rounded to the type that is cast.
template <class S> struct RoundedValues {
    const S* x;
    float scale;
    int columns;
    bool wide;
    typedef Eight<S> Raw;
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        return fetch8(x + (u64)row * columns + column, columns - column, wide);
    }
    __device__ __forceinline__ Eight<X> values(const Raw& raw, int, int) const {
        float v[8];
        unpack8(raw, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= scale;
        return pack8<X>(v);
    }
};

// Grid (columns / 128, rows / 128) of the padded matrix, 256 threads.
extern "C" __global__ void __launch_bounds__(256, 4) quantize_scaled(const f16* x, const float* scale_inv, const __grid_constant__ Destination to) {
    quantize_tile<HOLDS ? 4 : 8>(to, RoundedValues<f16>{x, *scale_inv, to.columns, to.columns % 8 == 0 && aligned(x)});
}
extern "C" __global__ void __launch_bounds__(256, 4) quantize_rounded(const f32* x, const __grid_constant__ Destination to) {
    quantize_tile<HOLDS ? 4 : 8>(to, RoundedValues<f32>{x, 1.0f, to.columns, to.columns % 8 == 0 && aligned(x)});
}
extern "C" __global__ void __launch_bounds__(256, 4) quantize(const X* x, const __grid_constant__ Destination to) {
    quantize_tile<HOLDS ? 4 : 8>(to, Values{x, to.columns, to.columns % 8 == 0 && aligned(x)});
}

// Casts one row. The grid has the blocks of all padded rows.
template <int EIGHTS> __device__ __forceinline__ void quantize_row(const X* x, const Destination& to) {
    if constexpr (SHARING != PerRow) return;
    start_row();
    if (skips_row(to)) return;
    const int row = cast_row_number();
    Eight<X> values[EIGHTS] = {};
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        const int column = row_column<EIGHTS>(k);
        if (row < to.rows && column < to.columns) values[k] = load8(x + (u64)row * to.columns + column);
    }
    cast_row(to, values);
}
extern "C" __global__ void __launch_bounds__(1024, 1) quantize_few_rows(const X* x, const __grid_constant__ Destination to) { quantize_row<1>(x, to); }
extern "C" __global__ void __launch_bounds__(1024, 2) quantize_rows(const X* x, const __grid_constant__ Destination to) { quantize_row<ROW_EIGHTS>(x, to); }

// Grid-stride loop over eights. The remainder, and unaligned views, are read element by element. `amax` is initially 0.
extern "C" __global__ void amax(float* amax, const X* __restrict__ x, u64 n) {
    const u64 eights = aligned(x) ? n / 8 : 0;
    float largest = 0.0f;
#pragma unroll 4
    for (u64 g = grid_start(); g < eights; g += grid_step()) largest = fmaxf(largest, largest8(load8(x + 8 * g)));
    for (u64 i = 8 * eights + grid_start(); i < n; i += grid_step()) largest = fmaxf(largest, fabsf(load(x[i])));
    block_raise(amax, largest);
}

// One thread.
extern "C" __global__ void take_scale(float* scale, float* amax, float largest, float epsilon, int power_of_two) {
    const float a = *amax < epsilon ? epsilon : *amax;
    float s = 1.0f;
    if (a != 0.0f && a <= 3.402823466e38f) {
        s = fminf(largest / a, 3.402823466e38f);
        if (power_of_two) s = __uint_as_float(__float_as_uint(s) & 0x7F800000);
    }
    *scale = s;
    *amax = 0.0f;
}
