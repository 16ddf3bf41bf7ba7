// A row of x `[T, 2F]` has F elements of gate, then F of up. With UNGATED, a row of x `[T, F]` has only gates. Aligned rows are processed in eights.
// The function of the gate is SiLU, GELU with GELU_TANH or GELU_EXACT, the squared ReLU with RELU2, or the hyperbolic tangent with TANH. CLAMPED is the SwiGLU with bounds.
#ifdef UNGATED
#define GATED 0
#else
#define GATED 1
#endif
#define HALVES (1 + GATED)

struct Gradient { float gate, up; };
#if defined(GELU_TANH) || defined(GELU_EXACT) || defined(RELU2) || defined(TANH)
// The function of the gate and its derivative, as in cpu.rs.
struct Gate { float value, slope; };
__device__ __forceinline__ Gate gate_of(float x) {
#ifdef GELU_TANH
    const float s = sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    return {x * s, s + x * s * (1.0f - s) * (1.59576912f * (1.0f + 0.134145f * x * x))};
#elif defined(RELU2)
    // A comparison keeps NaN.
    const float positive = x < 0.0f ? 0.0f : x;
    return {positive * positive, 2.0f * positive};
#elif defined(TANH)
    const float y = tanhf(x);
    return {y, 1.0f - y * y};
#else
    const float cdf = 0.5f * (1.0f + erff(x * 0.70710678f));
    return {x * cdf, cdf + x * (0.39894228f * expf(-0.5f * x * x))};
#endif
}
__device__ __forceinline__ float forward(float gate, float up) { return gate_of(gate).value * up; }
__device__ __forceinline__ Gradient backward(float d, float gate, float up) {
    const Gate g = gate_of(gate);
    return {d * up * g.slope, d * g.value};
}
#elif defined(CLAMPED)
// As in cpu.rs, comparisons are used, which keep NaN, and not fminf.
__device__ __forceinline__ float gate_of(float x) { return x > 7.0f ? 7.0f : x; }
__device__ __forceinline__ float clamped_up(float x) { return x > 7.0f ? 7.0f : x < -7.0f ? -7.0f : x; }
__device__ __forceinline__ float swish(float gate) { return gate * sigmoid(1.702f * gate); }
__device__ __forceinline__ float forward(float gate, float up) { return swish(gate_of(gate)) * (clamped_up(up) + 1.0f); }
__device__ __forceinline__ Gradient backward(float d, float gate, float up) {
    const float g = gate_of(gate), s = sigmoid(1.702f * g);
    return {gate > 7.0f ? 0.0f : d * (clamped_up(up) + 1.0f) * s * (1.0f + 1.702f * g * (1.0f - s)),
            up > 7.0f || up < -7.0f ? 0.0f : d * (g * s)};
}
#else
__device__ __forceinline__ float forward(float gate, float up) { return gate * sigmoid(gate) * up; }
__device__ __forceinline__ Gradient backward(float d, float gate, float up) {
    const float s = sigmoid(gate);
    return {d * up * s * (1.0f + gate * (1.0f - s)), d * (gate * s)};
}
#endif
// Returns an element of `up`, which is 1 without a gate.
__device__ __forceinline__ float up_of(X up) { return GATED ? load(up) : 1.0f; }
// Loads eight elements of `up`. `from` points to the gate elements, and `up` begins F elements later. Without a gate, nothing is read.
__device__ __forceinline__ Eight<X> ups8(const X* from, int F) {
    Eight<X> none;
    return GATED ? load8(from + F) : none;
}

#ifndef FORMAT
// Grid (rows). The pointers are not `__restrict__`, because reads could then move before the wait.
extern "C" __global__ void __launch_bounds__(1024) swiglu(X* y, const X* x, const int* end, int F) {
    start_successors();
    wait_for_predecessors();
    if (is_unused(end, blockIdx.x)) return;
    y += (u64)blockIdx.x * F;
    x += (u64)blockIdx.x * HALVES * F;
    const int eights = F % 8 == 0 && aligned(y, x) ? F / 8 : 0;
#pragma unroll 2
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const Eight<X> gate = load8(x + 8 * g), up = ups8(x + 8 * g, F);
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = forward(load(gate.at[i]), up_of(up.at[i]));
        store8(y + 8 * g, pack8<X>(v));
    }
    for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x) store(&y[c], forward(load(x[c]), GATED ? load(x[F + c]) : 1.0f));
}

// One block per row.
template <class Saved> __device__ __forceinline__ void backward_row(X* dx, const X* dy, const Saved& x, const int* end, int F) {
    const u64 row = blockIdx.x;
    if (is_unused(end, row)) return;
    dx += row * HALVES * F;
    dy += row * F;
    const int eights = x.wide(F) && aligned(dx, dy) ? F / 8 : 0;
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        typename Saved::Raw raw[HALVES];
#pragma unroll
        for (int h = 0; h < HALVES; h++) raw[h] = x.fetch(row, h * F + 8 * g);
        const Eight<X> d = load8(dy + 8 * g), gate = x.values(raw[0]), up = x.values(raw[GATED]);
        float v[2][8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const Gradient g = backward(load(d.at[i]), load(gate.at[i]), up_of(up.at[i]));
            v[0][i] = g.gate;
            v[1][i] = g.up;
        }
        store8(dx + 8 * g, pack8<X>(v[0]));
        if (GATED) store8(dx + F + 8 * g, pack8<X>(v[1]));
    }
    for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x) {
        const Gradient g = backward(load(dy[c]), load(x.value(row, c)), GATED ? load(x.value(row, F + c)) : 1.0f);
        store(&dx[c], g.gate);
        if (GATED) store(&dx[F + c], g.up);
    }
}
extern "C" __global__ void __launch_bounds__(256) swiglu_backward(X* __restrict__ dx, const X* __restrict__ dy,
                                                                  const X* __restrict__ x, const int* end, int F) {
    backward_row(dx, dy, Exact<X>{x, HALVES * F}, end, F);
}
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward_compressed(X* __restrict__ dx, const X* __restrict__ dy, const e4m3* __restrict__ codes,
                               const unsigned char* __restrict__ scale_inv, const int* end, int F) {
    backward_row(dx, dy, Compressed<X>{codes, scale_inv, HALVES * F}, end, F);
}

// Sums the products of `dy` and the activations of a row. One block per row.
template <class Saved> __device__ __forceinline__ void dots_row(float* dots, const X* dy, const Saved& x, const int* end, int F) {
    const u64 row = blockIdx.x;
    if (is_unused(end, row)) return;
    dy += row * F;
    const int eights = x.wide(F) && aligned(dy) ? F / 8 : 0;
    float sum = 0.0f;
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        const typename Saved::Raw raw = x.fetch(row, 8 * g), raw_up = x.fetch(row, GATED * F + 8 * g);
        const Eight<X> d = load8(dy + 8 * g), gate = x.values(raw), up = x.values(raw_up);
#pragma unroll
        for (int i = 0; i < 8; i++) sum += load(d.at[i]) * forward(load(gate.at[i]), up_of(up.at[i]));
    }
    for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x)
        sum += load(dy[c]) * forward(load(x.value(row, c)), GATED ? load(x.value(row, F + c)) : 1.0f);
    sum = block_sum(sum);
    if (threadIdx.x == 0) dots[row] = sum;
}
extern "C" __global__ void __launch_bounds__(256) swiglu_dots(float* dots, const X* dy, const X* x, const int* end, int F) {
    dots_row(dots, dy, Exact<X>{x, HALVES * F}, end, F);
}
extern "C" __global__ void __launch_bounds__(256)
    swiglu_dots_compressed(float* dots, const X* dy, const e4m3* codes, const unsigned char* scale_inv, const int* end, int F) {
    dots_row(dots, dy, Compressed<X>{codes, scale_inv, HALVES * F}, end, F);
}

// Raises only the amax. Each block processes every gridDim-th row.
extern "C" __global__ void __launch_bounds__(256) swiglu_amax(float* amax, const X* __restrict__ x, const int* end, int rows, int F) {
    const int eights = F % 8 == 0 && aligned(x) ? F / 8 : 0;
    float largest = 0.0f;
    if (end) rows = *end;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const X* from = x + (u64)row * HALVES * F;
#pragma unroll 4
        for (int g = threadIdx.x; g < eights; g += blockDim.x) {
            const Eight<X> gate = load8(from + 8 * g), up = ups8(from + 8 * g, F);
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = forward(load(gate.at[i]), up_of(up.at[i]));
            largest = fmaxf(largest, largest8(pack8<X>(v)));
        }
        for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x) {
            X y;
            store(&y, forward(load(from[c]), GATED ? load(from[F + c]) : 1.0f));
            largest = fmaxf(largest, fabsf(load(y)));
        }
    }
    block_raise(amax, largest);
}

template <class Saved> __device__ __forceinline__ void backward_amax(float* amax, const X* dy, const Saved& x, const int* end, int rows, int F) {
    const int eights = x.wide(F) && aligned(dy) ? F / 8 : 0;
    float largest = 0.0f;
    if (end) rows = *end;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        const X* d = dy + (u64)row * F;
#pragma unroll 2
        for (int g = threadIdx.x; g < eights; g += blockDim.x) {
            typename Saved::Raw raw[HALVES];
#pragma unroll
            for (int h = 0; h < HALVES; h++) raw[h] = x.fetch(row, h * F + 8 * g);
            const Eight<X> dy8 = load8(d + 8 * g), gate = x.values(raw[0]), up = x.values(raw[GATED]);
            float v[2][8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const Gradient g = backward(load(dy8.at[i]), load(gate.at[i]), up_of(up.at[i]));
                v[0][i] = g.gate;
                v[1][i] = g.up;
            }
            largest = fmaxf(largest, largest8(pack8<X>(v[0])));
            if (GATED) largest = fmaxf(largest, largest8(pack8<X>(v[1])));
        }
        for (int c = 8 * eights + threadIdx.x; c < F; c += blockDim.x) {
            const Gradient g = backward(load(d[c]), load(x.value(row, c)), GATED ? load(x.value(row, F + c)) : 1.0f);
            X dx[2];
            store(&dx[0], g.gate);
            store(&dx[1], GATED ? g.up : 0.0f);
            largest = fmaxf(largest, fmaxf(fabsf(load(dx[0])), fabsf(load(dx[1]))));
        }
    }
    block_raise(amax, largest);
}
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward_amax(float* amax, const X* __restrict__ dy, const X* __restrict__ x, const int* end, int rows, int F) {
    backward_amax(amax, dy, Exact<X>{x, HALVES * F}, end, rows, F);
}
extern "C" __global__ void __launch_bounds__(256)
    swiglu_backward_amax_compressed(float* amax, const X* __restrict__ dy, const e4m3* __restrict__ codes,
                                    const unsigned char* __restrict__ scale_inv, const int* end, int rows, int F) {
    backward_amax(amax, dy, Compressed<X>{codes, scale_inv, HALVES * F}, end, rows, F);
}
#else
__device__ __forceinline__ Eight<X> activated(const Eight<X>& gate, const Eight<X>& up) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = forward(load(gate.at[i]), up_of(up.at[i]));
    return pack8<X>(v);
}

struct Activations {
    const X* x;
    int F;
    bool wide;
    struct Raw { Eight<X> gate, up; };
    __device__ __forceinline__ Raw fetch(int row, int column) const {
        const X* from = x + (u64)row * HALVES * F + column;
        Raw raw;
        raw.gate = fetch8(from, F - column, wide);
        if (GATED) raw.up = fetch8(from + F, F - column, wide);
        return raw;
    }
    __device__ __forceinline__ Eight<X> values(const Raw& raw, int, int) const { return activated(raw.gate, raw.up); }
};

// A source of activations of a product `x` without scales. `of_rows` has the scales of its rows, and `of_columns` the scales of its columns.
struct ProductActivations : Activations {
    const float *of_rows, *of_columns;
    __device__ __forceinline__ Eight<X> values(const Raw& raw, int row, int column) const {
        const float of_row = of_rows[row];
        float gates[8], ups[8], v[8];
        unpack8(load8(of_columns + column), gates);
        if (GATED) unpack8(load8(of_columns + F + column), ups);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = forward(load(raw.gate.at[i]) * (of_row * gates[i]), GATED ? load(raw.up.at[i]) * (of_row * ups[i]) : 1.0f);
        return pack8<X>(v);
    }
};

// Casts one row. The grid has the blocks of all padded rows.
template <int EIGHTS, class Values> __device__ __forceinline__ void activated_row(const Values& of, const Destination& to) {
    if constexpr (SHARING != PerRow) return;
    start_row();
    if (skips_row(to)) return;
    const int row = cast_row_number();
    Eight<X> values[EIGHTS] = {};
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        const int column = row_column<EIGHTS>(k);
        if (row < to.rows && column < to.columns) values[k] = of.values(of.fetch(row, column), row, column);
    }
    cast_row(to, values);
}
extern "C" __global__ void __launch_bounds__(1024, 1) swiglu_few_rows(const X* x, const __grid_constant__ Destination to) {
    activated_row<1>(Activations{x, to.columns, true}, to);
}
extern "C" __global__ void __launch_bounds__(1024, 2) swiglu_rows(const X* x, const __grid_constant__ Destination to) {
    activated_row<ROW_EIGHTS>(Activations{x, to.columns, true}, to);
}
extern "C" __global__ void __launch_bounds__(1024, 1)
    swiglu_product_few_rows(const X* x, const float* of_rows, const float* of_columns, const __grid_constant__ Destination to) {
    activated_row<1>(ProductActivations{{x, to.columns, true}, of_rows, of_columns}, to);
}
// With two blocks of 1024 threads per multiprocessor, the compiler would spill scales.
extern "C" __global__ void __launch_bounds__(1024, 1)
    swiglu_product_rows(const X* x, const float* of_rows, const float* of_columns, const __grid_constant__ Destination to) {
    activated_row<ROW_EIGHTS>(ProductActivations{{x, to.columns, true}, of_rows, of_columns}, to);
}

// Grid (F / 128, T / 128), 256 threads.
extern "C" __global__ void __launch_bounds__(256, 4) swiglu_codes(const X* x, const __grid_constant__ Destination to) {
    quantize_tile<GATED ? 2 : 4>(to, Activations{x, to.columns, to.columns % 8 == 0 && aligned(x)});
}

// A source of activations that also writes its input compressed. Two neighbouring threads share a group of gate elements, and a group of up elements.
struct CompressedOnTheWay : Activations {
    e4m3* codes;
    unsigned char* scale_inv;
    __device__ __forceinline__ void keep(const Eight<X>& e, int row, int column) const {
        const u32 own = largest_bits8(e), pair = 3u << (threadIdx.x % 32 & 30);
        const u32 exponent = smallest_scale_inv(max(own, __shfl_xor_sync(pair, own, 1)));
        const u64 at = (u64)row * HALVES * F + column;
        store8(codes + at, compress8(e, exponent));
        if (column % 16 == 0) scale_inv[at / 16] = exponent;
    }
    __device__ __forceinline__ Eight<X> values(const Raw& raw, int row, int column) const {
        if (codes) {
            keep(raw.gate, row, column);
            if (GATED) keep(raw.up, row, F + column);
        }
        return Activations::values(raw, row, column);
    }
};

// Grid (F / 128, T / 128), 256 threads. F is a multiple of 16, and x is aligned.
extern "C" __global__ void __launch_bounds__(256, 4)
    swiglu_codes_compressing(const X* x, e4m3* codes, unsigned char* scale_inv, const __grid_constant__ Destination to) {
    quantize_tile<4>(to, CompressedOnTheWay{{x, to.columns, true}, SHARING == RowAmaxes ? nullptr : codes, scale_inv});
}

// Casts a tile of the gradient by the gate, a tile of the gradient by up (if there is one) and, with `ACTIVATED`, a tile of the activation in E4M3. F
// is a multiple of 16 and, with block scales, of the block length.
template <bool ACTIVATED, bool WHOLE, class Saved>
__device__ __forceinline__ void backward_tiles_of(const Destination& to, const Destination& activation, const X* dy, const Saved& x) {
    const int F = to.columns / HALVES, row0 = first_row(), column0 = blockIdx.x * TILE, column = column0 + eight_column();
    Seen seen, activation_seen;
    // Each half is a separate destination, so that tiles end at the border.
    Destination left = to;
    left.columns = F;
    const Destination right = to.right_of(F);
    const TileCast<FORMAT, SHARING, WHOLE> gates = {left, tiles_of_the_launch[0], seen, row0, column0};
    const TileCast<FORMAT, SHARING, WHOLE> ups = {right, tiles_of_the_launch[GATED], seen, row0, column0};
    // The granularity that forward uses for the activation.
    constexpr Sharing OF_ACTIVATION = SHARING == MixedBlocks ? Blocks1x128 : SHARING;
    const TileCast<e4m3, OF_ACTIVATION, WHOLE> activations = {activation, tiles_of_the_launch[HALVES], activation_seen, row0, column0};
    const float scale = given_scale(to), activation_scale = given_scale(activation);
    if (WHOLE) __builtin_assume(left.codes && left.transposed && right.codes && right.transposed);
    gates.begin();
    if (GATED) ups.begin();
    if (ACTIVATED) activations.begin();
    if (SHARING == PerRow) __syncthreads();
#pragma unroll 1
    for (int sweep = 0; sweep < 8; sweep += 2) {
        typename Saved::Raw gates_raw[2], ups_raw[2];
        Eight<X> d[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = row0 + tile_row(sweep + k);
            if (!WHOLE && (row >= to.rows || column >= F)) continue;
            gates_raw[k] = x.fetch(row, column);
            if (GATED) ups_raw[k] = x.fetch(row, column + F);
            d[k] = load8(dy + (u64)row * F + column);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const int row = tile_row(sweep + k);
            Eight<X> dgate = {}, dup = {}, y = {};
            if (WHOLE || (row0 + row < to.rows && column < F)) {
                const Eight<X> gate = x.values(gates_raw[k]), up = GATED ? x.values(ups_raw[k]) : gate;
                float v[2][8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const Gradient g = backward(load(d[k].at[i]), load(gate.at[i]), up_of(up.at[i]));
                    v[0][i] = g.gate;
                    v[1][i] = g.up;
                }
                dgate = pack8<X>(v[0]);
                dup = pack8<X>(v[1]);
                if (ACTIVATED) y = activated(gate, up);
            }
            gates.cast(row, eight_column(), dgate, scale);
            if (GATED) ups.cast(row, eight_column(), dup, scale);
            if (ACTIVATED) activations.cast(row, eight_column(), y, activation_scale);
        }
    }
    gates.template finish<WHOLE>();
    if (GATED) ups.template finish<WHOLE>();
    if (ACTIVATED) activations.template finish<false>();
    measure(to, seen, [&] {
        gates.flush();
        if (GATED) ups.flush();
        if (ACTIVATED) activations.flush();
    });
    if (ACTIVATED) {
        __syncthreads();
        measure(activation, activation_seen, [] {});
    }
}

// Whole tiles that write both `codes` and `transposed` use a variant without bounds checks and without checks for null pointers.
template <bool ACTIVATED, class Saved>
__device__ __forceinline__ void backward_tiles(const Destination& to, const Destination& activation, const X* dy, const Saved& x) {
    const bool first = blockIdx.x == 0 && blockIdx.y == 0;
    if (ACTIVATED) skips(activation, first_row(), first);
    if (skips(to, first_row(), first)) return;
    // Gradients never have scales of 128x128 blocks.
    const bool is_whole = SHARING != Blocks128x128 && first_row() + TILE <= to.rows && (blockIdx.x + 1) * TILE <= to.columns / HALVES;
    if (is_whole && to.codes && to.transposed) backward_tiles_of<ACTIVATED, true>(to, activation, dy, x);
    else backward_tiles_of<ACTIVATED, false>(to, activation, dy, x);
}

// Grid (F / 128, T / 128), 256 threads. A block has a tile for each half. The shared memory for tiles of values limits the blocks per multiprocessor.
extern "C" __global__ void __launch_bounds__(256, HOLDS ? 3 : 4)
    swiglu_backward_codes(const X* dy, const X* x, const __grid_constant__ Destination to) {
    backward_tiles<false>(to, to, dy, Exact<X>{x, to.columns});
}
extern "C" __global__ void __launch_bounds__(256, HOLDS ? 3 : 4)
    swiglu_backward_codes_compressed(const X* dy, const e4m3* codes, const unsigned char* scale_inv,
                                     const __grid_constant__ Destination to) {
    backward_tiles<false>(to, to, dy, Compressed<X>{codes, scale_inv, to.columns});
}

// As above, with one more tile.
struct WithActivation { Destination gradient, activation; };
extern "C" __global__ void __launch_bounds__(256, HOLDS ? 2 : 4 - GATED)
    swiglu_backward_and_activated_codes(const X* dy, const X* x, const __grid_constant__ WithActivation to) {
    backward_tiles<true>(to.gradient, to.activation, dy, Exact<X>{x, to.gradient.columns});
}
extern "C" __global__ void __launch_bounds__(256, HOLDS ? 2 : 4 - GATED)
    swiglu_backward_and_activated_codes_compressed(const X* dy, const e4m3* codes, const unsigned char* scale_inv,
                                                   const __grid_constant__ WithActivation to) {
    backward_tiles<true>(to.gradient, to.activation, dy, Compressed<X>{codes, scale_inv, to.gradient.columns});
}
#endif
