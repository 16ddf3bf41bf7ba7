// With PART, the table has the `rows` tokens from `first_id` on.
#ifdef PART
#define AND_PART , int first_id, int rows
#define ROW(ID) ((ID) - first_id)
#define HAS(ID) ((u32)ROW(ID) < (u32)rows)
#else
#define AND_PART
#define ROW(ID) (ID)
#define HAS(ID) true
#endif

// Grid (tokens). Threads stride over channels, and over eights of channels if rows are aligned.
extern "C" __global__ void embedding(X* y, const X* table, const int* ids, int channels AND_PART) {
    X* to = y + (u64)blockIdx.x * channels;
    if (!HAS(ids[blockIdx.x])) {
        for (int c = threadIdx.x; c < channels; c += blockDim.x) store(&to[c], 0.0f);
        return;
    }
    const X* from = table + (u64)ROW(ids[blockIdx.x]) * channels;
    const int eights = channels % 8 == 0 && aligned(y, table) ? channels / 8 : 0;
#pragma unroll 4
    for (int g = threadIdx.x; g < eights; g += blockDim.x) store8(to + 8 * g, load8(from + 8 * g));
    for (int c = 8 * eights + threadIdx.x; c < channels; c += blockDim.x) to[c] = from[c];
}

// Grid (tokens), 512 threads. If a token is the first with its id, its block sums all tokens with this id in order and without atomics, so the result
// is deterministic. The block lists these tokens, testing four candidates per thread at a time. Then each thread sums eight channels.
#define LISTED 2048
extern "C" __global__ void __launch_bounds__(512) embedding_gradient(float* dtable, const X* dy, const int* ids, int tokens, int channels AND_PART) {
    __shared__ int list[LISTED];
    __shared__ int counts[16];
    const int first = blockIdx.x, id = ids[first], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (!HAS(id)) return;
    int earlier = 0;
#pragma unroll 8
    for (int t = threadIdx.x; t < first; t += blockDim.x) earlier |= ids[t] == id;
    if (__syncthreads_or(earlier)) return;
    const bool wide = channels % 8 == 0 && aligned(dtable, dy);
    for (int start = first; start < tokens; start += LISTED) {
        u32 hits = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int t = start + 4 * threadIdx.x + k;
            if (t < tokens && ids[t] == id) hits |= 1u << k;
        }
        // Here all threads have finished reading the previous list.
        if (!__syncthreads_or(hits)) continue;
        // A prefix sum over the matches keeps the list in order.
        int at = __popc(hits), listed = 0;
        for (int offset = 1; offset < 32; offset *= 2) {
            const int before = __shfl_up_sync(0xFFFFFFFF, at, offset);
            if (lane >= offset) at += before;
        }
        if (lane == 31) counts[warp] = at;
        __syncthreads();
        at -= __popc(hits);
        for (int w = 0; w < 16; w++) {
            if (w < warp) at += counts[w];
            listed += counts[w];
        }
#pragma unroll
        for (int k = 0; k < 4; k++) if (hits >> k & 1) list[at++] = start + 4 * threadIdx.x + k;
        __syncthreads();
        for (int c = 8 * threadIdx.x; c < channels; c += 8 * blockDim.x) {
            float* to = dtable + (u64)ROW(id) * channels + c;
            if (wide) {
                Eight<float> sum = load8(to);
#pragma unroll 4
                for (int i = 0; i < listed; i++) {
                    const Eight<X> x = load8(dy + (u64)list[i] * channels + c);
#pragma unroll
                    for (int j = 0; j < 8; j++) sum.at[j] += load(x.at[j]);
                }
                store8(to, sum);
            } else {
                for (int j = 0; j < 8 && c + j < channels; j++) {
                    float sum = to[j];
                    for (int i = 0; i < listed; i++) sum += load(dy[(u64)list[i] * channels + c + j]);
                    to[j] = sum;
                }
            }
        }
    }
}
