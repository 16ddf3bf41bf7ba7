// Casts whole rows in one launch, without a transposed copy. A row stays in registers, and its number of columns is a multiple of eight.
// A block, or a cluster of blocks (`Row` in quantize/cuda.rs), casts one row. The grid covers all padded rows.
//
// Each thread holds EIGHTS vectors of eight values ("eights"). Vector k of a thread starts at column `row_column(k)`, so a warp has 256 consecutive
// columns. EIGHTS is one for few rows, to use more threads per row, and ROW_EIGHTS for many rows, to keep more rows in flight.
__device__ __forceinline__ int cast_row_number() { return blockIdx.x >> __ffs(blocks_of_cluster()) - 1; }
template <int EIGHTS> __device__ __forceinline__ int row_column(int k) { return 8 * (threadIdx.x + blockDim.x * (block_of_cluster() * EIGHTS + k)); }

// The amaxes of the warps of a cluster (up to eight blocks of 16 warps), and the barrier at which the amaxes arrive.
struct ClusterAmaxes { u32 warps[8 * 16]; u64 arrived; };
__device__ __forceinline__ ClusterAmaxes& amaxes_of_row() {
    __shared__ ClusterAmaxes amaxes;
    return amaxes;
}

// Lets the next kernel start, initializes the barrier of the cluster's amaxes, and waits for the preceding kernels.
__device__ __forceinline__ void start_row() {
    start_successors();
#if __CUDA_ARCH__ >= 900
    if (blocks_of_cluster() > 1) {
        if (threadIdx.x == 0) {
            u64* const arrived = &amaxes_of_row().arrived;
            barrier_init(arrived, 1);
            barrier_expect(arrived, blocks_of_cluster() * (blockDim.x / 32) * 4);
            barriers_are_initialized();
        }
        cluster_sync();
    }
#endif
    wait_for_predecessors();
}

// Returns whether this block's row is unused. Only after `start_row`.
__device__ __forceinline__ bool skips_row(const Destination& to) { return skips(to, cast_row_number(), blockIdx.x == 0); }

// Returns the maximum of `x` (`x` >= 0) over all threads of the row. Each warp sends its maximum to every block of the cluster, because a cluster
// barrier after plain stores would cost a GPU-wide fence.
__device__ __forceinline__ float row_amax(float x) {
#if __CUDA_ARCH__ >= 900
    const u32 blocks = blocks_of_cluster(), lane = threadIdx.x % 32;
    if (blocks > 1) {
        ClusterAmaxes& amaxes = amaxes_of_row();
        u32 bits = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(x));
        if (lane < blocks) send_word(amaxes.warps + threadIdx.x / 32 * blocks + block_of_cluster(), bits, &amaxes.arrived, lane);
        barrier_wait(&amaxes.arrived, 0);
#pragma unroll 1
        for (int w = lane; w < blockDim.x / 32 * blocks; w += 32) bits = max(bits, amaxes.warps[w]);
        return __uint_as_float(__reduce_max_sync(0xFFFFFFFF, bits));
    }
#endif
    return block_amax(x);
}

// Finds the scale of this block's row and casts the row. Rows beyond the matrix, and eights beyond the columns, are zeros.
template <int EIGHTS> __device__ __forceinline__ void cast_row(const Destination& to, const Eight<X> (&values)[EIGHTS]) {
    const int row = cast_row_number();
    float largest = 0.0f;
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) largest = fmaxf(largest, largest8(values[k]));
    const float amax = row_amax(largest), flagged = flagged_scale<FORMAT>(to, amax);
    Seen seen;
    seen.amax = amax;
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        const int column = row_column<EIGHTS>(k);
        if (column >= padded(to.columns)) continue;
        const bool inside = row < to.rows && column < to.columns;
        *(uint2*)(to.codes + (u64)row * to.pitch + column) = inside ? encode8_by_own<FORMAT>(values[k], flagged, seen) : make_uint2(0, 0);
    }
    if (row_column<EIGHTS>(0) == 0) to.scale_inv[row] = 1.0f / fabsf(flagged);
    if (to.amax) measure(to, seen, [] {});
}
