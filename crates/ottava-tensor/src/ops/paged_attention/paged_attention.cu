#ifndef DIM
#ifndef BOUNDED
// Converts a key or value to the type of the cache. For codes, multiplies by `scale`, and sets `x` to the dequantized value. Elements that
// already have the type of the cache keep their bits.
template <class T> __device__ __forceinline__ Eight<T> stored(Eight<X>& x, float scale) {
    float values[8];
    unpack8(x, values);
    return pack8<T>(values);
}
template <> __device__ __forceinline__ Eight<X> stored<X>(Eight<X>& x, float scale) { return x; }
template <> __device__ __forceinline__ Eight<e4m3> stored<e4m3>(Eight<X>& x, float scale) {
    float values[8];
    unpack8(x, values);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] *= scale;
    const Eight<e4m3> codes = pack8<e4m3>(values);
    unpack8(codes, values);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] *= 1.0f / scale;
    x = pack8<X>(values);
    return codes;
}

// Writes keys and values to the cache. If `positions` is given, first rotates queries and keys of `qkv` in place. With codes, overwrites `qkv` with
// the dequantized values. Grid (tokens, heads of `qkv` over heads of a block). 2^log2_lanes lanes share a head, each with eight pairs. With WIDE, all
// eights are whole and aligned. This keeps the code after the wait short and nearly without jumps; the instruction cache does not hold this code yet.
template <bool NEIGHBOURS, bool WIDE>
__device__ __forceinline__ void append(KV* cache, float* scale_inv, X* qkv, const float* table, const int* positions, Batch batch,
                                       int heads, int kv_heads, int dim, int log2_lanes) {
    start_successors();
    const int token = blockIdx.x, all = heads + 2 * kv_heads, half = (dim + 1) / 2, lane = threadIdx.x & ((1 << log2_lanes) - 1);
    const int head = (blockIdx.y * blockDim.x + threadIdx.x) >> log2_lanes;
    // The two eights of a head that a lane has. The last lane may have fewer elements.
    const int at = at_of<NEIGHBOURS>(8 * lane), apart = distance<NEIGHBOURS>(half, 8);
    const int counts[2] = {(NEIGHBOURS ? dim : half) - at, dim - at - apart}, pairs = half - 8 * lane;
    const bool works = head < all && pairs > 0;
    const bool turns = works && positions && head < heads + kv_heads, keeps = works && head >= heads;
    X* const from = qkv + ((u64)token * all + head) * dim + at;
    // Angles and positions are constant in a pass. The position is loaded together with the place, which is also found by loads.
    const int position = turns ? positions[token] : 0;
    const Place place = batch.find(token, 1);
    const bool stores = keeps && place.sequence < batch.sequences;
    Eight<f32> cosines, sines;
    if (turns) {
        const float* const angles = table + (u64)position * dim + 8 * lane;
        cosines = fetch8(angles, pairs, WIDE), sines = fetch8(angles + half, pairs, WIDE);
    }
    const int part = head >= heads + kv_heads;
    u64 row = 0;
    if (stores) {
        row = batch.row_of(place.sequence, place.seen_by(token) - 1, kv_heads, head - heads - part * kv_heads);
        row += (u64)part * kv_heads * batch.block_size;
    }
    wait_for_predecessors();
    Eight<X> x[2] = {};
    if (turns || keeps) {
#pragma unroll
        for (int i = 0; i < 2; i++) x[i] = fetch8(from + i * apart, counts[i], WIDE);
    }
    if (turns) turn8<NEIGHBOURS>(x[0], x[1], cosines, sines, 1.0f);
    float scale = 1.0f;
    if (IsCodes<KV>::value) {
        float largest = fmaxf(largest8(x[0]), largest8(x[1]));
        for (int bits = 1; bits < 1 << log2_lanes; bits *= 2) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, bits));
        // Computes the scale as `current_scale` in quantize/cpu.rs, limited to the largest float.
        const bool usable = largest > 0.0f && largest < INFINITY;
        if (usable) scale = fminf(max_finite<e4m3>() / largest, __int_as_float(0x7F7FFFFF));
        if (stores && lane == 0) scale_inv[row] = 1.0f / scale;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (stores) put8(cache + row * dim + at + i * apart, stored<KV>(x[i], scale), counts[i], WIDE);
        if (turns || (stores && IsCodes<KV>::value)) put8(from + i * apart, x[i], counts[i], WIDE);
    }
}

#define APPEND(NAME, NEIGHBOURS)                                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) NAME(                                                              \
        KV* cache, float* scale_inv, X* qkv, const float* table, const int* positions, const int* query_starts,                 \
        const int* context_lens, const int* cached_lens, const int* block_tables, int sequences, int max_blocks,                \
        int block_size, int heads, int kv_heads, int dim, int log2_lanes) {                                                     \
        const Batch batch = {query_starts, context_lens, cached_lens, block_tables, sequences, max_blocks, block_size};         \
        if (dim % 16 == 0 && aligned(qkv, cache, table))                                                                        \
            append<NEIGHBOURS, true>(cache, scale_inv, qkv, table, positions, batch, heads, kv_heads, dim, log2_lanes);         \
        else append<NEIGHBOURS, false>(cache, scale_inv, qkv, table, positions, batch, heads, kv_heads, dim, log2_lanes);       \
    }
APPEND(append_kv, false)
APPEND(append_kv_neighbours, true)

// Gives each document its own blocks of a cache. Document d begins at token at[d], or at d · length without `at`, and has the blocks from
// start / block_size + d on. Grid (documents · max_blocks / 256), 256 threads.
extern "C" __global__ void document_blocks(int* starts, int* lengths, int* block_tables, const int* at, int documents, int length, int max_blocks,
                                           int block_size, int blocks) {
    const u64 i = grid_start();
    if (i >= (u64)documents * max_blocks) return;
    const int document = i / max_blocks, start = at ? at[document] : document * length, end = at ? at[document + 1] : start + length;
    block_tables[i] = min(start / block_size + document + (int)(i % max_blocks), blocks - 1);
    if (i % max_blocks) return;
    starts[document] = start, lengths[document] = end - start;
    if (document == documents - 1) starts[documents] = end;
}
#endif

// Returns the value of a single element.
__device__ __forceinline__ float value_of(KV x) {
    Eight<KV> eight = {};
    eight.at[0] = x;
    float values[8];
    unpack8(eight, values);
    return values[0];
}

// Attention of one query head of one new token, for types and sizes that tensor cores do not support. Grid (tokens, heads), WARPS warps. A
// warp processes 32 tokens at a time. A lane computes the score of one token, then some channels of the weighted sum. Heads have up to LARGEST
// channels.
#define LARGEST 512
extern "C" __global__ void __launch_bounds__(32 * WARPS) attend(X* o, const X* qkv, const KV* cache, const float* scale_inv,
                                                                const X* sinks, const int* query_starts, const int* context_lens,
                                                                const int* cached_lens, const int* block_tables, int sequences,
                                                                int max_blocks, int block_size, int heads, int kv_heads, int dim, float scale BOUNDS) {
    start_successors();
    wait_for_predecessors();
    __shared__ float query[LARGEST], shared_out[WARPS][LARGEST], shared_stats[WARPS][2];
    const Batch batch = {query_starts, context_lens, cached_lens, block_tables, sequences, max_blocks, block_size};
    const int token = blockIdx.x, head = blockIdx.y;
    const Place place = batch.find(token, 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv = head / (heads / kv_heads);
    X* const out = o + ((u64)token * heads + head) * dim;
    if (place.sequence == sequences) {
        for (int d = threadIdx.x; d < dim; d += 32 * WARPS) store(&out[d], 0.0f);
        return;
    }
    for (int d = threadIdx.x; d < LARGEST; d += 32 * WARPS) {
        query[d] = d < dim ? load(qkv[(u64)token * (heads + 2 * kv_heads) * dim + head * dim + d]) * scale : 0.0f;
    }
    __syncthreads();
    const Bounds bounds = BOUNDS_OF_KERNEL;
    // Blocks before the first key may belong to other sequences by now.
    const int seen = place.seen_by(token), first = bounds.first(seen) / 16 * 16;
    const u64 to_values = (u64)kv_heads * block_size;
    float largest = -INFINITY, sum = 0.0f, weighted[LARGEST / 32] = {};
    for (int base = first + 32 * warp; base < seen; base += 32 * WARPS) {
        const u64 row = batch.row_of(place.sequence, min(base + lane, seen - 1), kv_heads, kv);
        float score = 0.0f;
        for (int d = 0; d < dim; d += 8) {
            float key[8];
            unpack8(fetch8(cache + row * dim + d, dim - d, dim % 8 == 0), key);
#pragma unroll
            for (int i = 0; i < 8; i++) score = fmaf(query[d + i], key[i], score);
        }
        if (IsCodes<KV>::value) score *= scale_inv[row];
        if (bounds.cap > 0.0f) score = bounds.cap * tanhf(score / bounds.cap);
        if (bounds.hides(base + lane, seen)) score = -INFINITY;
        float most = fmaxf(largest, score);
        for (int bits = 1; bits < 32; bits *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, bits));
        const float subtracted = base_of(most), factor = power(largest - subtracted);
        float p = power(score - subtracted);
        largest = most;
        sum = fmaf(sum, factor, p);
        if (IsCodes<KV>::value) p *= scale_inv[row + to_values];
#pragma unroll
        for (int i = 0; i < LARGEST / 32; i++) weighted[i] *= factor;
        for (int k = 0; k < min(32, seen - base); k++) {
            const float weight = __shfl_sync(FULL, p, k);
            const KV* const value = cache + (__shfl_sync(FULL, row, k) + to_values) * dim;
#pragma unroll
            for (int i = 0; i < LARGEST / 32; i++) {
                if (i * 32 + lane < dim) weighted[i] = fmaf(weight, value_of(value[i * 32 + lane]), weighted[i]);
            }
        }
    }
    for (int bits = 1; bits < 32; bits *= 2) sum += __shfl_xor_sync(FULL, sum, bits);
    shared_stats[warp][0] = largest;
    shared_stats[warp][1] = sum;
#pragma unroll
    for (int i = 0; i < LARGEST / 32; i++) shared_out[warp][i * 32 + lane] = weighted[i];
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += 32 * WARPS) {
        float most = -INFINITY, all = 0.0f, value = 0.0f;
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared_stats[w][0]);
        for (int w = 0; w < WARPS; w++) {
            const float factor = power(shared_stats[w][0] - base_of(most));
            all = fmaf(factor, shared_stats[w][1], all);
            value = fmaf(factor, shared_out[w][d], value);
        }
        if (sinks) all += sink_power(sinks[head], most);
        store(&out[d], value / all);
    }
}
#endif
