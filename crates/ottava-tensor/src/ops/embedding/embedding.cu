// Grid over tokens; threads stride over channels.
extern "C" __global__ void embedding(X* y, const X* table, const int* ids, int channels) {
    const X* row = table + (u64)ids[blockIdx.x] * channels;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) y[(u64)blockIdx.x * channels + c] = row[c];
}

// Grid over tokens: the block of an id's first token adds up all tokens with that id, in order, so that no atomics are
// needed and the sum is always the same. Threads stride over channels.
extern "C" __global__ void embedding_gradient(float* dtable, const X* dy, const int* ids, int tokens, int channels) {
    const int first = blockIdx.x, id = ids[first];
    int earlier = 0;
    for (int t = threadIdx.x; t < first; t += blockDim.x) earlier |= ids[t] == id;
    if (__syncthreads_or(earlier)) return;
    for (int c = threadIdx.x; c < channels; c += blockDim.x) {
        float sum = dtable[(u64)id * channels + c];
        for (int t = first; t < tokens; t++)
            if (ids[t] == id) sum += load(dy[(u64)t * channels + c]);
        dtable[(u64)id * channels + c] = sum;
    }
}
