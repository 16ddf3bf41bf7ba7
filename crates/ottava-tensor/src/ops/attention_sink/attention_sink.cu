// Returns the index of a token and head in `lse`, which is `[B, H, S]`, or `[B·S, H]` if seq_len is 0.
__device__ __forceinline__ u64 index_of(int token, int head, int heads, int seq_len) {
    return seq_len ? ((u64)(token / seq_len) * heads + head) * seq_len + token % seq_len : (u64)token * heads + head;
}

// Adds the sinks to the softmax of one token. Grid (tokens). Shared memory: one float per head, the share of the keys in the softmax.
extern "C" __global__ void attention_sink(X* o, float* lse, const X* sinks, int heads, int dim, int seq_len) {
    extern __shared__ float shares[];
    for (int h = threadIdx.x; h < heads; h += blockDim.x) {
        float* const of_keys = &lse[index_of(blockIdx.x, h, heads, seq_len)];
        const float keys = *of_keys, sink = load(sinks[h]);
        shares[h] = 1.0f / (1.0f + expf(sink - keys));
        const float larger = keys > sink ? keys : sink, smaller = keys > sink ? sink : keys;
        *of_keys = larger + logf(1.0f + expf(smaller - larger));
    }
    __syncthreads();
    X* const row = o + (u64)blockIdx.x * heads * dim;
    const int width = heads * dim, eights = dim % 8 == 0 && aligned(o) ? width / 8 : 0;
    for (int g = threadIdx.x; g < eights; g += blockDim.x) {
        float v[8];
        unpack8(load8(row + 8 * g), v);
        const float share = shares[8 * g / dim];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] *= share;
        store8(row + 8 * g, pack8<X>(v));
    }
    for (int c = 8 * eights + threadIdx.x; c < width; c += blockDim.x) store(&row[c], load(row[c]) * shares[c / dim]);
}

// Computes partial gradients of one sink. Grid (heads, chunks of tokens), 8 warps. A warp processes every eighth token of the chunk, and the sums of
// the warps are added in order.
extern "C" __global__ void __launch_bounds__(256)
    sink_gradients(float* partial, const X* d_o, const X* o, const float* lse, const X* sinks, int heads, int dim, int seq_len, int tokens,
                   int chunk) {
    __shared__ float sums[8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.x;
    const int end = min(tokens, (int)(blockIdx.y + 1) * chunk);
    const float sink = load(sinks[head]);
    float sum = 0.0f;
    for (int token = blockIdx.y * chunk + warp; token < end; token += 8) {
        const u64 row = ((u64)token * heads + head) * dim;
        float delta = 0.0f;
        for (int d = lane; d < dim; d += 32) delta += load(d_o[row + d]) * load(o[row + d]);
        for (int bits = 1; bits < 32; bits *= 2) delta += __shfl_xor_sync(0xFFFFFFFF, delta, bits);
        sum -= expf(sink - lse[index_of(token, head, heads, seq_len)]) * delta;
    }
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    sum = 0.0f;
    for (int w = 0; w < 8; w++) sum += sums[w];
    partial[(u64)blockIdx.y * heads + head] = sum;
}
