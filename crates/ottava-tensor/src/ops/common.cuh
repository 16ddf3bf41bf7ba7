// Included before every kernel. Arithmetic is F32; each value is rounded once, in `store`, as on the CPU.
// If a kernel uses `X`, it is the storage type, which is chosen when compiling.

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct e4m3 { unsigned char bits; };
struct e5m2 { unsigned char bits; };
typedef float f32;

// The largest finite value of a type, from macros with the values of `DType::max_finite`.
template <class T> __device__ constexpr float max_finite();
template <> __device__ constexpr float max_finite<f16>() { return MAX_F16; }
template <> __device__ constexpr float max_finite<e4m3>() { return MAX_E4M3; }
template <> __device__ constexpr float max_finite<e5m2>() { return MAX_E5M2; }

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;

__device__ __forceinline__ float load(f32 x) { return x; }
__device__ __forceinline__ float load(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float load(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

__device__ __forceinline__ void store(f32* p, float x) { *p = x; }
__device__ __forceinline__ void store(bf16* p, float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p->bits) : "f"(x)); }
__device__ __forceinline__ void store(f16* p, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p->bits) : "f"(x)); }

// Adds over the lanes of a warp; each lane gets the sum.
__device__ __forceinline__ float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xFFFFFFFF, x, offset);
    return x;
}

struct Add { template <class T> __device__ T operator()(T a, T b) const { return a + b; } };
// Returns the maximum as on the CPU: ignores NaN unless both arguments are NaN.
struct Max { __device__ float operator()(float a, float b) const { return fmaxf(a, b); } };

// Reduces one value per thread over a block of whole warps, in a fixed order. All threads get the result.
template <class T, class Op> __device__ __forceinline__ T block_reduce(T x, Op op) {
    __shared__ T warps[32];
    for (int offset = 16; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(0xFFFFFFFF, x, offset));
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = warps[0];
    for (int w = 1; w < blockDim.x / 32; w++) x = op(x, warps[w]);
    return x;
}
template <class T> __device__ __forceinline__ T block_sum(T x) { return block_reduce(x, Add()); }
__device__ __forceinline__ float block_max(float x) { return block_reduce(x, Max()); }

// Returns the maximum over a block of whole warps of one non-negative value per thread.
__device__ __forceinline__ float block_amax(float x) {
    __shared__ u32 warps[32];
    const u32 lane = threadIdx.x % 32, bits = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(x));
    if (lane == 0) warps[threadIdx.x / 32] = bits;
    __syncthreads();
    return __uint_as_float(__reduce_max_sync(0xFFFFFFFF, lane < blockDim.x / 32 ? warps[lane] : 0));
}

// Raises *amax; called by one thread. Non-negative floats have the same order as their bits, so the result does not depend on the order of blocks.
// Reading first avoids most atomics.
__device__ __forceinline__ void raise(float* amax, float largest) {
    if (largest > *(volatile float*)amax) atomicMax((u32*)amax, __float_as_uint(largest));
}
// Raises *amax; called by all threads of a block with one value each. No-op if `amax` is null.
__device__ __forceinline__ void block_raise(float* amax, float largest) {
    if (!amax) return;
    __shared__ u32 warps[32];
    const u32 bits = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(largest));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = bits;
    __syncthreads();
    if (threadIdx.x > 0) return;
    u32 all = warps[0];
    for (int w = 1; w < blockDim.x / 32; w++) all = max(all, warps[w]);
    raise(amax, __uint_as_float(all));
}

// Adds one to a counter; called by one thread after a barrier. If a thread sees the result and then passes a barrier with its block, its block sees
// the writes of the blocks that have arrived, and vice versa. This is cheaper than `__threadfence`, a sequentially consistent fence of each thread.
__device__ __forceinline__ u32 count_arrival(u32* counter) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// For a kernel that may start before earlier kernels have ended (`launch_early`): `wait_for_predecessors` waits for their end, and `start_successors`
// lets the next kernel start. Both do nothing without early starts.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void start_successors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Barriers in shared memory, for GPUs with bulk copies or clusters.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes barriers visible to the cluster and the copy engine, after `barrier_init`.
__device__ __forceinline__ void barriers_are_initialized() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra AGAIN;\n}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// The size of the cluster, and the rank of the block in it. Blocks of a cluster are neighbours along x. Without clusters, the size is 1.
__device__ __forceinline__ u32 blocks_of_cluster() {
    u32 blocks = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
    return blocks;
}
__device__ __forceinline__ u32 block_of_cluster() {
    u32 rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Returns the address in the shared memory of block `block` of the cluster that corresponds to `p` in this block.
__device__ __forceinline__ u32 address_in(u32 block, const void* p) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared_address(p)), "r"(block));
    return remote;
}
// Writes a word to the shared memory of block `block` of the cluster. Its four bytes arrive at the barrier of that block. `to` and `barrier` are
// addresses in this block.
__device__ __forceinline__ void send_word(u32* to, u32 word, u64* barrier, u32 block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in(block, to)), "r"(word),
                 "r"(address_in(block, barrier)) : "memory");
}

// Selects the smaller or larger magnitude in each of two pairs. The sign is undefined. This is one instruction from compute capability 8.6 on.
#if __CUDA_ARCH__ >= 860
#define BY_MAGNITUDE(WHICH, TYPE, C, A, B) asm(WHICH ".xorsign.abs." TYPE " %0, %1, %2;" : "=r"(C) : "r"(A), "r"(B))
#else
#define BY_MAGNITUDE(WHICH, TYPE, C, A, B)                                                                             \
    asm("{\n.reg .b32 a, b;\nabs." TYPE " a, %1;\nabs." TYPE " b, %2;\n" WHICH "." TYPE " %0, a, b;\n}"           \
        : "=r"(C) : "r"(A), "r"(B))
#endif

// Returns whether a row comes after the last group of rows, which ends at `*end`. Without groups, `end` is null. Call it after
// `wait_for_predecessors`: before, `*end` may be stale.
__device__ __forceinline__ bool is_unused(const int* end, int row) { return end && row >= *end; }

// The start and the step of a grid-stride loop.
__device__ __forceinline__ u64 grid_start() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ __forceinline__ u64 grid_step() { return (u64)gridDim.x * blockDim.x; }

// Eight neighbouring elements, accessed as 16-byte vectors at addresses aligned to 16 bytes.
template <class T> union Eight {
    uint4 words[sizeof(T) / 2];
    T at[8];
};
template <class T> __device__ __forceinline__ Eight<T> load8(const T* p) {
    Eight<T> e;
#pragma unroll
    for (int w = 0; w < sizeof(T) / 2; w++) e.words[w] = ((const uint4*)p)[w];
    return e;
}
template <class T> __device__ __forceinline__ void store8(T* p, const Eight<T>& e) {
#pragma unroll
    for (int w = 0; w < sizeof(T) / 2; w++) ((uint4*)p)[w] = e.words[w];
}

template <class T> __device__ __forceinline__ void unpack8(const Eight<T>& e, float* v) {
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = load(e.at[i]);
}
// Unpacks pairs with one instruction per value.
template <> __device__ __forceinline__ void unpack8<bf16>(const Eight<bf16>& e, float* v) {
    const u32 pairs[4] = {e.words[0].x, e.words[0].y, e.words[0].z, e.words[0].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[2 * i] = __uint_as_float(pairs[i] << 16);
        v[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000);
    }
}
// Rounds eight values once each, like `store`. 16-bit types are rounded in pairs.
template <class T> __device__ __forceinline__ Eight<T> pack8(const float* v);
template <> __device__ __forceinline__ Eight<f32> pack8<f32>(const float* v) {
    Eight<f32> e;
#pragma unroll
    for (int i = 0; i < 8; i++) e.at[i] = v[i];
    return e;
}
#define PACK(TYPE)                                                                                                     \
    template <> __device__ __forceinline__ Eight<TYPE> pack8<TYPE>(const float* v) {                                   \
        u32 pairs[4];                                                                                                  \
        for (int i = 0; i < 4; i++)                                                                                    \
            asm("cvt.rn." #TYPE "x2.f32 %0, %1, %2;" : "=r"(pairs[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));             \
        Eight<TYPE> e;                                                                                                 \
        e.words[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);                                               \
        return e;                                                                                                      \
    }
PACK(bf16)
PACK(f16)

// FP8 conversions by integer arithmetic, for GPUs below compute capability 8.9. The results equal the results of the instructions.

// Encodes to nearest even, saturating, NaN to 0x7F. Below the smallest normal number, 2^(1 - BIAS), codes are multiples of a power of two. Adding a
// float whose last place has this value rounds to such a multiple.
template <int MANTISSA, int BIAS> __device__ __forceinline__ u32 code_of(float x, u32 largest) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000) return 0x7F;
    if (magnitude < 128 - BIAS << 23) {
        const u32 multiples = 151 - BIAS - MANTISSA << 23;
        return sign | __float_as_uint(__fadd_rn(__uint_as_float(magnitude), __uint_as_float(multiples))) - multiples;
    }
    const int shift = 23 - MANTISSA;
    const u32 rounded = magnitude + (1 << shift - 1) - 1 + (magnitude >> shift & 1);
    return sign | min((rounded >> shift) - (127 - BIAS << MANTISSA), largest);
}
template <class T> __device__ __forceinline__ u32 encode_by_integers(float a, float b);
template <> __device__ __forceinline__ u32 encode_by_integers<e4m3>(float a, float b) {
    return code_of<3, 7>(a, 0x7E) | code_of<3, 7>(b, 0x7E) << 8;
}
template <> __device__ __forceinline__ u32 encode_by_integers<e5m2>(float a, float b) {
    return code_of<2, 15>(a, 0x7B) | code_of<2, 15>(b, 0x7B) << 8;
}
// Decodes two codes to halves. A half has the exponents of E5M2. For E4M3, the exponent in a half is larger by 8.
template <class T> __device__ __forceinline__ u32 halves_by_integers(u32 pair);
template <> __device__ __forceinline__ u32 halves_by_integers<e5m2>(u32 pair) {
    const u32 bits = __byte_perm(pair, 0, 0x1404);
    return bits | ((bits & 0x7F00) > 0x7C00 ? 0x7FFF : 0) | ((bits >> 16 & 0x7F00) > 0x7C00 ? 0x7FFFu << 16 : 0);
}
template <> __device__ __forceinline__ u32 halves_by_integers<e4m3>(u32 pair) {
    const u32 bits = __byte_perm(pair, 0, 0x1404), small = bits & 0x80008000 | (bits & 0x7F007F00) >> 1;
    u32 halves;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(small), "r"(0x5C005C00));
    return halves | ((bits & 0x7F00) == 0x7F00 ? 0x7FFF : 0) | ((bits >> 16 & 0x7F00) == 0x7F00 ? 0x7FFFu << 16 : 0);
}

// `encode` returns two FP8 codes, `a` in the low byte: to nearest even, saturating, NaN to 0x7F. `halves` decodes two codes to halves exactly.
template <class T> __device__ __forceinline__ u32 encode(float a, float b);
template <class T> __device__ __forceinline__ u32 halves(u32 pair);
#if __CUDA_ARCH__ >= 890
#define CONVERSIONS(TYPE)                                                                                              \
    template <> __device__ __forceinline__ u32 encode<TYPE>(float a, float b) {                                        \
        unsigned short pair;                                                                                           \
        asm("cvt.rn.satfinite." #TYPE "x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));                             \
        return pair;                                                                                                   \
    }                                                                                                                  \
    template <> __device__ __forceinline__ u32 halves<TYPE>(u32 pair) {                                                \
        u32 halves;                                                                                                    \
        asm("cvt.rn.f16x2." #TYPE "x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)pair));                            \
        return halves;                                                                                                 \
    }
#else
#define CONVERSIONS(TYPE)                                                                                              \
    template <> __device__ __forceinline__ u32 encode<TYPE>(float a, float b) { return encode_by_integers<TYPE>(a, b); } \
    template <> __device__ __forceinline__ u32 halves<TYPE>(u32 pair) { return halves_by_integers<TYPE>(pair); }
#endif
CONVERSIONS(e4m3)
CONVERSIONS(e5m2)
template <class T> __device__ __forceinline__ uint2 encode8(const float* a) {
    return make_uint2(encode<T>(a[0], a[1]) | encode<T>(a[2], a[3]) << 16,
                      encode<T>(a[4], a[5]) | encode<T>(a[6], a[7]) << 16);
}

// Eight one-byte elements are two words.
#define BYTES(TYPE)                                                                                                    \
    template <> union Eight<TYPE> {                                                                                    \
        uint2 words;                                                                                                   \
        TYPE at[8];                                                                                                    \
    };                                                                                                                 \
    template <> __device__ __forceinline__ Eight<TYPE> load8<TYPE>(const TYPE* p) { return {*(const uint2*)p}; }       \
    template <> __device__ __forceinline__ void store8<TYPE>(TYPE* p, const Eight<TYPE>& e) { *(uint2*)p = e.words; }
#define CODES(TYPE)                                                                                                    \
    BYTES(TYPE)                                                                                                        \
    template <> __device__ __forceinline__ Eight<TYPE> pack8<TYPE>(const float* v) { return {encode8<TYPE>(v)}; }      \
    template <> __device__ __forceinline__ void unpack8<TYPE>(const Eight<TYPE>& e, float* v) {                        \
        const u32 words[2] = {e.words.x, e.words.y};                                                                   \
        for (int i = 0; i < 4; i++) {                                                                                  \
            const u32 pair = halves<TYPE>(words[i / 2] >> (i % 2 * 16));                                               \
            v[2 * i] = load(f16{(unsigned short)pair});                                                                \
            v[2 * i + 1] = load(f16{(unsigned short)(pair >> 16)});                                                    \
        }                                                                                                              \
    }
CODES(e4m3)
CODES(e5m2)

// Loads the first `valid` of eight elements; the rest are zero.
template <class T> __device__ __forceinline__ Eight<T> fetch8(const T* p, int valid, bool wide) {
    if (wide) return load8(p);
    Eight<T> e = {};
#pragma unroll
    for (int i = 0; i < 8; i++) if (i < valid) e.at[i] = p[i];
    return e;
}
// Stores the first `valid` of eight elements.
template <class T> __device__ __forceinline__ void put8(T* p, const Eight<T>& e, int valid, bool wide) {
    if (wide) return store8(p, e);
#pragma unroll
    for (int i = 0; i < 8; i++) if (i < valid) p[i] = e.at[i];
}

// Returns the largest absolute value of eight elements.
template <class T> __device__ __forceinline__ float largest8(const Eight<T>& e) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(load(e.at[i])));
    return largest;
}
// Returns the smallest absolute value of eight elements.
template <class T> __device__ __forceinline__ float smallest8(const Eight<T>& e) {
    float smallest = fabsf(load(e.at[0]));
#pragma unroll
    for (int i = 1; i < 8; i++) smallest = fminf(smallest, fabsf(load(e.at[i])));
    return smallest;
}
__device__ __forceinline__ u32 smaller_pair(u32 a, u32 b) {
    u32 c;
    BY_MAGNITUDE("min", "bf16x2", c, a, b);
    return c;
}
template <> __device__ __forceinline__ float smallest8<bf16>(const Eight<bf16>& e) {
    const u32 pair = smaller_pair(smaller_pair(e.words[0].x, e.words[0].y), smaller_pair(e.words[0].z, e.words[0].w));
    return fminf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xFFFF0000)));
}

// Returns for each element the value of smaller magnitude, with an undefined sign. A number is preferred to NaN.
template <class T> __device__ __forceinline__ Eight<T> smaller8(const Eight<T>& a, const Eight<T>& b) {
    Eight<T> c;
#pragma unroll
    for (int i = 0; i < 8; i++) store(&c.at[i], fminf(fabsf(load(a.at[i])), fabsf(load(b.at[i]))));
    return c;
}
template <> __device__ __forceinline__ Eight<bf16> smaller8<bf16>(const Eight<bf16>& a, const Eight<bf16>& b) {
    const uint4 u = a.words[0], v = b.words[0];
    Eight<bf16> c;
    c.words[0] = make_uint4(smaller_pair(u.x, v.x), smaller_pair(u.y, v.y), smaller_pair(u.z, v.z), smaller_pair(u.w, v.w));
    return c;
}

// Returns for each element the value of larger magnitude, with an undefined sign. A number is preferred to NaN.
template <class T> __device__ __forceinline__ Eight<T> larger8(const Eight<T>& a, const Eight<T>& b) {
    Eight<T> c;
#pragma unroll
    for (int i = 0; i < 8; i++) store(&c.at[i], fmaxf(fabsf(load(a.at[i])), fabsf(load(b.at[i]))));
    return c;
}
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b) {
    u32 c;
    BY_MAGNITUDE("max", "bf16x2", c, a, b);
    return c;
}
template <> __device__ __forceinline__ Eight<bf16> larger8<bf16>(const Eight<bf16>& a, const Eight<bf16>& b) {
    const uint4 u = a.words[0], v = b.words[0];
    Eight<bf16> c;
    c.words[0] = make_uint4(larger_pair(u.x, v.x), larger_pair(u.y, v.y), larger_pair(u.z, v.z), larger_pair(u.w, v.w));
    return c;
}
// Partial amax of eight values in 32 bits: a pair of BF16 values, or one F32 value. `fold` combines two partial amaxes; `unfolded` returns the amax.
template <class T> __device__ __forceinline__ u32 folded8(const Eight<T>& e) { return __float_as_uint(largest8(e)); }
template <class T> __device__ __forceinline__ u32 fold(u32 a, u32 b) { return max(a, b); }
template <class T> __device__ __forceinline__ float unfolded(u32 x) { return __uint_as_float(x); }
template <> __device__ __forceinline__ u32 fold<bf16>(u32 a, u32 b) { return larger_pair(a, b); }
template <> __device__ __forceinline__ u32 folded8<bf16>(const Eight<bf16>& e) {
    return larger_pair(larger_pair(e.words[0].x, e.words[0].y), larger_pair(e.words[0].z, e.words[0].w));
}
template <> __device__ __forceinline__ float unfolded<bf16>(u32 x) {
    return fmaxf(0.0f, fmaxf(fabsf(__uint_as_float(x << 16)), fabsf(__uint_as_float(x & 0xFFFF0000))));
}
template <> __device__ __forceinline__ float largest8<bf16>(const Eight<bf16>& e) { return unfolded<bf16>(folded8(e)); }

// Returns the eight elements of the lane `lane ^ bits`.
template <class T> __device__ __forceinline__ Eight<T> shuffled8(Eight<T> e, int bits) {
#pragma unroll
    for (int w = 0; w < sizeof(T) / 2; w++) {
        e.words[w].x = __shfl_xor_sync(0xFFFFFFFF, e.words[w].x, bits);
        e.words[w].y = __shfl_xor_sync(0xFFFFFFFF, e.words[w].y, bits);
        e.words[w].z = __shfl_xor_sync(0xFFFFFFFF, e.words[w].z, bits);
        e.words[w].w = __shfl_xor_sync(0xFFFFFFFF, e.words[w].w, bits);
    }
    return e;
}

// Returns whether all addresses are aligned to 16 bytes. Null counts as aligned.
template <class... P> __device__ __forceinline__ bool aligned(const P*... p) { return ((u64(p) | ...) & 15) == 0; }

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014), as in random/cpu.rs.
__device__ __forceinline__ u64 hash(u64 x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// A saved activation [R, C] (ops/compress) that stores its values.
template <class T> struct Exact {
    const T* x;
    int C;
    typedef Eight<T> Raw;
    __device__ __forceinline__ Raw fetch(u64 row, int c) const { return load8(x + row * C + c); }
    __device__ __forceinline__ Eight<T> values(const Raw& raw) const { return raw; }
    __device__ __forceinline__ T value(u64 row, int c) const { return x[row * C + c]; }
    // Returns whether eight elements can be loaded as a vector at multiples of eight after any multiple of `n`, a divisor of C.
    __device__ __forceinline__ bool wide(int n) const { return n % 8 == 0 && aligned(x); }
};

// A saved activation [R, C] that stores E4M3 codes, and one biased exponent per 16 neighbours of a row. Exponent 255 means NaN; its codes are zeros.
template <class T> struct Compressed {
    const e4m3* codes;
    const unsigned char* scale_inv;
    int C;
    struct Raw { Eight<e4m3> codes; u32 exponent; };
    __device__ __forceinline__ int groups() const { return (C + 15) / 16; }
    __device__ __forceinline__ u32 exponent(u64 row, int c) const { return scale_inv[row * groups() + c / 16]; }
    __device__ __forceinline__ Raw fetch(u64 row, int c) const { return {load8(codes + row * C + c), exponent(row, c)}; }
    __device__ __forceinline__ Eight<T> values(const Raw& raw) const {
        // Exponent 255 gives infinity, and zero times infinity is NaN.
        const float power = __uint_as_float(raw.exponent << 23);
        float v[8];
        unpack8(raw.codes, v);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= power;
        return pack8<T>(v);
    }
    __device__ __forceinline__ T value(u64 row, int c) const {
        Raw raw = {{}, exponent(row, c)};
        raw.codes.at[0] = codes[row * C + c];
        return values(raw).at[0];
    }
    __device__ __forceinline__ bool wide(int n) const { return n % 16 == 0 && aligned(codes); }
};

// Returns the bits of the largest absolute value of eight elements. NaN is above infinity.
template <class T> __device__ __forceinline__ u32 largest_bits8(const Eight<T>& e) {
    float v[8];
    unpack8(e, v);
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(v[i]) & 0x7FFFFFFF);
    return largest;
}
// Returns the smallest exponent for which no code saturates, as in compress/cpu.rs.
__device__ __forceinline__ u32 smallest_scale_inv(u32 bits) {
    if (bits >= 0x7F800000) return 255;
    return max((int)((bits + 0x1FFFFF) >> 23) - 8, 1);
}
// Encodes eight values of a group with this exponent.
template <class T> __device__ __forceinline__ Eight<e4m3> compress8(const Eight<T>& e, u32 exponent) {
    if (exponent == 255) return {};
    const float scale = __uint_as_float((254 - exponent) << 23);
    float v[8];
    unpack8(e, v);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= scale;
    return pack8<e4m3>(v);
}
