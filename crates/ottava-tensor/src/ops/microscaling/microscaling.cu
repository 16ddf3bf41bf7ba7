// The casts of microscaling/cpu.rs. A thread casts the block of one row. Sixteen neighbouring lanes cast the blocks of sixteen neighbouring rows, which
// share a scale if `squares` is set. Grid (padded rows · blocks of the padded row / 256), 256 threads.

struct Block {
    u64 row, block;
    bool is_inside;
};
__device__ __forceinline__ Block block_of_thread(u64 padded_rows, u64 blocks) {
    const u64 i = grid_start();
    return {i / (16 * blocks) * 16 + i % 16, i / 16 % blocks, i < padded_rows * blocks};
}

// Reads the values of a block. Values beyond the matrix are zero. Returns the number of values of the matrix.
template <int LENGTH> __device__ __forceinline__ int fetch_block(float* v, const X* x, const Block& at, u64 rows, u64 columns) {
    const u64 column = at.block * LENGTH;
    const bool is_there = at.is_inside && at.row < rows && column < columns;
    const int valid = !is_there ? 0 : columns - column < LENGTH ? columns - column : LENGTH;
#pragma unroll
    for (int i = 0; i < LENGTH; i++) v[i] = i < valid ? load(x[at.row * columns + column + i]) : 0.0f;
    return valid;
}

template <int LENGTH> __device__ __forceinline__ float largest_of(const float* v) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < LENGTH; i++) largest = fmaxf(largest, fabsf(v[i]));
    return largest;
}

// Writes the codes of scaled values, four at a time.
template <class C, int LENGTH> __device__ __forceinline__ void put_codes(C* codes, const float* v, u64 at) {
    u32* words = (u32*)(codes + at);
#pragma unroll
    for (int i = 0; i < LENGTH / 4; i++)
        words[i] = encode<C>(v[4 * i], v[4 * i + 1]) | encode<C>(v[4 * i + 2], v[4 * i + 3]) << 16;
}

// Adds the counts of all threads of a block. `amax` is null if the statistics are not read.
__device__ __forceinline__ void count(float* amax, i64* saturated, i64* underflowed, i64* elements, float largest, u32 beyond, u32 lost, u64 all) {
    if (!amax) return;
    block_raise(amax, largest);
    beyond = __reduce_add_sync(0xFFFFFFFF, beyond);
    lost = __reduce_add_sync(0xFFFFFFFF, lost);
    if (threadIdx.x % 32) return;
    if (beyond) atomicAdd((u64*)saturated, (u64)beyond);
    if (lost) atomicAdd((u64*)underflowed, (u64)lost);
    if (blockIdx.x == 0 && threadIdx.x == 0) atomicAdd((u64*)elements, all);
}

// Returns the exponent of the smallest power of two that is at least `x`, as `E8M0::rounded_up` of fp8.rs.
__device__ __forceinline__ u32 rounded_up(float x) {
    const u32 bits = __float_as_uint(x), exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
    if (bits == 0x7F800000) return 254;
    const bool is_covered = mantissa == 0 || exponent == 254 || (exponent == 0 && mantissa <= 0x400000);
    return exponent + !is_covered;
}
// Returns 2^(exponent - 127).
__device__ __forceinline__ float power(u32 exponent) { return __uint_as_float(exponent == 0 ? 0x400000 : exponent << 23); }

// One E8M0 scale per 32 values.
extern "C" __global__ void __launch_bounds__(256)
quantize_mx(CODE* codes, float* scales, const X* x, u64 rows, u64 columns, u64 padded_rows, u64 pitch, float* amax, i64* saturated,
            i64* underflowed, i64* elements) {
    const u64 blocks = pitch / 32;
    const Block at = block_of_thread(padded_rows, blocks);
    float v[32];
    const int valid = fetch_block<32>(v, x, at, rows, columns);
    const float largest = largest_of<32>(v);
    const u32 exponent = rounded_up(largest * (1.0f / max_finite<CODE>()));
    const float scale = power(254 - exponent);
    u32 beyond = 0, lost = 0;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const float scaled = v[i] * scale;
        beyond += i < valid && fabsf(scaled) > max_finite<CODE>();
        const bool is_zero = (encode<CODE>(scaled, 0.0f) & 0x7F) == 0;
        lost += i < valid && is_zero && v[i] != 0.0f;
        v[i] = scaled;
    }
    if (at.is_inside) {
        put_codes<CODE, 32>(codes, v, at.row * pitch + at.block * 32);
        scales[at.block * padded_rows + at.row] = power(exponent);
    }
    count(amax, saturated, underflowed, elements, largest, beyond, lost, rows * columns);
}

// Returns the bits of a value. All NaNs have the same bits, because conversions to F32 differ in the bits of NaNs.
__device__ __forceinline__ u64 bits_of(float x) { return x != x ? 0x7FC00000 : __float_as_uint(x); }

// Rounds a magnitude of at most 6 to a value of E2M1: to nearest even, or stochastically by a random number, as in fp4.rs.
__device__ __forceinline__ float on_grid(float x, bool stochastic, u32 random) {
    if (x != x) return x;
    const float magnitude = fminf(fabsf(x), 6.0f);
    const float step = magnitude < 2.0f ? 0.5f : magnitude < 4.0f ? 1.0f : 2.0f;
    const float steps = magnitude / step, below = floorf(steps);
    const float chosen = stochastic ? below + ((float)(random >> 8) * (1.0f / 16777216.0f) < steps - below ? 1.0f : 0.0f) : rintf(steps);
    return x < 0.0f ? -(chosen * step) : chosen * step;
}

// One E4M3 scale per 16 values of a row or per 16x16 values, and one scale of the tensor, from its amax `tensor_amax`. Codes are E4M3. With
// `scales_rows`, each row has its own scale instead, for few rows: each thread reads its whole row.
extern "C" __global__ void __launch_bounds__(256)
quantize_nvfp4(e4m3* codes, float* scales, const X* x, const float* tensor_amax, u64 rows, u64 columns, u64 padded_rows, u64 pitch, int squares,
               int stochastic, int scales_rows, float* amax, i64* saturated, i64* underflowed, i64* elements) {
    const u64 blocks = pitch / 16;
    const Block at = block_of_thread(padded_rows, blocks);
    float v[16];
    const int valid = fetch_block<16>(v, x, at, rows, columns);
    const float own = largest_of<16>(v);
    float largest = own;
    if (squares)
        for (int lanes = 8; lanes > 0; lanes /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, lanes));
    float most = 0.0f;
    if (!scales_rows) most = *tensor_amax;
    else if (at.is_inside && at.row < rows)
        for (u64 c = 0; c < columns; c++) most = fmaxf(most, fabsf(load(x[at.row * columns + c])));
    float scale = fminf(max_finite<e4m3>() * 6.0f / most, 3.402823466e38f);
    if (most == 0.0f || scale == 0.0f) scale = 1.0f;
    const float of_tensor = 1.0f / scale;
    const u32 code = encode<e4m3>(fminf(largest * (scale * (1.0f / 6.0f)), 3.402823466e38f), 0.0f);
    const float decode = load(f16{(unsigned short)halves<e4m3>(code)});
    const float factor = fminf(1.0f / (decode * of_tensor), 3.402823466e38f);
    u64 key = 0;
    if (stochastic)
        for (int i = 0; i < valid; i++) key = hash(key ^ bits_of(v[i]));
    u32 beyond = 0, lost = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float scaled = v[i] * factor;
        const float value = on_grid(scaled, stochastic, stochastic ? (u32)(hash(key ^ (u64)i) >> 32) : 0);
        beyond += i < valid && fabsf(scaled) > 7.0f;
        lost += i < valid && value == 0.0f && v[i] != 0.0f;
        v[i] = value;
    }
    if (at.is_inside) {
        put_codes<e4m3, 16>(codes, v, at.row * pitch + at.block * 16);
        scales[at.block * padded_rows + at.row] = decode;
        if (at.block == 0) scales[(columns + 15) / 16 * padded_rows + at.row] = of_tensor;
    }
    count(amax, saturated, underflowed, elements, own, beyond, lost, rows * columns);
}

// Transforms 16 neighbours of a row as in cpu.rs. A thread transforms 16 values, or copies the fewer values at the end of a row. Bit i of `signs` is
// the sign of value i.
extern "C" __global__ void __launch_bounds__(256) hadamard(X* y, const X* x, u64 rows, u64 columns, u32 signs, int inverse) {
    const u64 per_row = (columns + 15) / 16, i = grid_start();
    if (i >= rows * per_row) return;
    const u64 first = i / per_row * columns + i % per_row * 16, left = columns - i % per_row * 16;
    if (left < 16) {
        for (u64 c = 0; c < left; c++) y[first + c] = x[first + c];
        return;
    }
    float v[16];
#pragma unroll
    for (int c = 0; c < 16; c++) {
        const float value = load(x[first + c]);
        v[c] = !inverse && signs >> c & 1 ? -value : value;
    }
#pragma unroll
    for (int j = 0; j < 16; j++) {
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < 16; c++) sum += __popc(c & j) % 2 ? -v[c] : v[c];
        sum *= 0.25f;
        store(&y[first + j], inverse && signs >> j & 1 ? -sum : sum);
    }
}
