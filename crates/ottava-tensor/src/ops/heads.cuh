// Norms of heads. A group of `lanes` threads, a power of two, shares a head. A thread holds eight elements of the head. They are neighbours if `lanes`
// times eight is the size of a head. Otherwise they are every 32nd element, for heads of up to 256.

__device__ __forceinline__ float group_sum(float v, int lanes) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFF, v, offset);
    return v;
}

struct Head {
    int lane, dim;
    bool wide;
    __device__ __forceinline__ int column(int j) const { return wide ? lane * 8 + j : lane + 32 * j; }
    __device__ __forceinline__ void read(const X* from, float (&v)[8]) const {
        if (wide) return unpack8(load8(from + lane * 8), v);
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = column(j) < dim ? load(from[column(j)]) : 0.0f;
    }
    __device__ __forceinline__ void write(X* to, const float (&v)[8]) const {
        if (wide) return store8(to + lane * 8, pack8<X>(v));
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (column(j) < dim) store(&to[column(j)], v[j]);
    }
};
