// Encodes and decodes values with an expanded range, as in expanded.rs. Needs `stored.cuh`. A group is 128 neighbours of a row: eight per thread, 16
// threads per group. The arithmetic is integer operations and one fused multiply-add per value, so a GPU gives the CPU's bits.

struct u8 { unsigned char bits; };
BYTES(u8)

// The smallest magnitude and the step of a group, as bits of F32.
struct Levels { int smallest, step; };

// 2^-120.
#define LEAST 0x03800000u
// 1.5 * 2^23. Adding it rounds to the nearest integer, which is in the low bits of the sum.
#define ROUND 12582912.0f

__device__ __forceinline__ Levels levels_of(u32 largest, u32 smallest) {
    smallest = max(smallest, LEAST);
    const u32 step = max((max(largest, smallest) - smallest + 125) / 126, 1u);
    const bool bad = largest > 0x7F7FFF00;
    return {bad ? 0x7FC00000 : (int)smallest, bad ? 0 : (int)step};
}

// The largest and the smallest magnitude of eight values, as bits. Magnitudes below LEAST do not count as the smallest: it is stored as
// ~(bits - LEAST), so these magnitudes wrap around, and both extremes are reduced by a maximum.
struct Extremes { u32 largest, smallest; };
__device__ __forceinline__ Extremes extremes8(const float* x) {
    u32 largest = 0, smallest = 0xFFFFFFFF;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 bits = __float_as_uint(x[i]) & 0x7FFFFFFF;
        largest = max(largest, bits);
        smallest = min(smallest, bits - LEAST);
    }
    return {largest, ~smallest};
}

// Returns the levels of two groups of 16 neighbouring threads, with the values `x` and `y`. Threads without values pass zeros. Called by all threads
// of a warp. Four of the 16 threads reduce each extreme, and eight of them each group.
__device__ __forceinline__ void levels_of_groups(const float* x, const float* y, Levels& of_x, Levels& of_y) {
    const u32 all = 0xFFFFFFFF;
    const bool second = threadIdx.x & 8, low = threadIdx.x & 4;
    const Extremes a = extremes8(x), b = extremes8(y);
    const u32 largest = max(second ? b.largest : a.largest, __shfl_xor_sync(all, second ? a.largest : b.largest, 8));
    const u32 smallest = max(second ? b.smallest : a.smallest, __shfl_xor_sync(all, second ? a.smallest : b.smallest, 8));
    u32 extreme = max(low ? smallest : largest, __shfl_xor_sync(all, low ? largest : smallest, 4));
    extreme = max(extreme, __shfl_xor_sync(all, extreme, 2));
    extreme = max(extreme, __shfl_xor_sync(all, extreme, 1));
    const auto of_threads = [&](int thread) {
        const u32 largest = __shfl_sync(all, extreme, thread, 16), smallest = __shfl_sync(all, extreme, thread + 4, 16);
        return levels_of(largest, ~smallest + LEAST);
    };
    of_x = of_threads(0);
    of_y = of_threads(8);
}

// Decodes eight codes. Values of second moments have no sign.
template <bool SIGNED, class T> __device__ __forceinline__ void expand8(const Eight<T>& codes, const Levels& levels, float* x) {
    const u32* const words = (const u32*)&codes;
    const int zero = levels.smallest - levels.step;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 word = words[i / 4], shift = i % 4 * 8, code = word >> shift & (SIGNED ? 0x7F : 0xFF);
        const u32 size = code == 0 ? 0 : (u32)((int)code * levels.step + zero);
        x[i] = __uint_as_float(SIGNED ? size | (word << (24 - shift) & 0x80000000) : size);
    }
}

// Encodes eight values.
template <bool SIGNED, class T> __device__ __forceinline__ Eight<T> codes8(const float* x, const Levels& levels) {
    const bool bad = levels.step == 0;
    const float inverse = bad ? 0.0f : reciprocal((float)levels.step);
    const u32 signs = SIGNED && !bad ? 0x80808080 : 0;
    Eight<T> all;
    u32* const words = (u32*)&all;
#pragma unroll
    for (int w = 0; w < 2; w++) {
        u32 codes[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 bits = __float_as_uint(x[4 * w + i]);
            const float above = (float)((int)(SIGNED ? bits & 0x7FFFFFFF : bits) - levels.smallest);
            codes[i] = __float_as_uint(fmaxf(__fmaf_rn(above, inverse, ROUND + 1.0f), ROUND));
        }
        words[w] = __byte_perm(__byte_perm(codes[0], codes[1], 0x0040), __byte_perm(codes[2], codes[3], 0x0040), 0x5410) & 0x7F7F7F7F;
        const u32* const bits = (const u32*)x + 4 * w;
        if (SIGNED) words[w] |= __byte_perm(__byte_perm(bits[0], bits[1], 0x0073), __byte_perm(bits[2], bits[3], 0x0073), 0x5410) & signs;
    }
    return all;
}
