#ifndef DIM
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
    const int token = blockIdx.x, sequence = batch.sequence_of(token, 1), lane = threadIdx.x % 32;
    if (sequence == sequences) return;
    const int position = batch.seen_by(token, sequence) - 1;
    for (int i = threadIdx.x / 32; i < 2 * kv_heads; i += blockDim.x / 32) {
        const u64 row = batch.row_of(sequence, position, kv_heads, i % kv_heads) + (u64)(i / kv_heads) * kv_heads * block_size;
        write(cache + row * dim, qkv + (u64)token * width + first + i * dim, scale_inv + row, dim, lane);
    }
}

// The value of a single element.
__device__ __forceinline__ float value_of(KV x) {
    Eight<KV> eight = {};
    eight.at[0] = x;
    float values[8];
    unpack8(eight, values);
    return values[0];
}

// Attention of one query head of one new token: other types and sizes than tensor cores take. Grid (tokens, heads), WARPS warps. A warp
// takes 32 tokens at a time: a lane has the score of one, then channels of the weighted sum.
extern "C" __global__ void __launch_bounds__(32 * WARPS) attend(X* o, const X* qkv, const KV* cache, const float* scale_inv,
                                                                const int* query_starts, const int* context_lens,
                                                                const int* block_tables, int sequences, int max_blocks,
                                                                int block_size, int heads, int kv_heads, int dim, float scale) {
    __shared__ float query[256], shared_out[WARPS][256], shared_stats[WARPS][2];
    const Batch batch = {query_starts, context_lens, block_tables, sequences, max_blocks, block_size};
    const int token = blockIdx.x, head = blockIdx.y, sequence = batch.sequence_of(token, 1);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv = head / (heads / kv_heads);
    X* const out = o + ((u64)token * heads + head) * dim;
    if (sequence == sequences) {
        for (int d = threadIdx.x; d < dim; d += 32 * WARPS) store(&out[d], 0.0f);
        return;
    }
    for (int d = threadIdx.x; d < 256; d += 32 * WARPS) {
        query[d] = d < dim ? load(qkv[(u64)token * (heads + 2 * kv_heads) * dim + head * dim + d]) * scale : 0.0f;
    }
    __syncthreads();
    const int seen = batch.seen_by(token, sequence);
    const u64 to_values = (u64)kv_heads * block_size;
    float largest = -INFINITY, sum = 0.0f, weighted[8] = {};
    for (int base = 32 * warp; base < seen; base += 32 * WARPS) {
        const u64 row = batch.row_of(sequence, min(base + lane, seen - 1), kv_heads, kv);
        float score = 0.0f;
        for (int d = 0; d < dim; d += 8) {
            float key[8];
            unpack8(fetch8(cache + row * dim + d, dim - d, dim % 8 == 0), key);
#pragma unroll
            for (int i = 0; i < 8; i++) score = fmaf(query[d + i], key[i], score);
        }
        if (IsCodes<KV>::value) score *= scale_inv[row];
        if (base + lane >= seen) score = -INFINITY;
        float most = fmaxf(largest, score);
        for (int bits = 1; bits < 32; bits *= 2) most = fmaxf(most, __shfl_xor_sync(FULL, most, bits));
        const float subtracted = base_of(most), factor = power(largest - subtracted);
        float p = power(score - subtracted);
        largest = most;
        sum = fmaf(sum, factor, p);
        if (IsCodes<KV>::value) p *= scale_inv[row + to_values];
#pragma unroll
        for (int i = 0; i < 8; i++) weighted[i] *= factor;
        for (int k = 0; k < min(32, seen - base); k++) {
            const float weight = __shfl_sync(FULL, p, k);
            const KV* const value = cache + (__shfl_sync(FULL, row, k) + to_values) * dim;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (i * 32 + lane < dim) weighted[i] = fmaf(weight, value_of(value[i * 32 + lane]), weighted[i]);
            }
        }
    }
    for (int bits = 1; bits < 32; bits *= 2) sum += __shfl_xor_sync(FULL, sum, bits);
    shared_stats[warp][0] = largest;
    shared_stats[warp][1] = sum;
#pragma unroll
    for (int i = 0; i < 8; i++) shared_out[warp][i * 32 + lane] = weighted[i];
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += 32 * WARPS) {
        float most = -INFINITY, all = 0.0f, value = 0.0f;
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared_stats[w][0]);
        for (int w = 0; w < WARPS; w++) {
            const float factor = power(shared_stats[w][0] - base_of(most));
            all = fmaf(factor, shared_stats[w][1], all);
            value = fmaf(factor, shared_out[w][d], value);
        }
        store(&out[d], value / all);
    }
}
#endif
