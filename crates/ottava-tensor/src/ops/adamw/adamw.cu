// Many parameters in one launch. Compiled without contraction, so each operation rounds as on the CPU.
// `S` is the type of the moments, `G` that of the gradient. `W` is the type of the weights that are updated: f32, or bf16, which
// are rounded up or down by chance. `X` is the type of the weights that layers read: that of a copy, or `W` where `copy` is null.

// What changes from step to step, as in mod.rs.
struct Scalars {
    double learning_rate;
    u64 step;
    float step_size, take1, beta2, take2, correction2, epsilon, max_norm, unscale;
};

struct Tensors {
    W* weight;
    X* copy;
    S *m, *v;
    const G* grad;
    u64 seed;
    double weight_decay;
};

// As many parameters as the arguments of a kernel hold; both numbers are also in cuda.rs. `end` counts blocks.
struct Part {
    Tensors of;
    float* amax;
    u64 n, end;
};
struct Parts { Part at[48]; };

struct CastPart {
    Tensors of;
    unsigned char *codes, *transposed;
    float* scale_inv;
    union {
        const float* scale;             // one per tensor, which is given
        float* transposed_scale_inv;    // of blocks
    };
    int rows, columns;
    u32 slot, end;
};
struct CastParts { CastPart at[38]; };

// What all elements of a parameter share.
struct Update {
    float clip, keep, step_size, take1, beta2, take2, correction2, epsilon, inverse2;
    u64 seed;
    bool usual;
};

// Reciprocal, quotient and root by the compiler's own steps, without its test of each operand for exponents where they would not
// do and the branch after it: `update8` makes one test for all. `r` is the reciprocal of `x`.
__device__ __forceinline__ float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}
__device__ __forceinline__ float quotient(float a, float x, float r) {
    float q = a * r;
    q = __fmaf_rn(r, __fmaf_rn(-x, q, a), q);
    // One correction leaves about one quotient in 10^8 a bit off.
    return __fmaf_rn(r, __fmaf_rn(-x, q, a), q);
}
// Of any number that is not infinite: small ones are multiplied by a power of two and back, both exactly.
__device__ __forceinline__ float root(float x) {
    const bool small = x < 0x1p-80f;
    if (small) x *= 0x1p80f;
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    float y = x * r;
    y = __fmaf_rn(__fmaf_rn(-y, y, x), r * 0.5f, y);
    if (small) y *= 0x1p-40f;
    return x == 0.0f ? x : y;
}

__device__ __forceinline__ bool finite(float x) { return fabsf(x) <= 3.402823466e38f; }

__device__ __forceinline__ Update update_of(const Tensors& of, const Scalars& s, float norm) {
    const float clip = (s.max_norm == 0.0f ? 1.0f : fminf(s.max_norm / (norm * s.unscale + 1e-6f), 1.0f)) * s.unscale;
    const float keep = (float)(1.0 - s.learning_rate * of.weight_decay);
    const bool usual = s.correction2 >= 0x1p-20f && s.correction2 <= 1.0f && s.epsilon >= 0x1p-50f && s.epsilon <= 1.0f;
    return {clip, keep, s.step_size, s.take1, s.beta2, s.take2, s.correction2, s.epsilon, reciprocal(s.correction2), hash(of.seed ^ hash(s.step)), usual};
}

// Up with the probability of the dropped bits: as many random bits are added, and what they carry over stays. A hash has the bits
// of four elements: one for each would cost more than the memory.
__device__ __forceinline__ u64 bits_of_four(u64 seed, u64 i) { return hash(seed ^ (i / 4)); }
__device__ __forceinline__ float by_chance(float x, u64 four, int i) {
    return __uint_as_float(__float_as_uint(x) + (u32)(four >> (16 * (i % 4)) & 0xFFFF) & 0xFFFF0000);
}

// What layers read.
__device__ __forceinline__ const X* read(const Tensors& of) { return of.copy ? of.copy : (const X*)of.weight; }

// One element.
__device__ __forceinline__ void update1(const Tensors& of, u64 i, const Update& how) {
    const float g = load(of.grad[i]) * how.clip, m0 = load(of.m[i]);
    const float m = m0 + (g - m0) * how.take1, v = load(of.v[i]) * how.beta2 + g * g * how.take2;
    float w = load(of.weight[i]) * how.keep - how.step_size * (m / (sqrtf(v) / how.correction2 + how.epsilon));
    if (sizeof(W) == 2 && finite(w)) w = by_chance(w, bits_of_four(how.seed, i), i % 4);
    store(&of.m[i], m);
    store(&of.v[i], v);
    store(&of.weight[i], w);
    if (of.copy) store(&of.copy[i], w);
}

// What an update reads of eight elements, from a multiple of eight on, at addresses for wide accesses.
struct Raw {
    Eight<G> g;
    Eight<W> w;
    Eight<S> m, v;
};
__device__ __forceinline__ void fetch(Raw& raw, const Tensors& of, u64 at) {
    raw.g = load8(of.grad + at);
    raw.w = load8(of.weight + at);
    raw.m = load8(of.m + at);
    raw.v = load8(of.v + at);
}

// Updates them. False, and nothing is written, where one of them is out of the ordinary. `w`: the new weights as layers read them.
__device__ __forceinline__ bool update8(const Raw& raw, const Tensors& of, u64 at, const Update& how, float* w) {
    float m[8], v[8], g[8], nothing = 0.0f;
    const u64 four[2] = {bits_of_four(how.seed, at), bits_of_four(how.seed, at + 4)};
    bool exact = true;
    unpack8(raw.g, g);
    unpack8(raw.w, w);
    unpack8(raw.m, m);
    unpack8(raw.v, v);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        g[i] *= how.clip;
        m[i] = m[i] + (g[i] - m[i]) * how.take1;
        v[i] = v[i] * how.beta2 + g[i] * g[i] * how.take2;
        const float denominator = quotient(root(v[i]), how.correction2, how.inverse2) + how.epsilon;
        const float q = quotient(m[i], denominator, reciprocal(denominator));
        const float decayed = w[i] * how.keep, step = how.step_size * q;
        w[i] = decayed - step;
        // A quotient is right unless it is tiny, and then it is far from changing a weight of ordinary size.
        exact &= fabsf(q) >= 0x1p-40f || fabsf(step) < fabsf(decayed) * 0x1p-30f;
        // Infinity and NaN make it NaN.
        nothing = __fmaf_rn(w[i], 0.0f, nothing);
        if (sizeof(W) == 2) w[i] = by_chance(w[i], four[i / 4], i);
    }
    if (!(exact && nothing == 0.0f)) return false;
    store8(of.m + at, pack8<S>(m));
    store8(of.v + at, pack8<S>(v));
    store8(of.weight + at, pack8<W>(w));
    if (sizeof(X) < sizeof(W)) {
        const Eight<X> copy = pack8<X>(w);
        store8(of.copy + at, copy);
        unpack8(copy, w);
    }
    return true;
}

// Updates the first `valid` of eight elements one by one; `wide` where they are all and at addresses for wide accesses. In `w`, what
// does not exist is zero.
__device__ __forceinline__ void one_by_one(const Tensors& of, u64 at, int valid, bool wide, const Update& how, float* w) {
#pragma unroll 1
    for (int i = 0; i < valid; i++) update1(of, at + i, how);
    unpack8(fetch8(read(of) + at, valid, wide), w);
}

__device__ __forceinline__ bool aligned(const Tensors& of) { return aligned(of.weight, of.copy, of.m, of.v, of.grad); }

// Each block updates `chunk` elements of a parameter, a multiple of eight, and raises the amax of its weights where there is one.
extern "C" __global__ void __launch_bounds__(256) adamw(const float* norm, const Scalars* scalars, u64 chunk, const __grid_constant__ Parts parts) {
    if (!finite(*norm)) return;
    int t = 0;
    while (blockIdx.x >= parts.at[t].end) t++;
    const Part& part = parts.at[t];
    const Update how = update_of(part.of, *scalars, *norm);
    const u64 start = (blockIdx.x - (t > 0 ? parts.at[t - 1].end : 0)) * chunk, end = min(start + chunk, part.n);
    const bool together = aligned(part.of);
    float largest = 0.0f;
    for (u64 at = start + 8 * threadIdx.x; at < end; at += 8 * blockDim.x) {
        const int valid = min(end - at, 8ull);
        const bool wide = together && valid == 8;
        bool done = false;
        float w[8];
        if (wide && how.usual) {
            Raw raw;
            fetch(raw, part.of, at);
            done = update8(raw, part.of, at, how, w);
        }
        if (!done) one_by_one(part.of, at, valid, wide, how, w);
#pragma unroll
        for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(w[i]));
    }
    block_raise(part.amax, largest);
}

// Each block updates a tile of a matrix and casts its new weights. The loads under way want more registers than more blocks bring.
extern "C" __global__ void __launch_bounds__(256, sizeof(W) == 4 ? 2 : 3)
adamw_cast(const float* norm, const Scalars* scalars, float* amax, u64* saturated, u64* underflowed, u64* elements, float epsilon,
           float bound, int power_of_two, const __grid_constant__ CastParts parts) {
    if (!finite(*norm)) return;
    int t = 0;
    while (blockIdx.x >= parts.at[t].end) t++;
    const CastPart& part = parts.at[t];
    const Update how = update_of(part.of, *scalars, *norm);
    Destination to = {part.codes, part.transposed, part.scale_inv, nullptr, amax + part.slot, saturated + part.slot, underflowed + part.slot,
                      elements + part.slot};
    to.rows = part.rows;
    to.columns = part.columns;
    to.pitch = padded_length(part.columns);
    to.transposed_pitch = padded_length(part.rows);
    if constexpr (SHARING == PerTensor) {
        to.scale = part.scale;
    } else {
        // Rows of scales are padded to multiples of 4.
        to.scale_pitch = (part.columns + 4 * TILE - 1) / (4 * TILE) * 4;
        to.transposed_scale_pitch = (part.rows + 4 * TILE - 1) / (4 * TILE) * 4;
        to.transposed_scale_inv = part.transposed_scale_inv;
        to.epsilon = epsilon;
        to.bound = bound;
        to.power_of_two = power_of_two;
    }
    const int block = blockIdx.x - (t > 0 ? parts.at[t - 1].end : 0), across = max((to.columns + TILE - 1) / TILE, 1);
    const int row0 = block / across * TILE, column0 = block % across * TILE, column = column0 + eight_column();
    const int valid = min(to.columns - column, 8);
    const bool together = to.columns % 8 == 0 && aligned(part.of);
    Seen seen;
    const float scale = given_scale(to);
    const TileCast<FORMAT> tile = {to, tiles_of_the_launch[0], seen, row0, column0};
    // What the next row needs is on its way while this one is computed.
    Raw next;
    const auto fetch_row = [&](int sweep) {
        const int row = row0 + tile_row(sweep);
        if (together && sweep < 8 && row < to.rows && valid > 0) fetch(next, part.of, (u64)row * to.columns + column);
    };
    fetch_row(0);
#pragma unroll 1
    for (int sweep = 0; sweep < 8; sweep++) {
        const Raw raw = next;
        const int row = row0 + tile_row(sweep);
        fetch_row(sweep + 1);
        Eight<X> eight = {};
        if (row < to.rows && valid > 0) {
            const u64 at = (u64)row * to.columns + column;
            float w[8];
            if (!(together && how.usual && update8(raw, part.of, at, how, w))) one_by_one(part.of, at, valid, together, how, w);
            eight = pack8<X>(w);
        }
        tile.cast(tile_row(sweep), eight_column(), eight, scale);
    }
    tile.finish();
    measure(to, seen, block == 0, [&] { tile.flush(); });
}
