// A parameter as updates read and write it: storage formats, stochastic rounding and stores. Needs `stored.cuh`.
enum WeightStorage { Master, ScaledMaster, Split, Chance };
enum MomentStorage { Float32, Bfloat16, ScaledMoments, Expanded };

template <int kind> struct WeightType { typedef bf16 T; };
template <> struct WeightType<Master> { typedef f32 T; };
template <> struct WeightType<ScaledMaster> { typedef f16 T; };

// Stochastic rounding: adds 16 random bits and truncates. One 64-bit hash serves four neighbouring elements, since one hash per element
// would cost more than the memory traffic. `kind` selects different bits for weights and both moments.
__device__ __forceinline__ float by_chance(float x, u64 four, u32 lane) {
    return finite(x) ? __uint_as_float(__float_as_uint(x) + (u32)(four >> (16 * (lane % 4)) & 0xFFFF) & 0xFFFF0000) : x;
}
__device__ __forceinline__ void round_stochastically(float* x, u64 seed, u64 at, u32 kind) {
    if (at % 4 == 0) {
        const u64 four[2] = {hash(seed ^ (at / 4)), hash(seed ^ (at / 4 + 1))};
#pragma unroll
        for (u32 i = 0; i < 8; i++) x[i] = by_chance(x[i], four[i / 4], i + kind);
    } else {
        // The row does not start at a multiple of four.
#pragma unroll
        for (u32 i = 0; i < 8; i++) x[i] = by_chance(x[i], hash(seed ^ (at + i) / 4), at + i + kind);
    }
}

// Position of eight elements of a parameter: `valid` of them exist; `wide` if all do and are aligned. `group` is that of expanded moments.
struct Place {
    u64 at, group;
    int valid;
    bool wide;
};

__device__ __forceinline__ void scale8(float* x, float scale) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale;
}

// As `put8`, with explicit vector stores, which the compiler splits otherwise.
template <class T> __device__ __forceinline__ void write8(T* p, const Eight<T>& e, const Place& place) {
    if (!place.wide) return put8(p, e, place.valid, false);
    const u32* words = (const u32*)&e;
    if (sizeof(T) == 1) asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(words[0]), "r"(words[1]) : "memory");
#pragma unroll
    for (int w = 0; w + 4 <= sizeof(e) / 4; w += 4)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"((u32*)p + w), "r"(words[w]), "r"(words[w + 1]), "r"(words[w + 2]), "r"(words[w + 3]) : "memory");
}

// Decodes stored weights: `scale` is that of scaled ones, `rest` the remainders of split ones.
template <int kind> __device__ __forceinline__ void decode_weights(const Eight<typename WeightType<kind>::T>& raw, const Eight<bf16>& rest, float scale, float* w) {
    unpack8(raw, w);
    if (kind == ScaledMaster) scale8(w, scale);
    if (kind == Split) {
        const u32 pairs[4] = {rest.words[0].x, rest.words[0].y, rest.words[0].z, rest.words[0].w};
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = __uint_as_float(__float_as_uint(w[i]) + (int)(short)(pairs[i / 2] >> (i % 2 * 16)));
    }
}
// Rounds split weights to the BF16 values that layers read, and stores the remainders.
__device__ __forceinline__ void split8(float* w, bf16* to, const Place& place) {
    u32 rest[4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u32 bits = __float_as_uint(w[i]);
        rest[i / 2] |= (bits & 0xFFFF) << (i % 2 * 16);
        w[i] = __uint_as_float((bits + 0x8000) & 0xFFFF0000);
    }
    Eight<bf16> rests;
    rests.words[0] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
    write8(to, rests, place);
}
