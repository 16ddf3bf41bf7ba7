#define INFINITY __int_as_float(0x7F800000)
// KV is the type of the cache: X, bf16, or e4m3 codes with a scale per token and head.

template <class T> struct IsCodes { static const bool value = false; };
template <> struct IsCodes<e4m3> { static const bool value = true; };

// Where new tokens belong, and where their keys and values are; fields as of PagedBatch.
struct Batch {
    const int *query_starts, *context_lens, *block_tables;
    int sequences, max_blocks, block_size;

    // The sequence of a token; `sequences` for padding.
    __device__ __forceinline__ int sequence_of(int token) const {
        if (token >= query_starts[sequences]) return sequences;
        int low = 0, high = sequences;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (query_starts[middle] <= token) low = middle;
            else high = middle;
        }
        return low;
    }
    // The number of tokens that a new token sees, itself included.
    __device__ __forceinline__ int seen_by(int token, int sequence) const {
        return context_lens[sequence] - (query_starts[sequence + 1] - 1 - token);
    }
    // The row of a position among the keys of a head, in rows of `dim` elements; its value is `kv_heads · block_size` rows later.
    __device__ __forceinline__ u64 row_of(int sequence, int position, int kv_heads, int head) const {
        const u64 block = block_tables[(u64)sequence * max_blocks + position / block_size];
        return (block * 2 * kv_heads + head) * block_size + position % block_size;
    }
};

// Writes a key or value to the cache; of codes, `from` gets what they mean.
__device__ __forceinline__ void write(X* to, X* from, float* scale_inv, int dim, int lane) {
    for (int d = lane; d < dim; d += 32) to[d] = from[d];
}
template <class T> __device__ __forceinline__ void write(T* to, X* from, float*, int dim, int lane) {
    for (int d = lane; d < dim; d += 32) store(&to[d], load(from[d]));
}
template <> __device__ __forceinline__ void write<e4m3>(e4m3* to, X* from, float* scale_inv, int dim, int lane) {
    float largest = 0.0f;
    for (int d = lane; d < dim; d += 32) largest = fmaxf(largest, fabsf(load(from[d])));
    for (int offset = 16; offset > 0; offset /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFF, largest, offset));
    // As `current_scale` in quantize/cpu.rs, limited to the largest float.
    const bool usable = largest > 0.0f && largest < INFINITY;
    const float scale = usable ? fminf(max_finite<e4m3>() / largest, __int_as_float(0x7F7FFFFF)) : 1.0f;
    for (int d = lane; d < dim; d += 32) {
        Eight<e4m3> code = {};
        code.at[0].bits = encode<e4m3>(load(from[d]) * scale, 0.0f);
        to[d] = code.at[0];
        float values[8];
        unpack8(code, values);
        store(&from[d], values[0] * (1.0f / scale));
    }
    if (lane == 0) *scale_inv = 1.0f / scale;
}

// Grid of tokens; each warp writes the key or value of a head at a time. Of `qkv`, keys begin at column `first`.
extern "C" __global__ void append_kv(KV* cache, float* scale_inv, X* qkv, const int* query_starts, const int* context_lens,
                                     const int* block_tables, int sequences, int max_blocks, int block_size, int kv_heads, int dim,
                                     int width, int first) {
    const Batch batch = {query_starts, context_lens, block_tables, sequences, max_blocks, block_size};
    const int token = blockIdx.x, sequence = batch.sequence_of(token), lane = threadIdx.x % 32;
    if (sequence == sequences) return;
    const int position = batch.seen_by(token, sequence) - 1;
    for (int i = threadIdx.x / 32; i < 2 * kv_heads; i += blockDim.x / 32) {
        const u64 row = batch.row_of(sequence, position, kv_heads, i % kv_heads) + (u64)(i / kv_heads) * kv_heads * block_size;
        write(cache + row * dim, qkv + (u64)token * width + first + i * dim, scale_inv + row, dim, lane);
    }
}

// A power of two; 2^-infinity is 0.
__device__ __forceinline__ float power(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#define THREADS 128
// Keys of a lane that are loaded at once.
#define AHEAD 4

// A softmax in progress: the largest score (times log2 e), the sum of powers, and the weighted values of eight channels.
struct Running {
    float largest, sum, out[8];

    // Makes room for a larger maximum. Returns what to subtract from scores.
    __device__ __forceinline__ float raise(float to) {
        to = fmaxf(largest, to);
        const float base = to == -INFINITY ? 0.0f : to, factor = power(largest - base);
        largest = to;
        sum *= factor;
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] *= factor;
        return base;
    }
    // Adds what the lane `lane ^ bits` has.
    __device__ __forceinline__ void merge(int bits) {
        const float other = __shfl_xor_sync(0xFFFFFFFF, largest, bits), other_sum = __shfl_xor_sync(0xFFFFFFFF, sum, bits);
        float values[8];
#pragma unroll
        for (int i = 0; i < 8; i++) values[i] = __shfl_xor_sync(0xFFFFFFFF, out[i], bits);
        const float factor = power(other - raise(other));
        sum = fmaf(factor, other_sum, sum);
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = fmaf(factor, values[i], out[i]);
    }
};

// Attention of up to G query heads that share a key head, of one new token, over `split` tokens of its context. Grid (splits, key heads
// times chunks of G query heads, new tokens). A key is read by `lanes` neighbouring lanes, eight channels each, so a warp reads several
// keys at once and each key is read once. Splits beyond the context leave at once; one that has all of it writes `o`, others a part:
// `parts` [tokens, heads, splits, dim] and `stats` [tokens, heads, splits, 2] with the largest score and the sum.
template <int G> __device__ __forceinline__ void attend(X* o, float* parts, float* stats, const X* qkv, const KV* cache,
                                                        const float* scale_inv, Batch batch, int heads, int kv_heads, int dim,
                                                        int lanes, int split, float scale) {
    __shared__ float shared_out[THREADS / 32][G][256], shared_stats[THREADS / 32][G][2];
    const int token = blockIdx.z, sequence = batch.sequence_of(token);
    if (sequence == batch.sequences) return;
    const int context = batch.seen_by(token, sequence), begin = blockIdx.x * split, end = min(context, begin + split);
    if (begin >= end) return;
    const int group = heads / kv_heads, chunks = (group + G - 1) / G, kv = blockIdx.y / chunks, skip = blockIdx.y % chunks * G;
    const int first = kv * group + skip, count = min(G, group - skip), width = (heads + 2 * kv_heads) * dim;
    const int lane = threadIdx.x % lanes, reader = threadIdx.x / lanes, readers = THREADS / lanes;
    // Channels of this lane; other than eight where heads are not in whole eights, which are read one by one.
    const int channels = dim - lane * 8;
    const bool active = channels > 0, wide = dim % 8 == 0;

    float q[G][8];
    Running running[G];
#pragma unroll
    for (int g = 0; g < G; g++) {
        running[g] = {-INFINITY};
        Eight<X> query = {};
        if (active && g < count) query = fetch8(qkv + (u64)token * width + (first + g) * dim + lane * 8, channels, wide);
        unpack8(query, q[g]);
#pragma unroll
        for (int i = 0; i < 8; i++) q[g][i] *= scale;
    }
    const u64 to_values = (u64)kv_heads * batch.block_size;
    for (int base = begin; base < end; base += AHEAD * readers) {
        Eight<KV> keys[AHEAD] = {}, values[AHEAD] = {};
        float key_scales[AHEAD], value_scales[AHEAD], scores[G][AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            const int position = base + a * readers + reader;
            key_scales[a] = value_scales[a] = 1.0f;
            if (position >= end) continue;
            const u64 row = batch.row_of(sequence, position, kv_heads, kv);
            if (active) {
                keys[a] = fetch8(cache + row * dim + lane * 8, channels, wide);
                values[a] = fetch8(cache + (row + to_values) * dim + lane * 8, channels, wide);
            }
            if (IsCodes<KV>::value) {
                key_scales[a] = scale_inv[row];
                value_scales[a] = scale_inv[row + to_values];
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            float key[8];
            unpack8(keys[a], key);
#pragma unroll
            for (int g = 0; g < G; g++) {
                float dot = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) dot = fmaf(q[g][i], key[i], dot);
                for (int offset = lanes / 2; offset > 0; offset /= 2) dot += __shfl_xor_sync(0xFFFFFFFF, dot, offset);
                scores[g][a] = base + a * readers + reader < end ? dot * key_scales[a] : -INFINITY;
            }
        }
#pragma unroll
        for (int g = 0; g < G; g++) {
            float largest = scores[g][0];
#pragma unroll
            for (int a = 1; a < AHEAD; a++) largest = fmaxf(largest, scores[g][a]);
            const float subtracted = running[g].raise(largest);
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                const float p = power(scores[g][a] - subtracted);
                running[g].sum += p;
                scores[g][a] = p * value_scales[a];
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            float value[8];
            unpack8(values[a], value);
#pragma unroll
            for (int g = 0; g < G; g++) {
#pragma unroll
                for (int i = 0; i < 8; i++) running[g].out[i] = fmaf(scores[g][a], value[i], running[g].out[i]);
            }
        }
    }
    // Readers of a warp by shuffles, warps in shared memory.
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int g = 0; g < G; g++) {
        for (int bits = lanes; bits < 32; bits *= 2) running[g].merge(bits);
        if (threadIdx.x % 32 < lanes && active) {
            for (int i = 0; i < 8; i++) shared_out[warp][g][lane * 8 + i] = running[g].out[i];
            shared_stats[warp][g][0] = running[g].largest;
            shared_stats[warp][g][1] = running[g].sum;
        }
    }
    __syncthreads();
    for (int at = threadIdx.x; at < count * dim; at += THREADS) {
        const int g = at / dim, d = at % dim;
        float largest = -INFINITY, sum = 0.0f, out = 0.0f;
        for (int w = 0; w < THREADS / 32; w++) largest = fmaxf(largest, shared_stats[w][g][0]);
        for (int w = 0; w < THREADS / 32; w++) {
            const float factor = power(shared_stats[w][g][0] - largest);
            sum = fmaf(factor, shared_stats[w][g][1], sum);
            out = fmaf(factor, shared_out[w][g][d], out);
        }
        const u64 head = (u64)token * heads + first + g;
        if (context <= split) {
            store(&o[head * dim + d], out / sum);
            continue;
        }
        const u64 part = head * gridDim.x + blockIdx.x;
        parts[part * dim + d] = out;
        if (d == 0) {
            stats[part * 2] = largest;
            stats[part * 2 + 1] = sum;
        }
    }
}

// With so few registers that BLOCKS blocks run at once on a multiprocessor.
#define ATTEND(G, BLOCKS)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) attend_##G(                                                          \
        X* o, float* parts, float* stats, const X* qkv, const KV* cache, const float* scale_inv, const int* query_starts,      \
        const int* context_lens, const int* block_tables, int sequences, int max_blocks, int block_size, int heads,           \
        int kv_heads, int dim, int lanes, int split, float scale) {                                                            \
        const Batch batch = {query_starts, context_lens, block_tables, sequences, max_blocks, block_size};                     \
        attend<G>(o, parts, stats, qkv, cache, scale_inv, batch, heads, kv_heads, dim, lanes, split, scale);                   \
    }
ATTEND(1, 6)
ATTEND(2, 5)
ATTEND(4, 4)
ATTEND(8, 2)

// Merges the parts of contexts longer than `split`, in order. Grid (heads, new tokens), threads over channels.
extern "C" __global__ void merge_splits(X* o, const float* parts, const float* stats, const int* query_starts, const int* context_lens,
                                        int sequences, int heads, int dim, int split, int splits) {
    const Batch batch = {query_starts, context_lens, nullptr, sequences, 0, 0};
    const int token = blockIdx.y, sequence = batch.sequence_of(token);
    if (sequence == sequences) return;
    const int context = batch.seen_by(token, sequence), used = (context + split - 1) / split;
    if (used < 2) return;
    const u64 head = (u64)token * heads + blockIdx.x;
    const float* stat = stats + head * splits * 2;
    float largest = -INFINITY;
    for (int s = 0; s < used; s++) largest = fmaxf(largest, stat[2 * s]);
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = 0.0f, out = 0.0f;
        for (int s = 0; s < used; s++) {
            const float factor = power(stat[2 * s] - largest);
            sum = fmaf(factor, stat[2 * s + 1], sum);
            out = fmaf(factor, parts[(head * splits + s) * dim + d], out);
        }
        store(&o[head * dim + d], out / sum);
    }
}
