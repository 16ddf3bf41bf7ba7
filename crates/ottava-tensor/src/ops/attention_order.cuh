// The order of sums of attention on tensor cores. A row of the result has the same bits in every kernel that keeps this order.
//
// Scores and weighted values are sums by mma.m16n8k16 in F32, or by wgmma, whose sums have the same bits. The 16 channels of a product of queries and keys
// are neighbours; with keys in codes, they are four runs of four channels, 16 channels apart. Scores are multiples of 2^-13 and are relative to a power of two, the base of a row (`Base`). So a sum
// relative to one base, times a power of two, has the bits of the sum relative to another base, and kernels may choose and raise bases at any time.
// Units of 16·TILES keys follow each other in a stream. Lane l of eight adds the powers of keys l and l + 8 of each 16 keys; then lanes l and l ^ 1, l ^ 2
// and l ^ 4 are added. A part of a context has STREAMS streams, and stream s has the units s, s + STREAMS, s + 2·STREAMS and so on of the part. The results
// of streams are added in order (`Join`), and so are the results of parts. Keys that a query does not see change no bit: their powers are 0, and an empty
// result changes nothing.
#define INFINITY __int_as_float(0x7F800000)
#define FULL 0xFFFFFFFF

// Returns 2^x. 2^-infinity is 0.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Returns the value to subtract from scores with the maximum `largest`: 0 if no key is seen.
__device__ __forceinline__ float base_of(float largest) { return largest == -INFINITY ? 0.0f : largest; }

// Scores are kept with this addend: 1.5 · 2^10. So their last bit is 2^-13, and differences of scores and integers are exact.
#define GRID 1536.0f

// Returns the smallest integer that is not less than a score with the addend GRID.
__device__ __forceinline__ float integer_above(float score) { return ceilf(score - GRID); }
// Returns the value to subtract from scores with the addend GRID, for powers relative to 2^base. The base is -infinity if no key is seen.
__device__ __forceinline__ float subtrahend(float base) { return base == -INFINITY ? GRID : base + GRID; }
// Returns 2^(from - to), the factor of a sum whose base rises.
__device__ __forceinline__ float rise(float from, float to) { return to == -INFINITY ? 0.0f : power(from - to); }

// Returns cap · tanh(x / cap), from an approximate power of two. The error is a few roundings of `cap`. tanh.approx would have only 11 bits.
__device__ __forceinline__ float capped(float x, float cap) {
    return fmaf(-2.0f * cap, __fdividef(1.0f, power(x * (2.885390082f / cap)) + 1.0f), cap);
}

// Returns scale · sum, capped if `cap` is not 0, with the addend GRID.
__device__ __forceinline__ float score_of(float sum, float scale, float cap) {
    return cap > 0.0f ? capped(sum * scale, cap) + GRID : fmaf(sum, scale, GRID);
}

#define MULTIPLY(TYPE)                                                                                                          \
    __device__ __forceinline__ u32 pair_of(TYPE, float low, float high) {                                                       \
        u32 pair;                                                                                                               \
        asm("cvt.rn." #TYPE "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));                                           \
        return pair;                                                                                                            \
    }                                                                                                                           \
    __device__ __forceinline__ void multiply(TYPE, float* sums, const u32* a, const u32* b) {                                   \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." #TYPE "." #TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "      \
            "{%0, %1, %2, %3};"                                                                                                 \
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                        \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                                \
    }
MULTIPLY(bf16)
MULTIPLY(f16)

// The factors of two results that are joined, and the base of the joined result.
struct Join {
    float base, kept, taken;
    __device__ __forceinline__ Join(float of, float other) : base(fmaxf(of, other)), kept(rise(of, base)), taken(rise(other, base)) {}
    __device__ __forceinline__ float operator()(float value, float other) const { return fmaf(other, taken, value * kept); }
};

// Returns the power of the logit of a sink, relative to scores with the maximum `largest`. If it overflows, the sink has all of the probability.
__device__ __forceinline__ float sink_power(X sink, float largest) { return power(load(sink) * 1.44269504f - base_of(largest)); }

// Where the log-sum-exps of rows are stored: nowhere if `values` is null, and as [tokens, heads], or as [sequences, heads, length] if `length` is not 0.
struct Lse {
    float* values;
    int length;
    // Stores the natural logarithm of `sum`, a sum of powers relative to 2^base.
    __device__ __forceinline__ void store(int token, int head, int heads, float base, float sum) const {
        const u64 at = length ? ((u64)(token / length) * heads + head) * length + token % length : (u64)token * heads + head;
        values[at] = 0.693147181f * base + logf(sum);
    }
};
