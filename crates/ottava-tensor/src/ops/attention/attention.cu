#define INFINITY __int_as_float(0x7F800000)
// The plain kernels: correct for every type and head size, with the scores of one query in shared memory.
// Addresses of a head: base + row · stride + head · dim.

// Documents of a batch: document d has the tokens at[d] .. at[d + 1] of all sequences; unused entries at the end are the number of tokens.
// Without documents, `at` is null and a sequence is one document.
struct Documents { const int* at; int count; };

// The number of the document of a token.
__device__ __forceinline__ int document_of(const Documents& documents, int token) {
    int low = 0, high = documents.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (documents.at[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

// The first key that query i of sequence b sees.
__device__ __forceinline__ int first_key(const Documents& documents, int b, int i, int seq_len) {
    return documents.at ? max(0, documents.at[document_of(documents, b * seq_len + i)] - b * seq_len) : 0;
}

// One past the last query of sequence b that sees key j.
__device__ __forceinline__ int end_of_queries(const Documents& documents, int b, int j, int seq_len) {
    return documents.at ? min(seq_len, documents.at[document_of(documents, b * seq_len + j) + 1] - b * seq_len) : seq_len;
}

// Grid (queries of a sequence, heads, sequences). Query i sees the keys of its document up to its own. Shared memory: one float per key.
extern "C" __global__ void attention(X* o, float* lse, const X* q, const X* k, const X* v, int stride, int o_stride, int seq_len,
                                     int heads, int group, int dim, float scale, const int* cu_seqlens, int documents) {
    extern __shared__ float p[];
    const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, keys = i + 1;
    const int first = first_key({cu_seqlens, documents}, b, i, seq_len);
    const X* query = q + (u64)(b * seq_len + i) * stride + h * dim;
    const X* key = k + (u64)b * seq_len * stride + h / group * dim;
    const X* value = v + (u64)b * seq_len * stride + h / group * dim;
    float largest = -INFINITY;
    for (int j = first + threadIdx.x; j < keys; j += blockDim.x) {
        float dot = 0.0f;
        for (int d = 0; d < dim; d++) dot += load(query[d]) * load(key[(u64)j * stride + d]);
        p[j] = dot * scale;
        largest = fmaxf(largest, p[j]);
    }
    largest = block_max(largest);
    float sum = 0.0f;
    for (int j = first + threadIdx.x; j < keys; j += blockDim.x) {
        p[j] = expf(p[j] - largest);
        sum += p[j];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) lse[((u64)b * heads + h) * seq_len + i] = largest + logf(sum);
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float out = 0.0f;
        for (int j = first; j < keys; j++) out += p[j] / sum * load(value[(u64)j * stride + d]);
        store(&o[(u64)(b * seq_len + i) * o_stride + h * dim + d], out);
    }
}

// delta = Σ do · o per query and head; grid (queries, heads, sequences).
extern "C" __global__ void row_products(float* delta, const X* d_o, const X* o, int o_stride, int seq_len, int heads, int dim) {
    const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const u64 at = (u64)(b * seq_len + i) * o_stride + h * dim;
    float sum = 0.0f;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) sum += load(d_o[at + d]) * load(o[at + d]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) delta[((u64)b * heads + h) * seq_len + i] = sum;
}

// Grid (queries, heads, sequences). Shared memory: one float per key.
extern "C" __global__ void attention_dq(X* dq, const X* q, const X* k, const X* v, const X* d_o, const float* lse, const float* delta,
                                        int stride, int o_stride, int seq_len, int heads, int group, int dim, float scale,
                                        const int* cu_seqlens, int documents) {
    extern __shared__ float ds[];
    const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const int first = first_key({cu_seqlens, documents}, b, i, seq_len);
    const u64 sequence = (u64)b * seq_len, stat = ((u64)b * heads + h) * seq_len + i;
    const X* query = q + (sequence + i) * stride + h * dim;
    const X* dout = d_o + (sequence + i) * o_stride + h * dim;
    const X* key = k + sequence * stride + h / group * dim;
    const X* value = v + sequence * stride + h / group * dim;
    for (int j = first + threadIdx.x; j <= i; j += blockDim.x) {
        float score = 0.0f, dp = 0.0f;
        for (int d = 0; d < dim; d++) {
            score += load(query[d]) * load(key[(u64)j * stride + d]);
            dp += load(dout[d]) * load(value[(u64)j * stride + d]);
        }
        ds[j] = expf(score * scale - lse[stat]) * (dp - delta[stat]) * scale;
    }
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = 0.0f;
        for (int j = first; j <= i; j++) sum += ds[j] * load(key[(u64)j * stride + d]);
        store(&dq[(sequence + i) * stride + h * dim + d], sum);
    }
}

// Grid (keys, key heads, sequences): all queries of the group that see the key. Shared memory: two floats per query.
extern "C" __global__ void attention_dkv(X* dk, X* dv, const X* q, const X* k, const X* v, const X* d_o, const float* lse, const float* delta,
                                         int stride, int o_stride, int seq_len, int heads, int group, int dim, float scale,
                                         const int* cu_seqlens, int documents) {
    extern __shared__ float p[];
    float* ds = p + seq_len;
    const int j = blockIdx.x, kv = blockIdx.y, b = blockIdx.z;
    const int end = end_of_queries({cu_seqlens, documents}, b, j, seq_len);
    const u64 sequence = (u64)b * seq_len;
    const X* key = k + (sequence + j) * stride + kv * dim;
    const X* value = v + (sequence + j) * stride + kv * dim;
    // Up to four channels per thread stay in registers over all heads of the group.
    float sum_k[4] = {0, 0, 0, 0}, sum_v[4] = {0, 0, 0, 0};
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        __syncthreads();
        for (int i = j + threadIdx.x; i < end; i += blockDim.x) {
            const X* query = q + (sequence + i) * stride + h * dim;
            const X* dout = d_o + (sequence + i) * o_stride + h * dim;
            const u64 stat = ((u64)b * heads + h) * seq_len + i;
            float score = 0.0f, dp = 0.0f;
            for (int d = 0; d < dim; d++) {
                score += load(query[d]) * load(key[d]);
                dp += load(dout[d]) * load(value[d]);
            }
            p[i] = expf(score * scale - lse[stat]);
            ds[i] = p[i] * (dp - delta[stat]) * scale;
        }
        __syncthreads();
        for (int c = 0; c < 4; c++) {
            const int d = threadIdx.x + c * blockDim.x;
            if (d >= dim) break;
            for (int i = j; i < end; i++) {
                sum_k[c] += ds[i] * load(q[(sequence + i) * stride + h * dim + d]);
                sum_v[c] += p[i] * load(d_o[(sequence + i) * o_stride + h * dim + d]);
            }
        }
    }
    for (int c = 0; c < 4; c++) {
        const int d = threadIdx.x + c * blockDim.x;
        if (d >= dim) break;
        store(&dk[(sequence + j) * stride + kv * dim + d], sum_k[c]);
        store(&dv[(sequence + j) * stride + kv * dim + d], sum_v[c]);
    }
}

// Lengths of documents, and where they begin, in elements, in tensors whose rows have `fused`, `output` and `heads` elements.
extern "C" __global__ void document_offsets(int* lengths, long long* of_fused, long long* of_output, long long* of_rows, const int* at,
                                            int documents, int fused, int output, int heads) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i <= documents; i += gridDim.x * blockDim.x) {
        const long long start = at[i];
        if (i < documents) lengths[i] = at[i + 1] - at[i];
        of_fused[i] = start * fused;
        of_output[i] = start * output;
        of_rows[i] = start * heads;
    }
}
