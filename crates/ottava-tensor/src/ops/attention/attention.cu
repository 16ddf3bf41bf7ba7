#define INFINITY __int_as_float(0x7F800000)
// The plain kernels support every type and head size. The scores of one query are in shared memory.
// The address of a head is base + row · stride + head · dim. With GENERAL, the kernels support every spec. Without it, they support only causal
// attention of fused queries, keys and values; then `stride`, `seq_len` and `dim` are the strides, lengths and head sizes of queries, keys and
// values.

// The documents of a batch. Document d has the tokens at[d] .. at[d + 1], counted over all sequences. Unused entries at the end are the number of
// tokens.
// If `at` is null, each sequence is one document.
struct Documents { const int* at; int count; };

// Returns the index of a token's document.
__device__ __forceinline__ int document_of(const Documents& documents, int token) {
    int low = 0, high = documents.count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (documents.at[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

// Return the first key of the document of query i of sequence b, and the end of its keys.
__device__ __forceinline__ int first_of_document(const Documents& documents, int b, int i, int keys) {
    return documents.at ? max(0, documents.at[document_of(documents, b * keys + i)] - b * keys) : 0;
}
__device__ __forceinline__ int end_of_document(const Documents& documents, int b, int i, int keys) {
    return documents.at ? min(keys, documents.at[document_of(documents, b * keys + i) + 1] - b * keys) : keys;
}

// SPEC: the parameters of all kernels, which are fields of AttentionSpec and AttentionInput. 0 means no window or no soft cap.
// FIRST_KEY, END_OF_KEYS: the range of keys that query i of sequence b sees.
// FIRST_QUERY, END_OF_QUERIES: the range of queries that see key j.
#ifdef GENERAL
#define SPEC                                                                                                                 \
    int stride, int o_stride, int seq_len, int heads, int group, int dim, float scale, const int *cu_seqlens, int documents, \
        int k_stride, int v_stride, int key_len, int value_dim, int first_query, int causal, int window, float soft_cap
#define FIRST_KEY max(first_of_document({cu_seqlens, documents}, b, first_query + i, key_len), window ? first_query + i + 1 - window : 0)
#define END_OF_KEYS                                                                                                  \
    (causal ? min(key_len, first_query + i + 1)                                                                      \
            : min(end_of_document({cu_seqlens, documents}, b, first_query + i, key_len), window ? first_query + i + window : key_len))
#define FIRST_QUERY                                                                                                       \
    max(0, (causal ? j : max(first_of_document({cu_seqlens, documents}, b, j, key_len), window ? j + 1 - window : 0)) - first_query)
#define END_OF_QUERIES                                                                                              \
    min(min(seq_len, cu_seqlens ? end_of_document({cu_seqlens, documents}, b, j, key_len) - first_query : seq_len), \
        window ? j + window - first_query : seq_len)
// The score from the product of a query and a key, and the derivative of the score by this product.
#define SCORE(PRODUCT) (soft_cap > 0.0f ? soft_cap * tanhf((PRODUCT) * scale / soft_cap) : (PRODUCT) * scale)
#define SLOPE(SCORE) (soft_cap > 0.0f ? scale * (1.0f - (SCORE) / soft_cap * ((SCORE) / soft_cap)) : scale)
#else
#define SPEC int stride, int o_stride, int seq_len, int heads, int group, int dim, float scale, const int *cu_seqlens, int documents
#define FIRST_KEY first_of_document({cu_seqlens, documents}, b, i, seq_len)
#define END_OF_KEYS (i + 1)
#define FIRST_QUERY j
#define END_OF_QUERIES end_of_document({cu_seqlens, documents}, b, j, seq_len)
#define SCORE(PRODUCT) ((PRODUCT) * scale)
#define SLOPE(SCORE) scale
#define k_stride stride
#define v_stride stride
#define key_len seq_len
#define value_dim dim
#endif

// Computes one query of one head. Grid (queries of a sequence, heads, sequences). Shared memory: one float per key.
extern "C" __global__ void attention(X* o, float* lse, const X* q, const X* k, const X* v, SPEC) {
    extern __shared__ float p[];
    const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, end = END_OF_KEYS;
    const int first = FIRST_KEY;
    const X* query = q + (u64)(b * seq_len + i) * stride + h * dim;
    const X* key = k + (u64)b * key_len * k_stride + h / group * dim;
    const X* value = v + (u64)b * key_len * v_stride + h / group * value_dim;
    float largest = -INFINITY;
    for (int j = first + threadIdx.x; j < end; j += blockDim.x) {
        float dot = 0.0f;
        for (int d = 0; d < dim; d++) dot += load(query[d]) * load(key[(u64)j * k_stride + d]);
        p[j] = SCORE(dot);
        largest = fmaxf(largest, p[j]);
    }
    largest = block_max(largest);
    float sum = 0.0f;
    for (int j = first + threadIdx.x; j < end; j += blockDim.x) {
        p[j] = expf(p[j] - largest);
        sum += p[j];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) lse[((u64)b * heads + h) * seq_len + i] = largest + logf(sum);
    for (int d = threadIdx.x; d < value_dim; d += blockDim.x) {
        float out = 0.0f;
        for (int j = first; j < end; j++) out += p[j] / sum * load(value[(u64)j * v_stride + d]);
        store(&o[(u64)(b * seq_len + i) * o_stride + h * value_dim + d], out);
    }
}

// Computes the product of a query and a key of `dim` elements, and the product of a gradient of the output and a value.
__device__ __forceinline__ void products(const X* query, const X* key, int dim, const X* dout, const X* value, int dim_of_values,
                                         float& product, float& dp) {
#ifdef GENERAL
    for (int d = 0; d < dim; d++) product += load(query[d]) * load(key[d]);
    for (int d = 0; d < dim_of_values; d++) dp += load(dout[d]) * load(value[d]);
#else
    for (int d = 0; d < dim; d++) {
        product += load(query[d]) * load(key[d]);
        dp += load(dout[d]) * load(value[d]);
    }
#endif
}

// Computes delta = Σ do · o for each query and head. Grid (queries, heads, sequences).
extern "C" __global__ void row_products(float* delta, const X* d_o, const X* o, int o_stride, int seq_len, int heads, int dim) {
    const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z;
    const u64 at = (u64)(b * seq_len + i) * o_stride + h * dim;
    float sum = 0.0f;
    for (int d = threadIdx.x; d < dim; d += blockDim.x) sum += load(d_o[at + d]) * load(o[at + d]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) delta[((u64)b * heads + h) * seq_len + i] = sum;
}

// Computes the gradient of one query. Grid (queries, heads, sequences). Shared memory: one float per key.
extern "C" __global__ void attention_dq(X* dq, const X* q, const X* k, const X* v, const X* d_o, const float* lse, const float* delta, SPEC) {
    extern __shared__ float ds[];
    const int i = blockIdx.x, h = blockIdx.y, b = blockIdx.z, end = END_OF_KEYS;
    const int first = FIRST_KEY;
    const u64 sequence = (u64)b * seq_len, stat = ((u64)b * heads + h) * seq_len + i;
    const X* query = q + (sequence + i) * stride + h * dim;
    const X* dout = d_o + (sequence + i) * o_stride + h * value_dim;
    const X* key = k + (u64)b * key_len * k_stride + h / group * dim;
    const X* value = v + (u64)b * key_len * v_stride + h / group * value_dim;
    for (int j = first + threadIdx.x; j < end; j += blockDim.x) {
        float product = 0.0f, dp = 0.0f;
        products(query, key + (u64)j * k_stride, dim, dout, value + (u64)j * v_stride, value_dim, product, dp);
        const float score = SCORE(product);
        ds[j] = expf(score - lse[stat]) * (dp - delta[stat]) * SLOPE(score);
    }
    __syncthreads();
    for (int d = threadIdx.x; d < dim; d += blockDim.x) {
        float sum = 0.0f;
        for (int j = first; j < end; j++) sum += ds[j] * load(key[(u64)j * k_stride + d]);
        store(&dq[(sequence + i) * stride + h * dim + d], sum);
    }
}

// Computes the gradients of one key and its value, from all queries of the group that see the key. Grid (keys, key heads, sequences). Shared memory:
// two floats per query.
extern "C" __global__ void attention_dkv(X* dk, X* dv, const X* q, const X* k, const X* v, const X* d_o, const float* lse, const float* delta, SPEC) {
    extern __shared__ float p[];
    float* ds = p + seq_len;
    const int j = blockIdx.x, kv = blockIdx.y, b = blockIdx.z;
    const int first = FIRST_QUERY, end = END_OF_QUERIES;
    const u64 sequence = (u64)b * seq_len, row = (u64)b * key_len + j;
    const X* key = k + row * k_stride + kv * dim;
    const X* value = v + row * v_stride + kv * value_dim;
    // A thread keeps the sums of up to four channels in registers over all heads of the group.
    float sum_k[4] = {0, 0, 0, 0}, sum_v[4] = {0, 0, 0, 0};
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        __syncthreads();
        for (int i = first + threadIdx.x; i < end; i += blockDim.x) {
            const X* query = q + (sequence + i) * stride + h * dim;
            const X* dout = d_o + (sequence + i) * o_stride + h * value_dim;
            const u64 stat = ((u64)b * heads + h) * seq_len + i;
            float product = 0.0f, dp = 0.0f;
            products(query, key, dim, dout, value, value_dim, product, dp);
            const float score = SCORE(product);
            p[i] = expf(score - lse[stat]);
            ds[i] = p[i] * (dp - delta[stat]) * SLOPE(score);
        }
        __syncthreads();
        for (int c = 0; c < 4; c++) {
            const int d = threadIdx.x + c * blockDim.x;
            if (d >= max(dim, value_dim)) break;
            for (int i = first; i < end; i++) {
                if (d < dim) sum_k[c] += ds[i] * load(q[(sequence + i) * stride + h * dim + d]);
                if (d < value_dim) sum_v[c] += p[i] * load(d_o[(sequence + i) * o_stride + h * value_dim + d]);
            }
        }
    }
    for (int c = 0; c < 4; c++) {
        const int d = threadIdx.x + c * blockDim.x;
        if (d >= max(dim, value_dim)) break;
        if (d < dim) store(&dk[row * k_stride + kv * dim + d], sum_k[c]);
        if (d < value_dim) store(&dv[row * v_stride + kv * value_dim + d], sum_v[c]);
    }
}

// Computes the lengths of documents, and their offsets in tensors whose rows have `fused`, `output` and `heads` elements. Offsets are in elements.
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
