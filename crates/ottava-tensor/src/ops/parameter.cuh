// Reads and writes a parameter in an update: storage formats, stochastic rounding and stores. Needs `stored.cuh`.
enum WeightStorage { Master, ScaledMaster, Split, Chance };
enum MomentStorage { Float32, Bfloat16, ScaledMoments, Expanded };

template <int kind> struct WeightType { typedef bf16 T; };
template <> struct WeightType<Master> { typedef f32 T; };
template <> struct WeightType<ScaledMaster> { typedef f16 T; };

// Random bits for stochastic rounding of eight elements to BF16: adds 16 random bits and truncates. The first element is a multiple of four.
//
// One 64-bit hash serves four neighbouring elements, because one hash per element would cost more than the memory traffic. Weights and the two
// moments (`KIND`) use different bits of the hash. `turned` has the bits of `words` with the halves of each word exchanged, because the addition uses
// the upper half of a word.
struct Chances {
    u32 words[4], turned[4];

    __device__ __forceinline__ static Chances of(u64 seed, u64 at) {
        Chances chances;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u64 four = hash(seed ^ (at / 4 + i));
            chances.words[2 * i] = (u32)four;
            chances.words[2 * i + 1] = (u32)(four >> 32);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) chances.turned[i] = __byte_perm(chances.words[i], 0, 0x1032);
        return chances;
    }
    // Rounds eight finite values.
    template <u32 KIND> __device__ __forceinline__ Eight<bf16> round8(const float* x) const {
        u32 bits[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const u32 lane = (i + KIND) % 4, word = i / 4 * 2 + lane / 2;
            bits[i] = __float_as_uint(x[i]) + ((lane % 2 ? words[word] : turned[word]) >> 16);
        }
        Eight<bf16> e;
        e.words[0] = make_uint4(__byte_perm(bits[0], bits[1], 0x7632), __byte_perm(bits[2], bits[3], 0x7632),
                                __byte_perm(bits[4], bits[5], 0x7632), __byte_perm(bits[6], bits[7], 0x7632));
        return e;
    }
};
// Rounds eight values, which may be infinite or NaN and start at any position.
__device__ __forceinline__ Eight<bf16> round_stochastically(const float* x, u64 seed, u64 at, u32 kind) {
    Eight<bf16> e;
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        const u32 random = (u32)(hash(seed ^ (at + i) / 4) >> (16 * ((at + i + kind) % 4)) & 0xFFFF);
        store(e.at + i, finite(x[i]) ? __uint_as_float(__float_as_uint(x[i]) + random & 0xFFFF0000) : x[i]);
    }
    return e;
}
// Converts eight values of a parameter, beginning with element `at`, to their storage type. Stochastic rounding is for BF16.
template <bool BY_CHANCE, u32 KIND, class T> __device__ __forceinline__ Eight<T> stored8(const float* x, u64 seed, u64 at) {
    if constexpr (BY_CHANCE) {
        float nothing = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) nothing = __fmaf_rn(x[i], 0.0f, nothing);
        if (nothing == 0.0f && at % 4 == 0) return Chances::of(seed, at).round8<KIND>(x);
        return round_stochastically(x, seed, at, KIND);
    } else {
        return pack8<T>(x);
    }
}

// The position of eight elements of a parameter. The first `valid` elements exist. `wide` means that all eight exist and are aligned. `group` is the
// group of expanded moments.
struct Place {
    u64 at, group;
    int valid;
    bool wide;
};

__device__ __forceinline__ void scale8(float* x, float scale) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale;
}

// Stores like `put8`, but with explicit vector stores, because the compiler would split them.
template <class T> __device__ __forceinline__ void write8(T* p, const Eight<T>& e, const Place& place) {
    if (!place.wide) return put8(p, e, place.valid, false);
    const u32* words = (const u32*)&e;
    if (sizeof(T) == 1) asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(words[0]), "r"(words[1]) : "memory");
#pragma unroll
    for (int w = 0; w + 4 <= sizeof(e) / 4; w += 4)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"((u32*)p + w), "r"(words[w]), "r"(words[w + 1]), "r"(words[w + 2]), "r"(words[w + 3]) : "memory");
}

// Decodes stored weights. `scale` is the scale of scaled weights, and `rest` has the remainders of split weights.
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
