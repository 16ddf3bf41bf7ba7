struct Larger { __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; } };

// A number larger than the number of any finite element.
#define NOT_FINITE 0xFFFFFFFFFFFFFFFF

// A cluster of BLOCKS blocks reads a row, because one block per row would leave most of the GPU idle if rows are few. Without clusters, the first
// block of a row reads all of it. Grid (BLOCKS, rows). An element and its column form one number. These numbers have the order of the elements; among
// equal elements, the smallest column has the largest number.
#if __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(BLOCKS, 1, 1)
#define READERS BLOCKS
#else
#define CLUSTER
#define READERS 1
#endif
extern "C" __global__ void CLUSTER argmax(int* at, const float* x, int C) {
    if (blockIdx.x >= READERS) return;
    const float* row = x + (u64)blockIdx.y * C;
    u64 best = 0;
#if __CUDA_ARCH__ >= 900
    __shared__ u64 of_blocks[BLOCKS];
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
    start_successors();
    wait_for_predecessors();
    const auto see = [&](float x, int c) {
        // Adding zero makes the two zeros equal.
        const u32 bits = __float_as_uint(x + 0.0f);
        const u32 ordered = bits >> 31 ? ~bits : bits | 0x80000000;
        const u64 both = (bits & 0x7FFFFFFF) < 0x7F800000 ? (u64)ordered << 32 | (0xFFFFFFFF - c) : NOT_FINITE;
        best = both > best ? both : best;
    };
    const int start = blockIdx.x * blockDim.x + threadIdx.x, step = READERS * blockDim.x, eights = C % 8 == 0 && aligned(x) ? C / 8 : 0;
#pragma unroll 4
    for (int g = start; g < eights; g += step) {
        const Eight<f32> eight = load8(row + 8 * g);
#pragma unroll
        for (int i = 0; i < 8; i++) see(eight.at[i], 8 * g + i);
    }
    for (int c = 8 * eights + start; c < C; c += step) see(row[c], c);
    best = block_reduce(best, Larger());
#if __CUDA_ARCH__ >= 900
    // Here all blocks of the cluster have started.
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x == 0) {
        asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address_in(0, of_blocks + blockIdx.x)), "l"(best) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (blockIdx.x > 0) return;
    if (threadIdx.x == 0) for (int b = 0; b < BLOCKS; b++) best = Larger()(best, of_blocks[b]);
#endif
    if (threadIdx.x > 0) return;
    at[blockIdx.y] = best == NOT_FINITE || C == 0 ? -1 : (int)(0xFFFFFFFF - (u32)best);
}
