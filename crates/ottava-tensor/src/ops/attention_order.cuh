// The order of sums of attention on tensor cores. A row of the result has the same bits in every kernel that keeps this order.
//
// Scores and weighted values are sums by mma.m16n8k16 in F32. The 16 channels of a product of queries and keys are four runs of four channels, 8 channels
// apart (`piece_of`). Units of 16·TILES keys follow each other in a stream. Before the weighted values of a unit are added, the earlier sums are scaled to
// the largest score so far. Lane l of eight adds the powers of keys l and l + 8 of each 16 keys; then lanes l and l ^ 1, l ^ 2 and l ^ 4 are added.
// A part of a context has STREAMS streams, and stream s has the units s, s + STREAMS, s + 2·STREAMS and so on of the part. The results of streams are
// joined in order (`join`), and so are the results of parts. Keys that a query does not see change no bit: their powers are 0, and joining an empty result
// changes nothing.
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

// Returns cap · tanh(x / cap), from an approximate power of two. The error is a few roundings of `cap`. tanh.approx would have only 11 bits.
__device__ __forceinline__ float capped(float x, float cap) {
    return fmaf(-2.0f * cap, __fdividef(1.0f, power(x * (2.885390082f / cap)) + 1.0f), cap);
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

// The factors of two results that are joined, and the largest score of both.
struct Join {
    float most, kept, taken;
    __device__ __forceinline__ Join(float largest, float other) : most(fmaxf(largest, other)) {
        kept = power(largest - base_of(most)), taken = power(other - base_of(most));
    }
    __device__ __forceinline__ float operator()(float value, float other) const { return fmaf(other, taken, value * kept); }
};
