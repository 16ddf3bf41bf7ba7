// Chunks of CHUNK rows of a segment, for the gated delta rule with keys and values of 128 elements in BF16. With the chunk's queries Q, keys K, values V,
// gates b = cumulative sum of g, G_ij = exp(b_i - b_j) for i >= j, and the state S before the chunk:
//
// L = tril(beta K K' o G, -1), T = (1 + L)^-1, U = T (beta V), W = T (beta e^b K), P = tril(Q K' o G),
// N = U - W S, O = e^b Q S + P N, and the state after the chunk is e^(b_last) S + (e^(b_last - b) K)' N. (Yang et al. 2024, arXiv:2412.06464)
//
// `delta_prepare` writes the panels of all chunks. Other kernels copy these panels.

#define SLICE (128 * 128)         // bytes of a panel of a state: all rows, and 64 columns
#define KEYS_IMAGE (4 * PANEL)    // queries and keys of a chunk and key head: two panels each
#define HEAD_IMAGE (6 * PANEL)    // W, U (two panels each), P and T of a chunk and head
#define QUERY_FACTOR 0.08838834764831845f // 1 / sqrt(128)
#define AT_K (2 * PANEL)
#define AT_U (2 * PANEL)
#define AT_P (4 * PANEL)
#define AT_T (5 * PANEL)

// Reads or writes a slice of a state [128, 128] in F32. A warp group holds it transposed: `s[p]` has the keys 64 p to 64 p + 64 as columns.
__device__ __forceinline__ void read_state(float (&s)[2][32], const float* from, int slice) {
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int i = 0; i < 32; i++)
            s[p][i] = from ? from[(64 * p + column(i / 4) + i % 2) * 128 + 64 * slice + row(i / 2 % 2)] : 0.0f;
}
__device__ __forceinline__ void write_state(float* to, const float (&s)[2][32], int slice) {
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
        for (int i = 0; i < 32; i++) to[(64 * p + column(i / 4) + i % 2) * 128 + 64 * slice + row(i / 2 % 2)] = s[p][i];
}
