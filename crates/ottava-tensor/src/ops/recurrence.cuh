// What the backwards of recurrences share. A block of 256 threads has N elements of a state in each thread.

// Adds `v[j]` over the lanes of a warp; lane j keeps the sum of element j.
template <int N> __device__ __forceinline__ float sum_by_element(const float (&v)[N]) {
    float mine = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float sum = warp_sum(v[j]);
        if (threadIdx.x % 32 == j) mine = sum;
    }
    return mine;
}

// Write and read the elements, in the order of the threads. A thread reads only what it has written.
template <int N> __device__ __forceinline__ void keep(float* to, const float (&s)[N]) {
#pragma unroll
    for (int j = 0; j < N; j++) to[j * 256 + threadIdx.x] = s[j];
}
template <int N> __device__ __forceinline__ void recall(float (&s)[N], const float* from) {
#pragma unroll
    for (int j = 0; j < N; j++) s[j] = from[j * 256 + threadIdx.x];
}
